"""Progress on a terminal: one live line for each running phase; a finished phase leaves one line behind.

Rich redraws it at most twice a second, however often work is reported: some hundred bytes per second.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console as Terminal
from rich.progress import Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

REDRAWS_PER_SECOND = 2
BAR_CELLS = 20
# Narrower terminals have no bar, only numbers.
BAR_FROM = 80


@dataclass
class _Phase:
    """A step of the work. `owner` is the thread that reports it: its next phase ends this one."""

    text: str
    owner: int
    began: float
    task: TaskID
    done: int = 0
    total: int = 1
    changed: float = 0.0

    def update(self, done: int, total: int, now: float) -> None:
        if (done, total) != (self.done, self.total):
            self.done, self.total, self.changed = done, total, now

    @property
    def complete(self) -> bool:
        return self.done >= self.total

    def state(self, now: float) -> str:
        """ "12/48  7 s, 20 s left"; a finished phase has a fixed time and nothing left."""
        if self.complete:
            return f"{_count(self)}{spell(self.changed - self.began)}"
        left = ""
        if self.done > 0:
            seconds = (self.changed - self.began) / self.done * (self.total - self.done) - (now - self.changed)
            left = f", {spell(seconds)} left" if seconds >= 1 else ""
        return f"{_count(self)}{spell(now - self.began)}{left}"

    def last_line(self, now: float) -> str:
        """The last line; a phase that ended before its count was full has only its time."""
        return f"{self.text}  " + (self.state(now) if self.complete else spell(now - self.began))


class Live:
    """The live lines of one command; thread-safe."""

    def __init__(self, terminal: Terminal | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._terminal = terminal or Terminal(stderr=True, highlight=False)
        self._clock, self._lock = clock, threading.RLock()
        self._phases: dict[int, _Phase] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            _State(self),
            console=self._terminal,
            refresh_per_second=REDRAWS_PER_SECOND,
            transient=True,
        )

    def start(self) -> None:
        self._bars.start()

    def update(self, text: str, done: int, total: int) -> None:
        """Show `done` of `total` units of the phase `text`; a new phase ends the previous one of this thread."""
        with self._lock:
            now, owner = self._clock(), threading.get_ident()
            phase = self._phases.get(owner)
            if phase is None or phase.text != text:
                self._end(owner, now)
                phase = _Phase(text, owner, now, self._bars.add_task(text, total=None), changed=now)
                self._phases[owner] = phase
            phase.update(done, total, now)

    def stop(self) -> None:
        """Stop; running phases also leave their lines."""
        with self._lock:
            for owner in list(self._phases):
                self._end(owner, self._clock())
        self._bars.stop()

    def state(self, task: Task, width: int) -> str:
        """The part of the line after the text of a task."""
        with self._lock:
            phase = next((each for each in self._phases.values() if each.task == task.id), None)
            if phase is None:
                return ""
            state = phase.state(self._clock())
            if phase.total <= 1 or width < BAR_FROM:
                return state
            filled = BAR_CELLS * min(phase.done, phase.total) // phase.total
            return f"[{'#' * filled}{'.' * (BAR_CELLS - filled)}] {state}"

    def _end(self, owner: int, now: float) -> None:
        phase = self._phases.pop(owner, None)
        if phase is not None:
            self._bars.remove_task(phase.task)
            line = Text(phase.last_line(now), no_wrap=True, overflow="ellipsis")
            self._terminal.print(line, no_wrap=True, overflow="ellipsis")


class _State(ProgressColumn):
    """Count, time and time left."""

    def __init__(self, live: Live) -> None:
        super().__init__(Column(no_wrap=True))
        self._live = live

    def render(self, task: Task) -> Text:
        return Text(self._live.state(task, self._live._terminal.width))


def spell(seconds: float) -> str:
    """Seconds as text: "7 s", "3 min 05 s", "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _count(phase: _Phase) -> str:
    return f"{phase.done}/{phase.total}  " if phase.total > 1 else ""
