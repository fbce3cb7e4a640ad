"""Find the number of rows with which a model is fastest in INT8: see `search.rows`."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.progress import Progress
from vitdeploy.search.rows import RowTable, measure_rows
from vitdeploy.spec import decode, encode
from vitdeploy.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.stages.step import OPTIMIZE, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

ROWS_FILE = "rows.json"


def read_rows(folder: Path) -> RowTable:
    return decode(RowTable, read_json(folder / ROWS_FILE))


def rows_step(target: str) -> Step:
    """The number of rows that the job's float graph is fastest with in INT8."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        found = measure_rows(folders[OPTIMIZE].path / MODEL_FILE, target, progress=progress)
        write_json(out / ROWS_FILE, encode(found))

    return Step(
        f"rows {target}",
        "rows",
        write,
        {"target": target},
        (OPTIMIZE,),
        packages={**target_tools(target), **package_versions(("onnx-ir", "numpy"))},
        measured=True,
        usable=lambda folder: not read_json(folder / ROWS_FILE)["disturbed"],
    )
