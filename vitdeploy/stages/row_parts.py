"""Find whether a placed model is faster with its rows in parts: see `search.row_parts`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from vitdeploy.progress import Progress
from vitdeploy.search.row_parts import measure_row_parts
from vitdeploy.spec import FloatRest, encode
from vitdeploy.stages.asked_rest import rest_of
from vitdeploy.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.stages.in_parts import PARTS_FILE
from vitdeploy.stages.step import Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions


def parts_step(candidate: Candidate, batch: int, rest: FloatRest | Literal["measured"] = "fp32") -> Step:
    """The parts in which the rows of a candidate's placement are fastest on this machine, if any are. `rest`: the
    precision of its float operators, or that which the plan's step for it has found."""
    asked = rest_of(candidate, rest)

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph = folders[candidate.step("place")].path / MODEL_FILE
        found = measure_row_parts(graph, candidate.target, batch, float_rest=asked.of(folders), progress=progress)
        write_json(out / PARTS_FILE, encode(found))

    return Step(
        candidate.step("parts"),
        "parts",
        write,
        {"target": candidate.target, "batch": batch, **asked.config},
        (candidate.step("place"), *asked.inputs),
        packages={**target_tools(candidate.target), **package_versions(("onnx-ir", "numpy"))},
        measured=True,
        usable=lambda folder: not read_json(folder / PARTS_FILE)["disturbed"],
    )
