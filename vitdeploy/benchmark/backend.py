"""What `bench` asks of a back end beyond running its engines: its table."""

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
    """Whose layers to time: the file that the runtime loads, the engine, the name in the report, and for about how
    many seconds."""

    file: Path
    engine: EngineSpec
    name: str
    batch: int
    threads: int
    seconds: float


@dataclass(frozen=True)
class BenchBackend:
    """What a runtime tells of the time that it takes.

    profile: the layers of an engine, over some dozens of runs.
    products: a query of a few matrix products, given their rows and width, the precision and the number of threads, and
        the runtime's own name of the kernel; raises CapabilityError where it does not compute in that precision.
    """

    profile: Callable[[ProfileRequest], Profile]
    products: Callable[[int, int, str, int], tuple[Query, str]]


# A back end that is not here is measured all the same, but neither its layers nor its best rates are known.
BENCH = BackendTable(
    "benchmark",
    BenchBackend,
    {"onnxruntime": "vitdeploy.benchmark.onnxruntime:BACKEND", "openvino": "vitdeploy.benchmark.openvino:BACKEND"},
)
