"""An INT8 graph that is built, runs, and answers wrongly: its classes are in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper


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
