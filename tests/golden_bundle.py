"""The small model's bundle with golden inputs that its engine answers exactly."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.spec import EngineSpec


def golden_of(inputs: Any, outputs: Any, artifact: str, tolerance: float) -> Golden:
    """A golden set whose engine gives exactly what the original does."""
    count = len(next(iter(outputs.values())))
    return Golden(inputs, outputs, {artifact: GoldenAnswers(outputs, tolerance, count)})


def write_golden_bundle(
    small_bundle: Path,
    engine: EngineSpec,
    home: Path,
    out: Path,
    *,
    images: int,
    tolerance: float,
    channels: int = 1,
    **others: Any,
) -> Path:
    """Writes into `out` and gives it. `engine` lies in `home`; its images are noise, uint8 [32, 32, channels]."""
    manifest = read_bundle(small_bundle)
    assert manifest.preprocess is not None
    pixels = np.random.default_rng(0).integers(0, 256, (images, 32, 32, channels), np.uint8)
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


def golden_small_bundle(small_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its one engine for ONNX Runtime and five golden inputs."""
    return with_golden_answers(small_bundle, tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("golden"))


def with_golden_answers(small_bundle: Path, home: Path, out: Path, channels: int = 1) -> Path:
    """A copy in `out`; the engine goes through `home`, as `out` is an empty folder too."""
    (engine,) = read_bundle(small_bundle).engines
    shutil.copy(small_bundle / engine.graph, home / "graph.onnx")
    engine = dataclasses.replace(engine, graph="graph.onnx", files=("graph.onnx",))
    how: dict[str, Any] = {"images": 5, "tolerance": 1e-3, "channels": channels, "name": "small"}
    return write_golden_bundle(small_bundle, engine, home, out, **how)


def with_one_weight_changed(bundle: Path, out: Path) -> Path:
    """A copy of the bundle whose engine has the largest weight of one matrix with the other sign, and is listed as it
    is: only its answers tell."""
    shutil.copytree(bundle, out)
    document = json.loads((out / "manifest.json").read_text())
    [name] = document["engines"][0]["files"]
    model = onnx.load(out / name)
    matrix = max((each for each in model.graph.initializer if len(each.dims) == 2), key=lambda each: each.name)
    weights = numpy_helper.to_array(matrix).copy()
    index = np.unravel_index(np.abs(weights).argmax(), weights.shape)
    weights[index] = -weights[index]
    matrix.CopyFrom(numpy_helper.from_array(weights, matrix.name))
    onnx.save(model, out / name)
    for entry in document["files"]:
        if entry["path"] == name:
            entry.update(bytes=(out / name).stat().st_size, sha256=file_sha256(out / name))
    (out / "manifest.json").write_text(json.dumps(document))
    return out
