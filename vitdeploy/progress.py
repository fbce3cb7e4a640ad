"""How long work tells how far it is."""

from collections.abc import Callable

# (what is being done, how much is done, how much there is)
Progress = Callable[[str, int, int], None]


def silent(text: str, done: int, total: int) -> None:
    """No progress shown."""


class Counter:
    """Turns "so many more samples" into a progress report."""

    def __init__(self, progress: Progress, text: str, total: int) -> None:
        self.progress, self.text, self.total, self.done = progress, text, total, 0
        progress(text, 0, total)

    def __call__(self, samples: int) -> None:
        self.done += samples
        self.progress(self.text, self.done, self.total)
