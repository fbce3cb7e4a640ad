"""Selections that tied scores leave open.

A detector selects the cells with the highest scores as its queries (TopK). Among cells whose scores are equal up to
rounding, runtimes select different cells or a different order, so that the outputs of the same function differ. The
comparison covers what is defined: the graph must score the original's cells as high as those that it would select
itself, and must return the same outputs for the same selection.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch.overrides import TorchFunctionMode

from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner


class Choices(TorchFunctionMode):
    """Mode that records the indices of every `torch.topk` in `taken`, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[np.ndarray] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self.taken.append(result[1].numpy(force=True))
        return result


def answers_of_choices(
    graph: Path, feeds: Sequence[Mapping[str, np.ndarray]], choices: Sequence[Sequence[np.ndarray]], tolerance: float
) -> list[dict[str, np.ndarray]] | None:
    """Return the graph's outputs for each of `feeds` with its TopK forced to the original's selection.

    None if the graph does not have the original's TopK nodes, if one is an output itself, or if the selected scores are
    not the highest, up to `tolerance`.
    """
    model = load_graph(graph)
    nodes = [node for node in model.graph if node.op_type == "TopK"]
    answered = any(node.outputs[1].is_graph_output() for node in nodes)
    if not nodes or answered or any(len(taken) != len(nodes) for taken in choices):
        return None
    axes = [_impose(model, node, index, choices[0][index]) for index, node in enumerate(nodes)]
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        save_graph(model, Path(folder) / "model.onnx")
        with OnnxRuntimeRunner(Path(folder) / "model.onnx", name="the exported graph with a fixed selection") as runner:
            for feed, taken in zip(feeds, choices, strict=True):
                found = runner.infer({**feed, **{f"choice_{i}": indices for i, indices in enumerate(taken)}})
                for i, (indices, axis) in enumerate(zip(taken, axes, strict=True)):
                    if not _below_cut(found.pop(f"scores_{i}"), indices, axis) <= tolerance:
                        return None
                answers.append(found)
    return answers


def _impose(model: ir.Model, node: ir.Node, index: int, taken: np.ndarray) -> int:
    """Make the indices of a TopK an input, and its scores an output. Returns its axis."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    scores, values, indices = node.inputs[0], *node.outputs
    assert scores is not None
    choice = ir.Value(
        name=f"choice_{index}", shape=ir.Shape(["batch", *taken.shape[1:]]), type=ir.TensorType(ir.DataType.INT64)
    )
    shown = ir.node("Identity", [scores])
    gathered = ir.node("GatherElements", [scores, choice], {"axis": axis})
    model.graph.insert_after(node, [shown, gathered])
    values.replace_all_uses_with(gathered.outputs[0], replace_graph_outputs=True)
    indices.replace_all_uses_with(choice)
    shown.outputs[0].name, gathered.outputs[0].name = f"scores_{index}", values.name
    for value in (shown.outputs[0], gathered.outputs[0]):
        value.type = ir.TensorType(ir.DataType.FLOAT)
    shown.outputs[0].shape, gathered.outputs[0].shape = scores.shape, choice.shape
    model.graph.inputs.append(choice)
    model.graph.outputs.append(shown.outputs[0])
    model.graph.remove(node, safe=True)
    return axis


def _below_cut(scores: np.ndarray, taken: np.ndarray, axis: int) -> float:
    """Return how far the lowest score of a selection lies below that of the best selection, relative to the latter's
    largest score; NaN if a score is NaN."""
    chosen = np.sort(np.take_along_axis(scores, taken, axis).astype(np.float64), axis)
    count = chosen.shape[axis]
    best = np.sort(scores.astype(np.float64), axis).take(range(scores.shape[axis] - count, scores.shape[axis]), axis)
    return float(np.abs(best - chosen).max() / max(np.abs(best).max(), np.finfo(np.float32).tiny))
