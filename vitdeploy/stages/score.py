"""The distance of an engine's answers from the float graph's on the calibration images; variants are ranked by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.data.folder import Sample
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.engine import make_runner
from vitdeploy.search.expected import Expected
from vitdeploy.search.sensitivity import mean_interval
from vitdeploy.spec import decode, encode
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.stages.reference_outputs import float_reference_outputs
from vitdeploy.stages.step import Candidate, Folders, Step
from vitdeploy.stages.target_tools import target_tools
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

SCORE_FILE = "score.json"


@dataclass(frozen=True)
class Score:
    """The distance (see `ReferenceOutputs.distance`), mean over the images with its 95 % t-interval, and what is
    expected of a classifier's answers; None for other tasks."""

    images: int
    distance: float
    ci95: tuple[float, float]
    expected: Expected | None


def score(graph: Path, folder: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Writes score.json, of the engine in `folder` against a float graph."""
    engine = read_engine(folder)
    text = f"{engine.artifact} on the calibration images"
    progress(text, 0, 1)
    reference_outputs = float_reference_outputs(graph, samples)
    with make_runner(folder, engine, batch=reference_outputs.batch) as runner:
        answers = reference_outputs.ask(runner)
    mean, low, high = mean_interval(reference_outputs.distance(answers))
    found = Score(len(samples), mean, (low, high), reference_outputs.expected(answers))
    write_json(out / SCORE_FILE, encode(found))
    progress(text, 1, 1)


def read_score(folder: Path) -> Score:
    return decode(Score, read_json(folder / SCORE_FILE))


def score_step(candidate: Candidate, reference: str, data: Data) -> Step:
    """The distance of a compiled candidate from the float graph of the step `reference`: `OPTIMIZE`, or another one
    whose first word that is."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        graph = folders[reference].path / MODEL_FILE
        score(graph, folders[candidate.step("compile")].path, samples, out, progress)

    return Step(
        candidate.step("score"),
        "score",
        write,
        {},
        (candidate.step("compile"), reference),
        {"images": data.calibration_digest},
        {**target_tools(candidate.target), **package_versions(("onnxruntime", "pillow", "numpy", "scipy"))},
    )
