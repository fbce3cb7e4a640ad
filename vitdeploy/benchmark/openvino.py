"""OpenVINO: the times of layers, from performance counters, and the rate of its matrix products."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitdeploy.benchmark import context, gemm, worker
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.host import default_threads
from vitdeploy.runtime.openvino import KERNEL_PRECISIONS, PRECISION_HINTS, OpenVinoRunner, require, the_core

# Operators that multiply matrices, alone or fused.
PRODUCTS = ("MatMul", "FullyConnected", "Convolution", "GroupConvolution", "Deconvolution", "ScaledDotProduct")
# A name that OpenVINO generates for what a node became: "MVN_80" is part of a LayerNormalization.
MADE_UP = re.compile(r"[A-Za-z]+_\d+")


def profile(request: context.ProfileRequest) -> context.Profile:
    """The layers from the plugin's performance counters, which cost little. The compiled model says what it fused, the
    file which operators these were."""
    options, batch = {**request.engine.options, "PERF_COUNT": "YES"}, request.batch
    with OpenVinoRunner(
        request.file, name=request.name, batch=batch, options=options, threads=request.threads
    ) as runner:
        assert isinstance(runner, OpenVinoRunner)
        inference, feeds = runner.compiled.create_infer_request(), worker.random_feeds(runner.inputs, batch)
        times: list[list[float]] = []

        def query() -> None:
            inference.infer(dict(feeds), share_inputs=True)

        def read() -> None:
            times.append([each.real_time.total_seconds() * 1e3 for each in inference.profiling_info])

        query()
        latencies = gemm.repeat(query, request.seconds, read)
        nodes = {node.get_friendly_name(): node for node in runner.compiled.get_runtime_model().get_ops()}
        kinds = {
            op.get_friendly_name(): op.get_type_name() for op in the_core().read_model(str(request.file)).get_ops()
        }
        counters = inference.profiling_info
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        ran = [pair for pair in zip(counters, medians, strict=True) if str(pair[0].status).endswith("EXECUTED")]
        layers = [_layer(each, median, nodes, kinds) for each, median in ran]
    return context.Profile(request.name, batch, len(latencies), tuple(layers), statistics.median(latencies))


def _layer(counter: Any, milliseconds: float, nodes: Mapping[str, Any], kinds: Mapping[str, str]) -> context.Layer:
    """A counter as a layer. `nodes` are those of the compiled model, `kinds` the operators of the file, by name."""
    node = nodes.get(counter.node_name)
    listed = node.get_rt_info()["originalLayersNames"].value.split(",") if node is not None else ()
    fuses = [each for each in listed if each in kinds]
    inside = list(dict.fromkeys(kinds[each] for each in fuses))
    products = [each for each in fuses if kinds[each].startswith(PRODUCTS)]
    product = bool(products) or counter.node_type.startswith(PRODUCTS)
    named = [each for each in fuses if not MADE_UP.fullmatch(each)]
    # A product comes first among the nodes that it is fused with; otherwise the last node is the result of the others.
    name = (products or (named if product else named[::-1]) or [counter.node_name])[0]
    if node is not None and not named and (after := _after(node, kinds)):
        name = f"{inside[0] if inside else counter.node_type} before {after}"
    kind = counter.node_type
    if kind == "Subgraph" and inside:
        kind = f"Subgraph of {', '.join(inside)}"
    suffix = counter.exec_type.rpartition("_")[2].lower()
    stored = node.get_rt_info()["runtimePrecision"].value if node is not None else ""
    if KERNEL_PRECISIONS.get(stored) == "int4":  # of weights, which the type of the kernel does not say
        suffix = stored
    return gemm.profiled_layer(
        name,
        kind,
        KERNEL_PRECISIONS.get(suffix, suffix),
        milliseconds,
        product,
        named,
    )


def _after(node: Any, kinds: Mapping[str, str]) -> str:
    """The first node downstream that the file names."""
    for output in node.outputs():
        for target in output.get_target_inputs():
            listed = target.get_node().get_rt_info()["originalLayersNames"].value.split(",")
            named = [each for each in listed if each in kinds and not MADE_UP.fullmatch(each)]
            if named:
                return str(named[0])
    return ""


def products(rows: int, width: int, precision: str, threads: int) -> tuple[context.Query, str]:
    """A query, and the kernel of its products as the compiled model names it."""
    runtime, core = require(), the_core()
    available = core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if precision.upper() not in available:  # a hint for a type that the CPU lacks is accepted, and computed in another
        raise CapabilityError(f"this CPU has no {precision} for OpenVINO", found=", ".join(available))
    op, generator = runtime.opset13, np.random.default_rng(gemm.SEED)
    image = op.parameter([rows, width], np.float32)
    x = image
    for weight in gemm.seeded_weights(width, precision):
        if precision == "int8":  # u8 activations per tensor, i8 weights per output channel: the form of placements
            low, high = (op.constant(np.float32(limit)) for limit in (-4.0, 4.0))
            x = op.fake_quantize(x, low, high, low, high, 256)
            scales = op.constant(np.full((width, 1), gemm.weight_scale(width), np.float32))
            constant = op.multiply(op.convert(op.constant(weight), np.float32), scales)
        else:
            constant = op.constant(weight)
        x = op.matmul(x, constant, False, True)
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISION_HINTS[precision]}
    if threads := threads or default_threads():
        config["INFERENCE_NUM_THREADS"] = str(threads)
    compiled = core.compile_model(runtime.Model([x], [image], "gemm"), "CPU", config)
    ops = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
    products = [info for info in ops if info["layerType"].value.startswith("FullyConnected")]
    ran = [info["runtimePrecision"].value for info in products]
    kernels = [str(info["primitiveType"].value) for info in products]
    gemm.check_precision([KERNEL_PRECISIONS.get(each, each) for each in ran], precision, kernels)
    request, feeds = compiled.create_infer_request(), [generator.standard_normal((rows, width), dtype=np.float32)]

    def query() -> Any:
        request.infer(feeds, share_inputs=True)

    return query, kernels[0].lower()


BACKEND = context.BenchBackend(profile, products)
