"""ONNX Runtime on the CPU: the times of layers, from a profile, and the rate of its matrix products."""

import collections
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from vitdeploy.benchmark import context, gemm, worker
from vitdeploy.benchmark.gemm import LEAST_LAYER_RUNS as LEAST_RUNS
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import ort
from vitdeploy.runtime.runner import Array

# Operators that multiply matrices.
PRODUCTS = {
    *(ort.INT8_KERNELS | ort.INT4_KERNELS | ort.FLOAT_PRODUCTS | ort.FLOAT_CONVOLUTIONS),
    *("MultiHeadAttention", "Attention", "QAttention", "ConvTranspose", "Einsum"),
}
# The number of nodes in the graph that measures the profiler's own overhead.
IDLE_NODES = 16


def profile(request: context.ProfileRequest) -> context.Profile:
    """The layers from a session's profile. The latency comes from a session without profiling, which doubles it.

    The profiler's overhead, measured on an idle node, is subtracted from each node; if the layers then still exceed the
    latency, so much that they fit. It is about the same for every node, because most of it is writing text.
    """
    file, batch, threads = request.file, request.batch, request.threads
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        idle = statistics.median(event["dur"] for event in _idle_events(Path(folder) / "idle")) / 1e3
        with ort.OnnxRuntimeRunner(file, name=request.name, batch=batch, threads=threads) as runner:
            feeds = worker.random_feeds(runner.inputs, batch)
            runner.infer(feeds)
            latencies = gemm.repeat(lambda: runner.infer(feeds), request.seconds / 2)
        profiled = ort.open_session(file, batch=batch, threads=threads, profile=Path(folder) / "profile")
        runs = len(gemm.repeat(lambda: profiled.run(None, feeds), request.seconds / 2))
        events: dict[tuple[str, str], list[ort.Event]] = collections.defaultdict(list)
        for event in ort.end_profile(profiled):
            events[event["name"], event["args"].get("node_index", "")].append(event)
    times, latency = [_median_of_runs(each, runs) for each in events.values()], statistics.median(latencies)
    taken = max(idle, (sum(times) - latency) / len(times))
    layers = [_layer(*pair, taken) for pair in zip(events.values(), times, strict=True)]
    return context.Profile(request.name, batch, runs, tuple(layers), latency, taken)


def _idle_events(prefix: Path) -> list[ort.Event]:
    """The profile events of a chain of nodes that negate one number."""
    names = [str(i) for i in range(IDLE_NODES + 1)]
    nodes = [Node("Neg", (before,), after) for before, after in pairwise(names)]
    feeds = {names[0]: np.ones(1, np.float32)}
    session = ort.open_session(onnx_model(nodes, feeds, names[-1], {}), profile=prefix)
    for _ in range(LEAST_RUNS):
        session.run(None, feeds)
    return ort.end_profile(session)


def _median_of_runs(events: Sequence[ort.Event], runs: int) -> float:
    """The median milliseconds per run; the mean for a node in a branch or loop, which does not run once per run."""
    times = [float(event["dur"]) / 1e3 for event in events]
    return statistics.median(times) if len(times) == runs else sum(times) / runs


def _layer(events: Sequence[ort.Event], milliseconds: float, taken: float) -> context.Layer:
    event = events[0]
    kind = str(event["args"]["op_name"])
    name, product = event["name"].removesuffix(ort.SUFFIX), kind in PRODUCTS
    return gemm.profiled_layer(name, kind, ort.precision_of(event), max(0.0, milliseconds - taken), product)


def products(rows: int, width: int, precision: str, threads: int) -> tuple[context.Query, str]:
    """A function that computes the products, and their kernel according to a profiled run."""
    generator, weights = np.random.default_rng(gemm.SEED), gemm.seeded_weights(width, precision)
    constants = {f"weight{i}": weight for i, weight in enumerate(weights)}
    names = ["x", *(f"y{i}" for i in range(gemm.LAYERS))]
    if precision == "int8":
        x: Array = generator.integers(0, 256, (rows, width), dtype=np.uint8)
        constants |= {"scale": np.array(1 / 32, np.float32), "zero": np.array(128, np.uint8)}
        constants |= {"scales": np.full(width, gemm.weight_scale(width), np.float32), "zeros": np.zeros(width, np.int8)}
        nodes = [
            Node("QLinearMatMul", (names[i], "scale", "zero", f"weight{i}", "scales", "zeros", "scale", "zero"), y)
            for i, y in enumerate(names[1:])
        ]
    elif precision == "fp32":
        x = generator.standard_normal((rows, width), dtype=np.float32)
        nodes = [Node("MatMul", (names[i], f"weight{i}"), y) for i, y in enumerate(names[1:])]
    else:
        raise CapabilityError(f"no {precision} probe for ONNX Runtime on a CPU", expected="fp32, int8")
    graph, feeds = onnx_model(nodes, {"x": x}, names[-1], constants), {"x": x}
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        events = ort.run_profiled(ort.open_session(graph, threads=threads, profile=Path(folder) / "profile"), feeds)
    products = [event for event in events if "MatMul" in event["args"]["op_name"]]
    gemm.check_precision(
        [ort.precision_of(event) for event in products], precision, [event["args"]["op_name"] for event in events]
    )
    session = ort.open_session(graph, threads=threads)
    return lambda: session.run(None, feeds), str(products[0]["args"]["op_name"])


BACKEND = context.BenchBackend(profile, products)


# --- A writer of small ONNX files for probes: devices have no onnx package --------------------------------------------
# It covers only what the probes need: messages of varints and length-delimited fields (Protocol Buffers, "Encoding"),
# with the field numbers of onnx/onnx.proto3. The tests read its files with the onnx package.


# TensorProto.DataType.
TYPES = {"float32": 1, "uint8": 2, "int8": 3}
# ONNX Runtime supports both from 1.14 on.
IR_VERSION, OPSET = 8, 17


@dataclass(frozen=True)
class Node:
    """One operator of the default domain, without attributes, named like its output."""

    operator: str
    inputs: tuple[str, ...]
    output: str


def onnx_model(
    nodes: Sequence[Node], inputs: Mapping[str, Array], output: str, constants: Mapping[str, Array]
) -> bytes:
    """A model whose inputs have the dtypes and shapes of `inputs`; the output's type is left to the runtime."""
    graph = b"".join(
        [
            *(_message(1, _node(node)) for node in nodes),
            _text(2, "probe"),
            *(_message(5, _tensor(name, array)) for name, array in constants.items()),
            *(_message(11, _text(1, name) + _message(2, _tensor_type(array))) for name, array in inputs.items()),
            _message(12, _text(1, output)),
        ]
    )
    return _number(1, IR_VERSION) + _message(7, graph) + _message(8, _number(2, OPSET))


def _node(node: Node) -> bytes:
    inputs = b"".join(_text(1, name) for name in node.inputs)
    return inputs + _text(2, node.output) + _text(3, node.output) + _text(4, node.operator)


def _tensor(name: str, array: Array) -> bytes:
    dims = b"".join(_number(1, size) for size in array.shape)
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"))
    return dims + _number(2, TYPES[array.dtype.name]) + _text(8, name) + _message(9, little.tobytes())


def _tensor_type(array: Array) -> bytes:
    shape = b"".join(_message(1, _number(1, size)) for size in array.shape)
    return _message(1, _number(1, TYPES[array.dtype.name]) + _message(2, shape))


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """A varint: seven bits per byte, the lowest first; the high bit marks that more bytes follow."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
