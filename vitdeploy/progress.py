"""Progress reports of long work."""

from collections.abc import Callable

# (phase, units done, units in total)
Progress = Callable[[str, int, int], None]


def silent(text: str, done: int, total: int) -> None:
    """Show no progress."""


class Counter:
    """Turns increments into progress reports."""

    def __init__(self, progress: Progress, text: str, total: int) -> None:
        self.progress, self.text, self.total, self.done = progress, text, total, 0
        progress(text, 0, total)

    def __call__(self, samples: int) -> None:
        self.done += samples
        self.progress(self.text, self.done, self.total)
