"""The reference of a bundle's monitor: what the calibration images are like, and what each engine says to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.pipeline.job import Job
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs
from vitdeploy.runtime.monitor_reference import (
    LEAST_IMAGES,
    MOST_IMAGES,
    input_statistics,
    output_names,
    output_statistics,
    reference_text,
    watched_outputs,
)
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import EngineSpec, PreprocessSpec, Task
from vitdeploy.tasks.adapter import ImageKit

AT_ONCE = 8


def monitor_of(job: Job, engines: Sequence[tuple[EngineSpec, Path]]) -> str | None:
    """The text of `monitor.json`, of up to 128 calibration images, evenly spread; of as many evaluation images where
    there are too few of those. None of a model that takes no images, or where there are fewer than 32.

    Engines of several graphs have no reference of their outputs: these depend on more than the image.
    """
    model, data = job.reference_model, job.data
    if not isinstance(job.adapter, ImageKit) or model.preprocess is None:
        return None
    samples = data.calibration if len(data.calibration) >= LEAST_IMAGES else data.evaluation
    chunks = _chunks(samples, model.preprocess)
    inputs = _numbers(chunks, model.preprocess)
    if inputs is None:
        return None
    outputs = {
        engine.artifact: said
        for engine, folder in engines
        if not engine.parts and (said := _said(engine, folder, model.task, model.preprocess, chunks))
    }
    return reference_text(inputs, model.preprocess.channels, outputs)


def monitor_of_images(samples: Sequence[Sample], preprocess: PreprocessSpec) -> str | None:
    """As `monitor_of`, of the images alone: what an engine says to them is not known where it is not made yet."""
    inputs = _numbers(_chunks(samples, preprocess), preprocess)
    return None if inputs is None else reference_text(inputs, preprocess.channels, {})


def _chunks(samples: Sequence[Sample], preprocess: PreprocessSpec) -> list[Pixels]:
    """The pixels of some samples, evenly spread; none where there are too few."""
    if len(samples) < LEAST_IMAGES:
        return []
    places = np.linspace(0, len(samples) - 1, min(len(samples), MOST_IMAGES)).round().astype(int)
    return list(batches([samples[place] for place in places], preprocess, AT_ONCE))


def _numbers(chunks: Sequence[Pixels], preprocess: PreprocessSpec) -> list[list[float]] | None:
    rows = [input_statistics(each, preprocess) for chunk in chunks for each in chunk]
    found = [row for row in rows if row is not None]
    return found if found and len(found) == len(rows) else None  # images of one column have none


def _said(
    engine: EngineSpec, folder: Path, task: Task, preprocess: PreprocessSpec, chunks: Sequence[Pixels]
) -> tuple[list[str], list[list[float]]] | None:
    """The names and the numbers of an engine's outputs for each image; None if it has none of floats."""
    rows: list[list[float]] = []
    names: list[str] = []
    with make_runner(folder, engine) as runner:
        for chunk in chunks:
            found = engine_outputs(runner, preprocess, chunk)
            names = names or watched_outputs(found)
            rows += [
                output_statistics(task, {name: found[name][i] for name in names}, names) for i in range(len(chunk))
            ]
    return (output_names(task, names), rows) if names and np.isfinite(rows).all() else None
