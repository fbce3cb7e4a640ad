"""What a bench reports about one artifact: percentiles and the claims they allow, throughput, flags, loading, energy.

A field that earlier versions did not write has a default, so their documents stay readable.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vitdeploy.benchmark.precision import Interval
from vitdeploy.benchmark.slowed import Throttled
from vitdeploy.spec import SPARSE

UNKNOWN: Interval = (None, None)
# Seconds of waiting for a quota in a second, from which on it is reported.
LEAST_WAIT = 0.01


@dataclass(frozen=True)
class Latency:
    """Milliseconds as measured: nearest-rank percentiles, and the mean."""

    p50: float
    p90: float
    p99: float
    mean: float


@dataclass(frozen=True)
class LatencyIntervals:
    """95 % intervals in milliseconds; None for a bound that the measurement does not give."""

    p50: Interval = UNKNOWN
    p90: Interval = UNKNOWN
    p99: Interval = UNKNOWN


@dataclass(frozen=True)
class BatchSizes:
    """Images per query: of the scenario behind the latency, and of the one behind the throughput."""

    single: int
    offline: int


@dataclass(frozen=True)
class Claim:
    """One percentile as it may be claimed (see `percentiles.Percentile`), with its 95 % interval."""

    percent: float
    value: float | None
    at_least: bool
    upper: float | None
    queries: int
    needed: int
    name: str
    ci95: Interval = UNKNOWN


@dataclass(frozen=True)
class Blocks:
    """All blocks in order of time: when each began, in seconds since the start of the run; the number of its process;
    its median latency in ms, None if no query was answered; whether nobody else used the machine and it did not
    throttle."""

    begun_seconds: tuple[float, ...] = ()
    process: tuple[int, ...] = ()
    median_ms: tuple[float | None, ...] = ()
    quiet: tuple[bool, ...] = ()


@dataclass(frozen=True)
class ScenarioResult:
    """All numbers of one scenario; `throughput` in images per second.

    For "server" only: `offered` queries per second, the share of the time that a query was running (`busy`), and how
    many were `unanswered` at the end. For "sustain" only, images per second: at `first`, at `last`, their quotient, and
    in each block (`bins`). `throttled`: of the blocks in which the machine throttled, None without any.
    """

    batch: int
    queries: int
    seconds: float
    percentiles: tuple[Claim, ...]
    mean_ms: float
    throughput: float
    blocks: Blocks = Blocks()
    offered: float | None = field(default=None, metadata=SPARSE)
    busy: float | None = field(default=None, metadata=SPARSE)
    unanswered: int | None = field(default=None, metadata=SPARSE)
    first: float | None = field(default=None, metadata=SPARSE)
    last: float | None = field(default=None, metadata=SPARSE)
    last_over_first: float | None = field(default=None, metadata=SPARSE)
    bins: tuple[float, ...] | None = field(default=None, metadata=SPARSE)
    throttled: Throttled | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class StageTimes:
    """The median of each stage from an image to its answer, in ms; None for a stage that this back end does not have.
    `copies`: whether copies to and from the device are stages of their own. `images`: how many were timed."""

    end_to_end: float
    end_to_end_p90: float
    copies: str
    images: int
    decode: float | None = field(default=None, metadata=SPARSE)
    preprocess: float | None = field(default=None, metadata=SPARSE)
    copy_in: float | None = field(default=None, metadata=SPARSE)
    execute: float | None = field(default=None, metadata=SPARSE)
    copy_out: float | None = field(default=None, metadata=SPARSE)
    infer: float | None = field(default=None, metadata=SPARSE)
    postprocess: float | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class Energy:
    """Joules per image of everything on the package or board, and their source; None if nothing measures them."""

    source: str = ""
    joules_per_image: float | None = None


@dataclass(frozen=True)
class MachineUse:
    """What the machine did meanwhile. mhz, celsius: minimum, median and maximum of the samples after each block.
    engine_threads: that compute one query. quota_waits: seconds that the quota of a control group kept threads from
    running, for each second."""

    affinity: tuple[int, ...]
    process_threads: int | None
    cpus_used: float | None
    taken_by_others: float | None
    mhz: tuple[float, float, float] | None
    celsius: tuple[float, float, float] | None
    engine_threads: int | None = None
    quota_waits: float | None = None


def quota_remarks(machine: MachineUse | None) -> list[str]:
    """What the quota of a control group did to an artifact's times."""
    if machine is None or (machine.quota_waits or 0.0) < LEAST_WAIT:
        return []
    return [
        f"throttled by the quota of its control group (cpu.max): threads waited {machine.quota_waits:.2f} s in each "
        f"second; {machine.engine_threads or 'an unknown number of'} threads computed a query"
    ]


@dataclass(frozen=True)
class Row:
    """One artifact.

    `latency_ms` comes from the scenario "single", `throughput` (images per second) from "offline"; each falls back to
    the first scenario. `samples` is the number of queries behind `latency_ms`. `flags`: see `benchmark.flags`.
    `parts_ms`: the median of each graph of one query, one after the other, where there are several.
    """

    artifact: str
    target: str
    precision: str
    provider: str
    batch: BatchSizes
    latency_ms: Latency
    throughput: float
    flags: tuple[str, ...]
    samples: int
    load_seconds: float
    first_inference_ms: float
    latency_ms_ci95: LatencyIntervals = LatencyIntervals()
    throughput_ci95: Interval = UNKNOWN
    warm_load_seconds: float | None = None
    peak_memory_bytes: int | None = None
    scenarios: dict[str, ScenarioResult] = field(default_factory=dict)
    stages_ms: StageTimes | None = None
    parts_ms: dict[str, float] | None = field(default=None, metadata=SPARSE)
    energy: Energy = Energy()
    machine: MachineUse | None = None
