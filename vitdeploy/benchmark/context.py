"""What a latency is held against, as it was measured: rates of the machine, and where each artifact's time goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Longer names and lists are cut: a node that a compiler fused of a hundred others has a name of kilobytes.
LONGEST_NAME, MOST_FUSED = 200, 32


@dataclass(frozen=True)
class Rate:
    """The best rate of matrix products in one runtime at one precision: floating-point (or integer) operations a
    second, a multiplication and an addition each. `shape`: the rows and the width that reached it. `kernel`: the
    runtime's own name of what computed it."""

    target: str
    precision: str
    flops: float
    shape: tuple[int, int]
    kernel: str


@dataclass(frozen=True)
class Memory:
    """The rate of copying: bytes read and written a second. `array_bytes` each array has; `cache_bytes` is the last
    level of cache, None where the system does not tell."""

    bytes_per_second: float
    array_bytes: int
    cache_bytes: int | None
    threads: int


@dataclass(frozen=True)
class Layer:
    """One layer as the runtime ran it: its median time, and the precision that it computed in. `fuses`: the nodes of
    the graph that it does the work of, where there are several. `product`: whether it multiplies matrices."""

    name: str
    kind: str
    precision: str
    milliseconds: float
    product: bool
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The layers of one artifact in the order in which they ran, over so many runs of `batch` images.

    `latency_ms`: the median of whole queries at the same moment, which that of the benchmark run may be far from on a
    machine whose speed moves. `per_layer_ms`: what the runtime's profiler itself takes for a layer, where that shows;
    it is in no time.
    """

    artifact: str
    batch: int
    runs: int
    layers: tuple[Layer, ...]
    latency_ms: float
    per_layer_ms: float = 0.0


@dataclass(frozen=True)
class LeftOut:
    """What could not be measured, and why: the "memory", the "rate" of a target and precision, or the "profile" of an
    artifact."""

    what: Literal["memory", "rate", "profile"]
    name: str
    why: str

    def __str__(self) -> str:
        return self.what if self.what == self.name else f"{self.what} of {self.name}"


@dataclass(frozen=True)
class Context:
    """All that was measured after a benchmark run, on the same machine with the same number of threads."""

    rates: tuple[Rate, ...]
    memory: Memory | None
    profiles: tuple[Profile, ...]
    left_out: tuple[LeftOut, ...]
