"""Graphs that are built, run, and answer wrongly: classes in another order, weights that are shuffled."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import vitdeploy as vd


def sabotage(graph: Path) -> None:
    """Turn the classes of an ONNX file around: the first becomes the last, in the head's weight, scales and bias."""
    model = onnx.load(graph)
    classes = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    head = [each for each in model.graph.initializer if each.name.startswith("head.") and classes in each.dims]
    assert head
    for each in head:
        turned = np.flip(numpy_helper.to_array(each), list(each.dims).index(classes))
        each.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(turned), each.name))
    onnx.save(model, graph)


def sabotage_int8(patch: pytest.MonkeyPatch) -> None:
    """Every INT8 graph that is placed from now on is sabotaged."""
    from vitdeploy.stages import place

    honest = place.place_graph

    def place_graph(config: place.PlaceConfig, graph: Path, statistics: Any, out: Path, *others: Any) -> Any:
        placed = honest(config, graph, statistics, out, *others)
        if config.precision == "int8":
            sabotage(out / graph.name)
        return placed

    patch.setattr(place, "place_graph", place_graph)


def shuffled(folder: Path, out: Path) -> Path:
    """A copy of exported graphs, each tensor of weights in a seeded order of its own: a model of the same kind that has
    nothing to do with the first."""
    shutil.copytree(folder, out)
    generator = np.random.default_rng(0)
    for file in sorted(out.glob("*.onnx")):
        model = onnx.load(file)
        for each in model.graph.initializer:
            array = numpy_helper.to_array(each)
            if array.dtype.kind == "f" and array.size > 1:
                mixed = generator.permutation(array.ravel()).reshape(array.shape)
                each.CopyFrom(numpy_helper.from_array(mixed, each.name))
        onnx.save(model, file)
    return out


def require_unproven(exported: Path, graph: str, data: Any, out: Path) -> None:
    """Engines of shuffled weights on both runtimes never pass against the original; of that itself they are the same
    function, or nothing is shown."""
    from vitdeploy.workflows.placement import compile_bundle

    other = shuffled(exported, out / "shuffled")
    for target in ("onnxruntime-cpu", "openvino-cpu"):
        home = out / target
        home.mkdir()
        compile_bundle(other / graph, target, None, None, home)
        found = vd.verify(home, exported, data, min_agreement=20, progress=False)
        assert found.status != "pass", found.lines()
        assert "the same function" not in found.found.verified.diagnosis
