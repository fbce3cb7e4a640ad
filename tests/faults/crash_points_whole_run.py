"""Figure: a crash at any moment of a whole `vitdeploy run`, with what a file system may lose; then the same command.

One run of a small model, with every stage, the bench and the bundle, is recorded. To look at every disk that a crash
may leave would take days, as each needs a run: so they are drawn (`drawn_crashes`), and the full form alone has them.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from tests.faults.crash import Crashed, drawn_crashes, recorded
from tests.faults.gate import Row
from tests.faults.kills import Judged, after, home_in, judged, undisturbed

SEED, POINTS, AT_END = 17, 100, 4


def run(full: bool, work: Path) -> list[Row]:
    row = Row("crash points of a whole run, then the same", 0)
    if not full:
        row.missing = "in the full form"
        return [row]
    home, record = home_in(work.resolve()), work.resolve() / "operations"
    expected, _ = undisturbed(home, record)
    before, operations = recorded(record)
    row.expected = min(POINTS, len(operations)) + AT_END
    for crashed in drawn_crashes(before, operations, SEED, POINTS, AT_END):
        for name in ("store", "out"):
            shutil.rmtree(home / name, ignore_errors=True)
        crashed.disk.write(home)
        row.add(crashed.told, *_judged(home, crashed, expected))
    return [row]


def _judged(home: Path, crashed: Crashed, expected: dict[str, str]) -> Judged:
    """What the crash has left, as after a kill; and what the same command makes of it."""
    found = judged(home, 0 if crashed.ended else -signal.SIGKILL, there=False)
    return after(home, expected) if found[0] == "clean" else found
