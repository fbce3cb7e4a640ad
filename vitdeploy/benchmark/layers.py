"""Where the time of an artifact goes: its layers, as the runtime's own profiler times them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vitdeploy.benchmark.backend import BENCH, ProfileRequest
from vitdeploy.benchmark.context import LONGEST_NAME, MOST_FUSED, Layer, Profile
from vitdeploy.errors import CapabilityError
from vitdeploy.spec import EngineSpec

LEAST_RUNS, MOST_RUNS = 5, 50
# What the runtimes add to the name of a node that they fuse into another or lay out again.
ADDED = re.compile(r"(/\w+Fusion|_nchwc|/WithoutBiases)+$")


def profile(folder: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> Profile:
    """The layers of an engine whose files lie under `folder`, over some dozens of runs within about `seconds`.

    Raises:
        CapabilityError: the engine has no profiler here, or is an encoder-decoder's.
        VitdeployError: the runtime's own errors.
    """
    if engine.parts:
        raise CapabilityError("an encoder-decoder's graphs run many times a query: its layers are not timed")
    backend = BENCH.find(engine.target)
    if backend is None:
        raise CapabilityError(f"the layers of {engine.target} are not timed", wanted="a target on a CPU")
    return backend.profile(ProfileRequest(folder / engine.files[0], engine, name, batch, threads, seconds))


def repeat(query: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None) -> list[float]:
    """Run for so long, at least LEAST_RUNS times and at most MOST_RUNS; returns the milliseconds of each run, without
    what is done after it."""
    begun, found = time.perf_counter(), list[float]()
    while len(found) < LEAST_RUNS or (len(found) < MOST_RUNS and time.perf_counter() - begun < seconds):
        start = time.perf_counter()
        query()
        found.append((time.perf_counter() - start) * 1e3)
        after()
    return found


def profiled_layer(
    name: str, kind: str, precision: str, milliseconds: float, product: bool, fuses: Sequence[str] = ()
) -> Layer:
    parts = tuple(dict.fromkeys(_short(each) for each in fuses))[:MOST_FUSED]
    return Layer(_short(name), kind[:LONGEST_NAME], precision, milliseconds, product, parts if len(parts) > 1 else ())


def _short(name: str) -> str:
    return ADDED.sub("", name)[:LONGEST_NAME]
