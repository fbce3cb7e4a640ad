"""How far an engine's answers are from the float graph's on the calibration images: what variants are ranked by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.pipeline.progress import Progress, silent
from vitdeploy.pipeline.stages.compile import read_engine
from vitdeploy.pipeline.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.expected import Expected
from vitdeploy.search.reference_outputs import ReferenceOutputs
from vitdeploy.search.sensitivity import mean_interval
from vitdeploy.spec import decode, encode

SCORE_FILE = "score.json"
BATCH = 8


@dataclass(frozen=True)
class Score:
    """The distance (see `ReferenceOutputs.distance`), mean over the images with its 95 % t-interval, and what is
    expected of a classifier's answers; None for other tasks."""

    images: int
    distance: float
    ci95: tuple[float, float]
    expected: Expected | None


def float_reference_outputs(graph: Path, samples: Sequence[Sample]) -> ReferenceOutputs:
    """What a float graph answers to some images, asked for at the graph's own batch where that is fixed."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    batch = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    pixels = np.concatenate(list(batches(samples, metadata.images, BATCH)))
    with OnnxRuntimeRunner(graph, name="the float graph", batch=batch) as runner:
        return ReferenceOutputs(runner, pixels, metadata.images, metadata.task, batch=batch)


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
