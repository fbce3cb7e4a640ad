"""The peak rate at which a runtime multiplies matrices here: the reference for a model's own rate.

It times a few layers in sequence, each a product of [rows, width] and a constant [width, width], so that weights are
packed and outputs quantized as in a network. The fastest of a few shapes counts: a rate that this machine reaches in
this runtime, not one from a data sheet.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from vitdeploy.benchmark.backend import BENCH, Query
from vitdeploy.benchmark.context import Rate
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.runner import Array

SEED = 0
LAYERS = 3
# Rows and width. 192 and 384 rows are whole tiles of every kernel; the weights of a layer fit a core's cache.
SHAPES = ((192, 768), (384, 768), (512, 1024))
LEAST_RUNS = 3


def best_rate(target: str, precision: str, threads: int, seconds: float) -> Rate:
    """The rate of the fastest of `SHAPES`, by its median query, within about `seconds` and the time to load.

    Raises:
        CapabilityError: no probe for this target, or its kernels do not support this precision here.
        MissingPackageError, EngineError: of the runtime.
    """
    backend = BENCH.find(target)
    if backend is None:
        raise CapabilityError(f"the rates of {target} are not measured", wanted="a target on a CPU")
    found = []
    for rows, width in SHAPES:
        # One after the other: the threads of an idle session spin, and take cores from the next one.
        query, kernel = backend.products(rows, width, precision, threads)
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


def seeded_weights(width: int, precision: str) -> list[Array]:
    """Seeded random weights, scaled so that activations neither grow nor vanish from layer to layer."""
    generator = np.random.default_rng(SEED)
    if precision == "int8":
        return [generator.integers(-127, 128, (width, width), dtype=np.int8) for _ in range(LAYERS)]
    return [generator.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5) for _ in range(LAYERS)]


def weight_scale(width: int) -> float:
    """The scale of INT8 weights that are uniform in -127..127 (standard deviation 73)."""
    return float(1 / (73 * width**0.5))


def check_precision(ran: list[str], precision: str, kernels: list[str]) -> None:
    if ran != [precision] * LAYERS:
        raise CapabilityError(
            f"the probe did not run in {precision}",
            found=", ".join(kernels),
            wanted=f"{LAYERS} products in {precision}",
        )
