"""The context of a bench (peak rates and profiles), and the interface of a back end that provides it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitdeploy.backends import BackendTable
from vitdeploy.spec import EngineSpec

# --- Measurements that put a latency in context: peak rates of the machine, and where each artifact's time goes -------


# Longer names and lists are truncated: a node that a compiler fused from a hundred others has a name of kilobytes.
LONGEST_NAME, MOST_FUSED = 200, 32


@dataclass(frozen=True)
class RateFacts:
    """The best rate of matrix products of `rows` x `width` x `width`, in operations per second (multiplications and
    additions); `kernel` is the runtime's name of the kernel."""

    target: str
    precision: str
    flops_per_second: float
    rows: int
    width: int
    kernel: str


@dataclass(frozen=True)
class Memory:
    """The copy rate: bytes read and written per second. `array_bytes`: the size of each array; `cache_bytes`: that of
    the last-level cache, None if the system does not report it."""

    bytes_per_second: float
    array_bytes: int
    cache_bytes: int | None
    threads: int


@dataclass(frozen=True)
class Layer:
    """One layer as the runtime ran it: its median time, and the precision that it computed in. `fuses`: the graph nodes
    fused into it, if there are several. `product`: whether it multiplies matrices."""

    name: str
    kind: str
    precision: str
    milliseconds: float
    product: bool
    fuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Profile:
    """The layers of one artifact in execution order, over several runs of `batch` images.

    `latency_ms`: the median of whole queries at the same time; if the machine's speed varies, it may differ much from
    that of the benchmark run. `per_layer_ms`: the profiler's overhead per layer, if known; it is subtracted from all
    times.
    """

    artifact: str
    batch: int
    runs: int
    layers: tuple[Layer, ...]
    latency_ms: float
    per_layer_ms: float = 0.0


@dataclass(frozen=True)
class LeftOut:
    """A measurement that failed, and why: the "memory", the "rate" of a target and precision, or the "profile" of an
    artifact."""

    what: Literal["memory", "rate", "profile"]
    name: str
    why: str = ""

    def __str__(self) -> str:
        return self.what if self.what == self.name else f"{self.what} of {self.name}"


@dataclass(frozen=True)
class Context:
    """The measurements after a benchmark run, on the same machine with the same number of threads."""

    rates: tuple[RateFacts, ...]
    memory: Memory | None
    profiles: tuple[Profile, ...]
    left_out: tuple[LeftOut, ...]


# --- The interface of a back end for `bench`, besides running engines, and the table of back ends ---------------------


Query = Callable[[], object]


@dataclass(frozen=True)
class ProfileRequest:
    """An engine whose layers to time: the file that the runtime loads, the engine, its name in the report, and the
    approximate time to spend in seconds."""

    file: Path
    engine: EngineSpec
    name: str
    batch: int
    threads: int
    seconds: float


@dataclass(frozen=True)
class BenchBackend:
    """How to profile a runtime and measure its peak rates.

    profile: times the layers of an engine over a few dozen runs.
    products: takes the rows and width of a few matrix products, the precision and the number of threads; returns a
        function that computes them, and the runtime's name of the kernel. Raises CapabilityError if it cannot compute
        in that precision.
    """

    profile: Callable[[ProfileRequest], Profile]
    products: Callable[[int, int, str, int], tuple[Query, str]]


# A back end that is missing here is measured without its layers and peak rates.
BENCH = BackendTable(
    "benchmark",
    BenchBackend,
    {"onnxruntime": "vitdeploy.benchmark.onnxruntime:BACKEND", "openvino": "vitdeploy.benchmark.openvino:BACKEND"},
)
