"""Where the time of an artifact goes: its layers, as the runtime's own profiler times them."""

from __future__ import annotations

import collections
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.context import LONGEST_NAME, MOST_FUSED, Layer, Profile
from vitdeploy.bench.onnx_bytes import Node, onnx_model
from vitdeploy.bench.worker import random_feeds
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.openvino import KERNEL_PRECISIONS, OpenVinoRunner, require
from vitdeploy.runtime.ort import OnnxRuntimeRunner, open_session
from vitdeploy.runtime.ort_profile import (
    FLOAT_CONVOLUTIONS,
    FLOAT_PRODUCTS,
    INT8_KERNELS,
    SUFFIX,
    Event,
    end_profile,
    precision_of,
)
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import TARGETS, EngineSpec

LEAST_RUNS, MOST_RUNS = 5, 50
# Operators that multiply matrices, alone or inside of what was fused.
OPENVINO_PRODUCTS = ("MatMul", "FullyConnected", "Convolution", "GroupConvolution", "Deconvolution", "ScaledDotProduct")
ONNXRUNTIME_PRODUCTS = {
    *(INT8_KERNELS | FLOAT_PRODUCTS | FLOAT_CONVOLUTIONS),
    *("MultiHeadAttention", "Attention", "QAttention", "ConvTranspose", "Einsum"),
}
# What the runtimes add to the name of a node that they fuse into another or lay out again.
ADDED = re.compile(r"(/\w+Fusion|_nchwc|/WithoutBiases)+$")
# A name that OpenVINO made up for what a node became: "MVN_80" is part of a LayerNormalization.
MADE_UP = re.compile(r"[A-Za-z]+_\d+")
# The nodes of the graph that times what a profiler takes itself.
IDLE_NODES = 16

Feeds = Mapping[str, Array]


def profile(folder: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> Profile:
    """The layers of an engine whose files lie under `folder`, over some dozens of runs within about `seconds`.

    Raises:
        CapabilityError: the engine has no profiler here, or is an encoder-decoder's.
        VitdeployError: the runtime's own errors.
    """
    target = TARGETS[engine.target]
    if engine.parts:
        raise CapabilityError("an encoder-decoder's graphs run many times a query: its layers are not timed")
    if target.device != "CPU":
        raise CapabilityError(f"the layers of {engine.target} are not timed", wanted="a target on a CPU")
    work = _openvino if target.backend == "openvino" else _onnxruntime
    return work(folder / engine.files[0], engine, name, batch, threads, seconds)


def _repeat(query: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None) -> list[float]:
    """Run for so long, at least LEAST_RUNS times and at most MOST_RUNS; returns the milliseconds of each run, without
    what is done after it."""
    begun, found = time.perf_counter(), list[float]()
    while len(found) < LEAST_RUNS or (len(found) < MOST_RUNS and time.perf_counter() - begun < seconds):
        start = time.perf_counter()
        query()
        found.append((time.perf_counter() - start) * 1e3)
        after()
    return found


def _openvino(file: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> Profile:
    """From the plugin's performance counters, which cost little; the compiled model knows what it fused, the file which
    operators these were."""
    options = {**engine.options, "PERF_COUNT": "YES"}
    with OpenVinoRunner(file, name=name, batch=batch, options=options, threads=threads) as runner:
        assert isinstance(runner, OpenVinoRunner)
        request, feeds = runner.compiled.create_infer_request(), random_feeds(runner.inputs, batch)
        times: list[list[float]] = []

        def query() -> None:
            request.infer(dict(feeds), share_inputs=True)

        def read() -> None:
            times.append([each.real_time.total_seconds() * 1e3 for each in request.profiling_info])

        query()
        latencies = _repeat(query, seconds, read)
        nodes = {node.get_friendly_name(): node for node in runner.compiled.get_runtime_model().get_ops()}
        kinds = {op.get_friendly_name(): op.get_type_name() for op in require().Core().read_model(str(file)).get_ops()}
        counters = request.profiling_info
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        ran = [pair for pair in zip(counters, medians, strict=True) if str(pair[0].status).endswith("EXECUTED")]
        layers = [_openvino_layer(each, median, nodes, kinds) for each, median in ran]
    return Profile(name, batch, len(latencies), tuple(layers), statistics.median(latencies))


def _openvino_layer(counter: Any, milliseconds: float, nodes: Mapping[str, Any], kinds: Mapping[str, str]) -> Layer:
    """A counter as a layer. `nodes` are those of the compiled model, `kinds` the operators of the file, by name."""
    node = nodes.get(counter.node_name)
    listed = node.get_rt_info()["originalLayersNames"].value.split(",") if node is not None else ()
    fuses = [each for each in listed if each in kinds]
    inside = list(dict.fromkeys(kinds[each] for each in fuses))
    products = [each for each in fuses if kinds[each].startswith(OPENVINO_PRODUCTS)]
    product = bool(products) or counter.node_type.startswith(OPENVINO_PRODUCTS)
    named = [each for each in fuses if not MADE_UP.fullmatch(each)]
    # A product comes first of what it is fused with; elsewhere the last node is what the others lead to.
    name = (products or (named if product else named[::-1]) or [counter.node_name])[0]
    if node is not None and not named and (after := _after(node, kinds)):
        name = f"{inside[0] if inside else counter.node_type} before {after}"
    kind = counter.node_type
    if kind == "Subgraph" and inside:
        kind = f"Subgraph of {', '.join(inside)}"
    suffix = counter.exec_type.rpartition("_")[2].lower()
    return _layer(
        name,
        kind,
        KERNEL_PRECISIONS.get(suffix, suffix),
        milliseconds,
        product,
        named,
    )


def _after(node: Any, kinds: Mapping[str, str]) -> str:
    """The first node behind, of those that the file names."""
    for output in node.outputs():
        for target in output.get_target_inputs():
            listed = target.get_node().get_rt_info()["originalLayersNames"].value.split(",")
            named = [each for each in listed if each in kinds and not MADE_UP.fullmatch(each)]
            if named:
                return str(named[0])
    return ""


def _onnxruntime(file: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> Profile:
    """From a session's profile. The latency is that of a session without one: with it, it doubles.

    What the profiler itself takes is taken off each node: what it takes for one that does nothing, or, where all layers
    then still exceed the latency, so much that they do not. It is about the same for every node: most of it is text.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        idle = statistics.median(event["dur"] for event in _idle_events(Path(folder) / "idle")) / 1e3
        with OnnxRuntimeRunner(file, name=name, batch=batch, threads=threads) as runner:
            feeds = random_feeds(runner.inputs, batch)
            runner.infer(feeds)
            latencies = _repeat(lambda: runner.infer(feeds), seconds / 2)
        profiled = open_session(file, batch=batch, threads=threads, profile=Path(folder) / "profile")
        runs = len(_repeat(lambda: profiled.run(None, feeds), seconds / 2))
        events: dict[tuple[str, str], list[Event]] = collections.defaultdict(list)
        for event in end_profile(profiled):
            events[event["name"], event["args"].get("node_index", "")].append(event)
    times, latency = [_median_of_runs(each, runs) for each in events.values()], statistics.median(latencies)
    taken = max(idle, (sum(times) - latency) / len(times))
    layers = [_onnxruntime_layer(*pair, taken) for pair in zip(events.values(), times, strict=True)]
    return Profile(name, batch, runs, tuple(layers), latency, taken)


def _idle_events(prefix: Path) -> list[Event]:
    """A chain of nodes that turn the sign of one number."""
    names = [str(i) for i in range(IDLE_NODES + 1)]
    nodes = [Node("Neg", (before,), after) for before, after in pairwise(names)]
    feeds = {names[0]: np.ones(1, np.float32)}
    session = open_session(onnx_model(nodes, feeds, names[-1], {}), profile=prefix)
    for _ in range(LEAST_RUNS):
        session.run(None, feeds)
    return end_profile(session)


def _median_of_runs(events: Sequence[Event], runs: int) -> float:
    """The median milliseconds a run; of a node in a branch or loop, which does not run once in each, the mean."""
    times = [float(event["dur"]) / 1e3 for event in events]
    return statistics.median(times) if len(times) == runs else sum(times) / runs


def _onnxruntime_layer(events: Sequence[Event], milliseconds: float, taken: float) -> Layer:
    event = events[0]
    kind = str(event["args"]["op_name"])
    name, product = event["name"].removesuffix(SUFFIX), kind in ONNXRUNTIME_PRODUCTS
    return _layer(name, kind, precision_of(event), max(0.0, milliseconds - taken), product)


def _layer(
    name: str, kind: str, precision: str, milliseconds: float, product: bool, fuses: Sequence[str] = ()
) -> Layer:
    parts = tuple(dict.fromkeys(_short(each) for each in fuses))[:MOST_FUSED]
    return Layer(_short(name), kind[:LONGEST_NAME], precision, milliseconds, product, parts if len(parts) > 1 else ())


def _short(name: str) -> str:
    return ADDED.sub("", name)[:LONGEST_NAME]
