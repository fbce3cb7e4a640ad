"""The small model's bundle with golden inputs that its engine answers exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bundle.read import read_bundle
from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.spec import EngineSpec


def golden_of(inputs: Any, outputs: Any, artifact: str, tolerance: float) -> Golden:
    """A golden set whose engine gives exactly what the original does."""
    count = len(next(iter(outputs.values())))
    return Golden(inputs, outputs, {artifact: GoldenAnswers(outputs, tolerance, count)})


def write_golden_bundle(
    small_bundle: Path, engine: EngineSpec, home: Path, out: Path, *, images: int, tolerance: float, **others: Any
) -> Path:
    """Writes into `out` and gives it. `engine` lies in `home`; `images` are uint8 [images, 32, 32, 1] of noise."""
    manifest = read_bundle(small_bundle)
    assert manifest.preprocess is not None
    pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, 1), np.uint8)
    with make_runner(home, engine) as runner:
        (tensor,) = runner.inputs
        feeds = [{tensor.name: to_input(each[None], manifest.preprocess, tensor)} for each in pixels]
        logits = np.concatenate([runner.infer(feed)["logits"] for feed in feeds])
    write_bundle(
        out,
        task=manifest.task,
        graphs={"model": (small_bundle / "model.onnx", manifest.graphs["model"])},
        preprocess=manifest.preprocess,
        engines=[(engine, home)],
        golden=golden_of({"pixels": pixels}, {"logits": logits}, engine.artifact, tolerance),
        **{"name": "small-model", **others},
    )
    return out
