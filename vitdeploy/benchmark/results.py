"""The raw measurements of a benchmark run; `summary` turns them into numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vitdeploy.benchmark.context import Context
from vitdeploy.benchmark.protocol import Protocol

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What the machine did during one block; None for what it does not report.

    own_seconds, other_seconds, stolen_seconds: CPU time of the measuring process, of all others on the CPUs that it may
        use, and of other virtual machines.
    joules: see `energy`. mhz, celsius: the fastest of these CPUs and the hottest sensor, right after the block.
    throttles: how often CPUs were slowed down by heat since boot. suspended_seconds: how long the machine slept.
    waited_seconds: the longest that one of its threads was ready to run without a CPU.
    throttled: why the machine was slower, see `throttling`; empty if it says of nothing. limit_mhz: the highest clock
        that any of these CPUs was allowed, right after the block. quota_seconds: how long the quota of a control group
        kept its threads from running.
    """

    own_seconds: float
    other_seconds: float | None
    stolen_seconds: float | None
    joules: float | None
    mhz: float | None
    celsius: float | None
    throttles: int | None
    suspended_seconds: float
    waited_seconds: float | None = None
    throttled: tuple[str, ...] = ()
    limit_mhz: float | None = None
    quota_seconds: float | None = None


@dataclass(frozen=True)
class Round:
    """One block of queries of `batch` images: the latency of each query in ms, and the seconds of the whole block.

    process: the number of the process, from 0. busy_seconds: those with a query running. waiting_ms: the ages of the
    queries that had arrived but not started at the end of the block ("server"). begun_seconds: when the block was
    requested, since the benchmark run began.
    """

    batch: int
    latencies_ms: Values
    seconds: float
    process: int = 0
    busy_seconds: float = 0.0
    waiting_ms: tuple[float, ...] = ()
    machine: Machine | None = None
    begun_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        return self.batch * self.latencies_ms.size / self.seconds


@dataclass(frozen=True)
class Entry:
    """The measurements of one candidate; `rounds` has one list per scenario.

    `load_seconds` (from the request to a loaded runner, with the import of the runtime), `first_inference_ms` and
    `peak_memory_bytes` (of the whole process, which had answered once) are those of the first batch size in the first
    process; `warm_load_seconds` is the load in the second process, None without one. `affinity`: the CPUs that it could
    use. `energy`: the source of the joules, or why there are none. `stages_ms`: empty if it takes no images;
    `parts_ms`: of each graph of one query, empty if there is one.
    """

    artifact: str
    target: str
    precision: str
    provider: str
    load_seconds: float
    first_inference_ms: float
    rounds: dict[str, list[Round]]
    made_for: str = ""
    warm_load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    process_threads: int | None = None
    engine_threads: int | None = None
    affinity: tuple[int, ...] = ()
    energy: str = ""
    stages_ms: dict[str, list[float]] = field(default_factory=dict)
    parts_ms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchRun:
    """The measurements of all candidates, in their order; `load_average` is the machine's at the start (1 minute).

    `context` is what they are compared with, if it was measured after them.
    """

    protocol: Protocol
    entries: tuple[Entry, ...]
    load_average: float | None
    cpus: int
    context: Context | None = None
