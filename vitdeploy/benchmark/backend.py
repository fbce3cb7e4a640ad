"""What a back end provides for `bench` beyond running engines, and the table of back ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.backends import BackendTable
from vitdeploy.benchmark.context import Profile
from vitdeploy.spec import EngineSpec

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
