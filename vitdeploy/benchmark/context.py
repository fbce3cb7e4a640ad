"""What a bench is of: machine and back end."""

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
    """The best rate of matrix products: operations a second, a multiplication and an addition each, by products of
    `rows` x `width` x `width`; `kernel` is the runtime's own name of what computed it."""

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

    `latency_ms`: the median of whole queries at the same time; on a machine whose speed varies it may be far from that
    of the benchmark run. `per_layer_ms`: the profiler's overhead per layer, if it is visible; no time includes it.
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
    why: str = ""

    def __str__(self) -> str:
        return self.what if self.what == self.name else f"{self.what} of {self.name}"


@dataclass(frozen=True)
class Context:
    """All that was measured after a benchmark run, on the same machine with the same number of threads."""

    rates: tuple[RateFacts, ...]
    memory: Memory | None
    profiles: tuple[Profile, ...]
    left_out: tuple[LeftOut, ...]


# --- What a back end provides for `bench` beyond running engines, and the table of back ends --------------------------


Query = Callable[[], object]


@dataclass(frozen=True)
class ProfileRequest:
    """The engine whose layers to time: the file that the runtime loads, the engine, its name in the report, and about
    how many seconds to spend."""

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
        query of them and the runtime's name for the kernel. Raises CapabilityError if it cannot compute in that
        precision.
    """

    profile: Callable[[ProfileRequest], Profile]
    products: Callable[[int, int, str, int], tuple[Query, str]]


# A back end that is missing here is still measured, but without its layers and its best rates.
BENCH = BackendTable(
    "benchmark",
    BenchBackend,
    {"onnxruntime": "vitdeploy.benchmark.onnxruntime:BACKEND", "openvino": "vitdeploy.benchmark.openvino:BACKEND"},
)
