"""Progress in a notebook: a bar for each phase at work, drawn by the browser; phases that ended leave nothing."""

from __future__ import annotations

import html
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

SECONDS_BETWEEN = 0.2


class Bars:
    """The progress bars of one call; thread-safe. A thread's next phase ends the one before."""

    def __init__(self) -> None:
        self._phases: dict[int, tuple[str, int, int]] = {}
        self._handle: DisplayHandle | None = None
        self._drawn = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        from IPython.display import HTML, display  # which is there where there is a kernel

        self._handle = display(HTML(""), display_id=True)

    def update(self, text: str, done: int, total: int) -> None:
        with self._lock:
            before = self._phases.get(threading.get_ident())
            self._phases[threading.get_ident()] = (text, done, total)
            new = before is None or before[0] != text
            if new or done >= total or time.monotonic() - self._drawn >= SECONDS_BETWEEN:
                self._draw()

    def stop(self) -> None:
        with self._lock:
            self._phases.clear()
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(HTML("".join(_bar(*phase) for phase in self._phases.values())))


def _bar(text: str, done: int, total: int) -> str:
    count = f" {done}/{total}" if total > 1 else ""
    return f'<div><progress value="{done}" max="{max(total, 1)}"></progress> {html.escape(text)}{count}</div>'
