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
# What the runtimes append to the name of a node that they fuse into another or change the layout of.
ADDED = re.compile(r"(/\w+Fusion|_nchwc|/WithoutBiases)+$")


def profile(folder: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> Profile:
    """Profile the layers of an engine whose files lie under `folder`, in a few dozen runs within about `seconds`.

    Raises:
        CapabilityError: the engine has no profiler here, or belongs to an encoder-decoder.
        VitdeployError: the runtime's own errors.
    """
    if engine.parts:
        raise CapabilityError("an encoder-decoder's graphs run many times a query: its layers are not timed")
    backend = BENCH.find(engine.target)
    if backend is None:
        raise CapabilityError(f"the layers of {engine.target} are not timed", wanted="a target on a CPU")
    return backend.profile(ProfileRequest(folder / engine.files[0], engine, name, batch, threads, seconds))


def repeat(query: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None) -> list[float]:
    """Run for about `seconds`, at least LEAST_RUNS and at most MOST_RUNS times; returns the milliseconds of each run,
    without what follows it."""
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
