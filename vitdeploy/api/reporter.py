"""Report the progress of long work: on a terminal, in a notebook, or as lines."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Protocol

from vitdeploy import limits
from vitdeploy.errors import visible


class Display(Protocol):
    """Where phases of the work are shown as they move."""

    def start(self) -> None: ...
    def update(self, text: str, done: int, total: int) -> None: ...
    def stop(self) -> None: ...


# After so many seconds without a line, where lines are all that is shown, one says that the work goes on.
SILENCE = 30.0


class Reporter:
    """Progress and notes of one call, on standard error. A context manager around the work.

    On a terminal, a phase of the work is one line that lives (rich, where it is installed), in a notebook a bar;
    elsewhere it is one line, when it begins, and one more after each half minute in which nothing else is said.
    """

    def __init__(self, *, verbose: int = 0, quiet: bool = False) -> None:
        self.verbose, self.quiet = verbose, quiet
        self._display: Display | None = None
        self._begun: set[str] = set()
        self._lock = threading.Lock()
        self._phase = ("", 0, 0)
        self._since = self._said = time.monotonic()
        self._ended = threading.Event()

    def progress(self, text: str, done: int, total: int) -> None:
        """`done` of `total` units of the phase `text`."""
        limits.phase(text)
        if self.quiet:
            return
        if self._display is not None:
            self._display.update(text, done, total)
            return
        with self._lock:
            new = text not in self._begun
            self._begun.add(text)
            if self._phase[0] != text:
                self._since = time.monotonic()
            self._phase = (text, done, total)
        if new:
            self._print(text)

    def note(self, text: str) -> None:
        """Show a line in addition to the result."""
        if not self.quiet:
            self._print(text)

    def detail(self, text: str) -> None:
        """A line for those who want to know more."""
        if self.verbose:
            self.note(text)

    def __enter__(self) -> Reporter:
        self._display = None if self.quiet else _display()
        if self._display is not None:
            self._display.start()
        elif not self.quiet:
            self._ended.clear()
            threading.Thread(target=self._beat, name="vitdeploy-progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None
        self._ended.set()

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        print(visible(text), file=sys.stderr, flush=True)

    def _beat(self) -> None:
        """Lines for long silences, until the work ends."""
        while not self._ended.wait(max(0.1, self._said + SILENCE - time.monotonic())):
            now = time.monotonic()
            if now < self._said + SILENCE:
                continue
            with self._lock:
                (text, done, total), since = self._phase, self._since
            if text:
                self._print(f"{text}: {now - since:.0f} s so far{f', {done} of {total}' if total > 1 else ''}")
            else:
                self._said = now


def reporting(progress: bool | Reporter) -> Reporter:
    """The reporter of a call: as it is given, or a new one, which is quiet for False."""
    return progress if isinstance(progress, Reporter) else Reporter(quiet=not progress)


def _display() -> Display | None:
    if in_notebook():
        from vitdeploy.api.notebook import Bars

        return Bars()
    if not sys.stderr.isatty():
        return None
    try:
        from vitdeploy.api.live import Live
    except ModuleNotFoundError:  # a device has no rich
        return None
    return Live()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")
