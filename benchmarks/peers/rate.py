"""The best rate at which OpenVINO's INT8 FullyConnected runs for given K and N, at any number of rows.

One layer alone, its weights in cache, timed by the plugin itself: nothing around it, so nothing can be faster. A shared
machine is not always as fast, so the engine that the rate is compared with is timed alternately with the layers, in the
same process and on the same runtime.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from child import Payload, serve

from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.openvino import require
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, decode

SEED, LEAST = 0, 20


def work(payload: Payload) -> Payload:
    """{"rates": [{"k", "n", "rows", "macs_per_second", "by_rows"}], "engine_ms"}: for the shapes of the payload."""
    found, engine_ms = [], list[float]()
    with _engine(payload["run"], payload["threads"]) as engine:
        for k, n in payload["shapes"]:
            rates = {}
            for rows in payload["rows"]:
                rates[rows] = _rate(rows, k, n, payload["threads"], payload["seconds"])
                engine_ms.append(_latency_ms(engine, payload["seconds"]))
            best = max(rates, key=lambda rows: rates[rows])
            found.append({"k": k, "n": n, "rows": best, "macs_per_second": rates[best], "by_rows": rates})
    return {"rates": found, "engine_ms": engine_ms}


def _engine(run: Mapping[str, Any], threads: int) -> Runner:
    return make_runner(Path(run["folder"]), decode(EngineSpec, run["engine"]), batch=1, threads=threads)


def _latency_ms(engine: Runner, seconds: float) -> float:
    """The latency of the median query."""
    [tensor] = engine.inputs
    feed = {tensor.name: np.random.default_rng(SEED).integers(0, 256, tensor.shape).astype(tensor.dtype)}
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        before = time.perf_counter()
        engine.infer(feed)
        times.append(1e3 * (time.perf_counter() - before))
    return statistics.median(times)


def _rate(rows: int, k: int, n: int, threads: int, seconds: float) -> float:
    """Multiplications a second, of the median run."""
    openvino = require()
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(threads), "PERF_COUNT": "YES"}
    compiled = openvino.Core().compile_model(_model(openvino, rows, k, n), "CPU", config)
    request = compiled.create_infer_request()
    feed = np.random.default_rng(SEED).standard_normal((rows, k), dtype=np.float32)
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < LEAST or time.perf_counter() - start < seconds:
        request.infer([feed], share_inputs=True)
        times.append(_kernel_seconds(request))
    return rows * k * n / statistics.median(times)


def _kernel_seconds(request: Any) -> float:
    kernels = [each for each in request.profiling_info if each.node_type == "FullyConnected"]
    if len(kernels) != 1 or not kernels[0].exec_type.upper().endswith("8"):
        raise RuntimeError(f"not one INT8 kernel: {[each.exec_type for each in kernels]}")
    return float(kernels[0].real_time.total_seconds())


def _model(openvino: Any, rows: int, k: int, n: int) -> Any:
    """u8 activations per tensor, i8 weights per output channel, float result: the form that placements have."""
    op, generator = openvino.opset13, np.random.default_rng(SEED)
    image = op.parameter([rows, k], np.float32)
    low, high = (op.constant(np.float32(limit)) for limit in (-4.0, 4.0))
    activations = op.fake_quantize(image, low, high, low, high, 256)
    weight = op.constant(generator.integers(-127, 128, (n, k), dtype=np.int8))
    scale = op.constant(np.full((n, 1), 1e-3, np.float32))
    weights = op.multiply(op.convert(weight, np.float32), scale)
    product = op.matmul(activations, weights, False, True)
    bias = op.constant(generator.standard_normal((1, n), dtype=np.float32))
    return openvino.Model([op.add(product, bias)], [image], "linear")


if __name__ == "__main__":
    serve(work)
