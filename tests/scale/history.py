"""Row: a history finds what was planted in it, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.history.made import bench_document, bench_rows, latencies, machine
from tests.scale.commands import Commands
from tests.scale.row import Missing, Row
from vitdeploy.errors import MissingPackageError

RESULTS, PLANTED_AT, SLOWDOWN = 300, 200, 1.05
# Series without a change beside the one that has one. About one series in a hundred has a change that chance made, such
# as four outliers in a row (docs/scale.md): the seeds are fixed, and these have none.
STEADY = range(101, 121)
NOISE = (0.02, 0.3, 0.3)


def slowdown(full: bool, work: Path, row: Row) -> None:
    """Of each result one row for each series; a new runtime comes with the slowdown of one of them."""
    from vitdeploy.history.files import append, require_packages
    from vitdeploy.history.row import open_place

    try:
        require_packages()
    except MissingPackageError as error:
        raise Missing("pip install 'vitdeploy[data]'") from error
    series = {"slowed": latencies(0, RESULTS, *NOISE, at=PLANTED_AT, factor=SLOWDOWN)}
    series |= {f"steady-{seed}": latencies(seed, RESULTS, *NOISE) for seed in STEADY}
    place = open_place(work / "history")
    for number in range(RESULTS):
        where = machine(openvino="2026.3.0" if number < PLANTED_AT else "2026.4.0")
        rows = [
            dataclasses.replace(each, model=name)
            for name, values in series.items()
            for each in bench_rows(float(values[number]), number, where)
        ]
        append(place, rows, bench_document(5.0))
    found = Commands(work)("history", work / "history", "--json").document()
    changes = {each["model"]: each["changes"] for each in found["series"]}
    row.check(len(changes) == 1 + len(STEADY) and found["results"] == RESULTS, "every result is read")
    at = [change["number"] for change in changes["slowed"]]
    row.check(len(at) == 1 and abs(at[0] - 1 - PLANTED_AT) <= 1, "found at the right result", f"at {at}")
    differences = [each["what"] for change in changes["slowed"] for each in change["differences"]]
    row.check(differences == ["runtime"], "told with what changed", f"{differences}")
    false = [name for name, each in changes.items() if name != "slowed" and each]
    row.check(not false, f"no false alarm in {len(STEADY)} series", ", ".join(false))
    row.seen["planted at"] = f"{PLANTED_AT + 1} of {RESULTS}, found at {', '.join(map(str, at))}"
