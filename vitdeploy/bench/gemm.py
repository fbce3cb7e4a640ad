"""The best rate at which a runtime multiplies matrices here: what a model's own rate is held against.

A few layers, each a product of [rows, width] and a constant [width, width], one after the other as in a network, so
that weights are packed and outputs are quantized as they are there. Of a few shapes the fastest counts: it is a rate
that this machine reaches in this runtime, not one of a data sheet.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.context import Rate
from vitdeploy.bench.onnx_bytes import Node, onnx_model
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import openvino, ort
from vitdeploy.runtime.ort_profile import precision_of, run_profiled
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import TARGETS

SEED = 0
LAYERS = 3
# Rows and width. 192 and 384 rows are whole tiles of every kernel; the weights of a layer fit a core's cache.
SHAPES = ((192, 768), (384, 768), (512, 1024))
LEAST_RUNS = 3

Query = Callable[[], object]


def best_rate(target: str, precision: str, threads: int, seconds: float) -> Rate:
    """The rate of the fastest of `SHAPES`, by its median query, within about `seconds` and the time to load.

    Raises:
        CapabilityError: no probe for this target, or its kernels do not compute in this precision here.
        MissingPackageError, EngineError: of the runtime.
    """
    probe = {"openvino": _openvino, "onnxruntime": _onnxruntime}.get(TARGETS[target].backend)
    if probe is None or TARGETS[target].device != "CPU":
        raise CapabilityError(f"the rates of {target} are not measured", wanted="a target on a CPU")
    found = []
    for rows, width in SHAPES:
        # One after the other: the threads of a session that waits spin, and take the cores from the next one's.
        query, kernel = probe(rows, width, precision, threads)
        flops = 2 * LAYERS * rows * width * width / _median_seconds(query, seconds / len(SHAPES))
        found.append(Rate(target, precision, flops, (rows, width), kernel))
        del query
    return max(found, key=lambda rate: rate.flops)


def _median_seconds(query: Query, seconds: float) -> float:
    query()
    times: list[float] = []
    start = end = time.perf_counter()
    while end - start < seconds or len(times) < LEAST_RUNS:
        begin = time.perf_counter()
        query()
        end = time.perf_counter()
        times.append(end - begin)
    return statistics.median(times)


def _weights(width: int, precision: str) -> list[Array]:
    """Seeded, and such that numbers neither grow nor vanish from layer to layer."""
    generator = np.random.default_rng(SEED)
    if precision == "int8":
        return [generator.integers(-127, 128, (width, width), dtype=np.int8) for _ in range(LAYERS)]
    return [generator.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5) for _ in range(LAYERS)]


def _scale(width: int) -> float:
    """Of INT8 weights that are uniform in -127..127, whose standard deviation is 73."""
    return float(1 / (73 * width**0.5))


def _onnxruntime(rows: int, width: int, precision: str, threads: int) -> tuple[Query, str]:
    """A query, and the kernel of its products, which a profiled run has shown."""
    generator, weights = np.random.default_rng(SEED), _weights(width, precision)
    constants = {f"weight{i}": weight for i, weight in enumerate(weights)}
    names = ["x", *(f"y{i}" for i in range(LAYERS))]
    if precision == "int8":
        x: Array = generator.integers(0, 256, (rows, width), dtype=np.uint8)
        constants |= {"scale": np.array(1 / 32, np.float32), "zero": np.array(128, np.uint8)}
        constants |= {"scales": np.full(width, _scale(width), np.float32), "zeros": np.zeros(width, np.int8)}
        nodes = [
            Node("QLinearMatMul", (names[i], "scale", "zero", f"weight{i}", "scales", "zeros", "scale", "zero"), y)
            for i, y in enumerate(names[1:])
        ]
    elif precision == "fp32":
        x = generator.standard_normal((rows, width), dtype=np.float32)
        nodes = [Node("MatMul", (names[i], f"weight{i}"), y) for i, y in enumerate(names[1:])]
    else:
        raise CapabilityError(f"ONNX Runtime has no {precision} on a CPU", wanted="fp32, int8")
    graph, feeds = onnx_model(nodes, {"x": x}, names[-1], constants), {"x": x}
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        events = run_profiled(ort.open_session(graph, threads=threads, profile=Path(folder) / "profile"), feeds)
    products = [event for event in events if "MatMul" in event["args"]["op_name"]]
    _check([precision_of(event) for event in products], precision, [event["args"]["op_name"] for event in events])
    session = ort.open_session(graph, threads=threads)
    return lambda: session.run(None, feeds), str(products[0]["args"]["op_name"])


def _openvino(rows: int, width: int, precision: str, threads: int) -> tuple[Query, str]:
    """A query, and the kernel of its products, which the compiled model names."""
    runtime = openvino.require()
    core = runtime.Core()
    available = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision.upper() not in available:  # a hint for a type that the CPU lacks is taken, and computed in another
        raise CapabilityError(f"this CPU has no {precision} for OpenVINO", found=", ".join(available))
    op, generator = runtime.opset13, np.random.default_rng(SEED)
    image = op.parameter([rows, width], np.float32)
    x = image
    for weight in _weights(width, precision):
        if precision == "int8":  # u8 activations per tensor, i8 weights per output channel: the form of placements
            low, high = (op.constant(np.float32(limit)) for limit in (-4.0, 4.0))
            x = op.fake_quantize(x, low, high, low, high, 256)
            scales = op.constant(np.full((width, 1), _scale(width), np.float32))
            constant = op.multiply(op.convert(op.constant(weight), np.float32), scales)
        else:
            constant = op.constant(weight)
        x = op.matmul(x, constant, False, True)
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": openvino.PRECISION_HINTS[precision]}
    if threads:
        config["INFERENCE_NUM_THREADS"] = str(threads)
    compiled = core.compile_model(runtime.Model([x], [image], "gemm"), "CPU", config)
    ops = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    products = [info for info in ops if info["layerType"].value.startswith("FullyConnected")]
    ran = [info["runtimePrecision"].value for info in products]
    kernels = [str(info["primitiveType"].value) for info in products]
    _check([openvino.KERNEL_PRECISIONS.get(each, each) for each in ran], precision, kernels)
    request, feeds = compiled.create_infer_request(), [generator.standard_normal((rows, width), dtype=np.float32)]

    def query() -> Any:
        request.infer(feeds, share_inputs=True)

    return query, kernels[0].lower()


def _check(ran: list[str], precision: str, kernels: list[str]) -> None:
    if ran != [precision] * LAYERS:
        raise CapabilityError(
            f"the probe did not run in {precision}",
            found=", ".join(kernels),
            wanted=f"{LAYERS} products in {precision}",
        )
