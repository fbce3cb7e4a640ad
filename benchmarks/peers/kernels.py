"""Does an artifact run as it will be measured, and in which precision does it execute how many multiplications?

The precisions are read from the engine: OpenVINO's execution graph, or a profiled run of ONNX Runtime.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from child import Payload, serve
from worker import make_runner

from vitdeploy.benchmark.worker import random_feeds
from vitdeploy.runtime.openvino import KERNEL_PRECISIONS, OpenVinoRunner
from vitdeploy.runtime.ort import FLOAT_CONVOLUTIONS, FLOAT_PRODUCTS, INT8_KERNELS, OnnxRuntimeRunner, open_session
from vitdeploy.runtime.runner import Runner

# One linear or convolution: its precision, and rows x k x n multiplications.
Layer = dict[str, Any]
Shape = list[int]


def work(payload: Payload) -> Payload:
    layers: list[Layer] | None = None
    for batch, streams in ((1, 1), (payload["batch"], 1), (payload["batch"], payload["streams"])):
        request = {**payload["run"], "batch": batch, "threads": payload["threads"], "streams": streams}
        with make_runner(request) as runner:
            runner.infer(random_feeds(runner.inputs, batch))
            if batch == 1 and streams == 1:
                layers = _layers(runner)
    return {"layers": layers, "macs": _totals(layers) if layers else None}


def _totals(layers: list[Layer]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for layer in layers:
        totals[layer["precision"]] = totals.get(layer["precision"], 0) + layer["rows"] * layer["k"] * layer["n"]
    return totals


def _layers(runner: Runner) -> list[Layer] | None:
    """None for a runtime that does not say."""
    if isinstance(runner, OpenVinoRunner):
        return list(_openvino(runner.compiled))
    if isinstance(runner, OnnxRuntimeRunner) and isinstance(runner.graph, Path):
        with tempfile.TemporaryDirectory() as folder:
            session = open_session(runner.graph, batch=1, profile=Path(folder) / "profile")
            session.run(None, random_feeds(runner.inputs, 1))
            events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
        return [layer for event in events if (layer := _onnxruntime(event)) is not None]
    return None


def _openvino(compiled: Any) -> Iterator[Layer]:
    for node in compiled.get_runtime_model().get_ops():
        info = node.get_rt_info()
        if info["layerType"].value not in ("FullyConnected", "Convolution"):
            continue
        shapes = [[size.get_length() for size in port.get_partial_shape()] for port in node.inputs()]
        out = [size.get_length() for size in node.get_output_partial_shape(0)]
        precision = info["runtimePrecision"].value
        yield _layer(KERNEL_PRECISIONS.get(precision, precision), shapes, out, info["layerType"].value == "Convolution")


def _onnxruntime(event: dict[str, Any]) -> Layer | None:
    """The layer that one event of the profile is; None for all else, attention's products among it."""
    if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
        return None
    kind, facts = event["args"]["op_name"], event["args"]
    if kind not in INT8_KERNELS | FLOAT_PRODUCTS | FLOAT_CONVOLUTIONS:
        return None
    shapes, out = _shapes(facts["input_type_shape"]), _shapes(facts["output_type_shape"])[0]
    convolution = "Conv" in kind
    if not convolution and sum(len(shape) >= 3 for shape in shapes) >= 2:
        return None
    return _layer("int8" if kind in INT8_KERNELS else "fp32", shapes, out, convolution)


def _shapes(entries: list[dict[str, Shape]]) -> list[Shape]:
    return [shape for entry in entries for shape in entry.values()]


def _layer(precision: str, inputs: list[Shape], out: Shape, convolution: bool) -> Layer:
    """A convolution is a linear on its patches.

    Where its weight is packed away, scales or bias tell its channels (the axes may have any order by then), and every
    input value is taken to be read once, as by a patch embedding.
    """
    if not convolution:
        return {"precision": precision, "rows": math.prod(out[:-1]), "k": inputs[0][-1], "n": out[-1]}
    weight = next((shape for shape in inputs[1:] if len(shape) == 4), None)
    n = weight[0] if weight else max((shape[0] for shape in inputs if len(shape) == 1), default=out[1])
    rows = math.prod(out) // n
    k = math.prod(weight[1:]) if weight else math.prod(inputs[0]) // rows
    return {"precision": precision, "rows": rows, "k": k, "n": n}


def float_macs(file: Path) -> int:
    """Multiplications of all MatMul and Conv of a float graph at batch 1, attention's products among them."""
    import onnx  # which environments of peers need not have

    model = onnx.load(str(file))
    for tensor in model.graph.input:
        tensor.type.tensor_type.shape.dim[0].dim_value = 1
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes = {
        value.name: [size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output, *graph.value_info)
    } | {value.name: list(value.dims) for value in graph.initializer}
    total = 0
    for node in graph.node:
        if node.op_type not in ("MatMul", "Conv"):
            continue
        out, weight = shapes[node.output[0]], shapes[node.input[1]]
        if 0 in out:
            raise RuntimeError(f"no static shape for {node.name}")
        each = shapes[node.input[0]][-1] if node.op_type == "MatMul" else math.prod(weight[1:])
        total += math.prod(out) * each
    return total


if __name__ == "__main__":
    serve(work)
