"""The results of a bench: latencies with their percentiles, the protocol, and the state of the machine."""

import bisect
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from vitdeploy.benchmark.context import Context
from vitdeploy.benchmark.protocol import Protocol

# --- The raw measurements of a benchmark run; `summary` turns them into numbers ---------------------------------------


Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BlockMachine:
    """The state of the machine during one block; None for what it does not report.

    own_seconds, other_seconds, stolen_seconds: CPU time of the measuring process, of all others on the CPUs that it may
        use, and of other virtual machines.
    joules: see `energy`. mhz, celsius: the fastest of these CPUs and the hottest sensor, right after the block.
    throttles: how often CPUs were slowed down by heat since boot. suspended_seconds: how long the machine slept.
    waited_seconds: the longest time that one of its threads was ready to run without a CPU.
    throttled: why the machine was slower; empty if it reports nothing. limit_mhz: the highest clock that any of these
        CPUs was allowed, right after the block. quota_seconds: how long the quota of a control group kept its threads
        from running.
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

    process: the number of the process, from 0. busy_seconds: the seconds with a running query. waiting_ms: the ages of
    the queries that had arrived but not started at the end of the block ("server"). begun_seconds: when the block was
    requested, since the start of the benchmark run.
    """

    batch: int
    latencies_ms: Values
    seconds: float
    process: int = 0
    busy_seconds: float = 0.0
    waiting_ms: tuple[float, ...] = ()
    machine: BlockMachine | None = None
    begun_seconds: float = 0.0

    @property
    def images_per_second(self) -> float:
        return self.batch * self.latencies_ms.size / self.seconds


@dataclass(frozen=True)
class Measurements:
    """The measurements of one candidate; `rounds` has one list per scenario.

    `load_seconds` (from the request to a loaded runner, with the import of the runtime), `first_inference_ms` and
    `peak_memory_bytes` (of the whole process after its first answer) are those of the first batch size in the first
    process; `warm_load_seconds` is the load in the second process, None without one. `affinity`: the CPUs that it could
    use. `energy`: the source of the joules, or why they are missing. `stages_ms`: empty if it takes no images;
    `parts_ms`: the times of each graph of one query, empty for a single graph.
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

    `context`: peak rates and profiles, if they were measured afterwards.
    """

    protocol: Protocol
    entries: tuple[Measurements, ...]
    load_average: float | None
    cpus: int
    context: Context | None = None


# --- Percentiles of latency, and the claims about them that a number of queries supports ------------------------------
# A percentile is the nearest-rank one, a measured latency. Claims about the percentile of all future queries follow
# from the binomial distribution: of n queries, the number above the true percentile p is binomial with probability
# 1 - p. MLPerf's early stopping uses it with confidence 0.99 and tolerance 0 (MLCommons, inference_rules.adoc, appendix
# "Early Stopping Criterion"; loadgen/early_stopping.cc).


CONFIDENCE = 0.99
MOST_QUERIES = 1 << 62
DEFAULT = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class Claim:
    """The claim about one percentile of `queries` latencies, in their unit, with its 95 % interval.

    value: the nearest-rank percentile. With fewer than `needed` queries it is instead the largest latency that the
        true percentile reaches with 99 % confidence, and `at_least` is true; None without such a latency.
    upper: MLPerf's early-stopping estimate, which the true percentile does not exceed with 99 % confidence; None with
        fewer than `needed` queries.
    """

    percent: float
    value: float | None
    at_least: bool
    upper: float | None
    queries: int
    needed: int
    name: str
    ci95: tuple[float | None, float | None] = (None, None)


def percentiles(values: Values, percents: Sequence[float] = DEFAULT) -> list[Claim]:
    """Each requested percentile, in the order given, of any number of latencies, including none; without intervals."""
    ordered = np.sort(values)
    return [_percentile(ordered, percent) for percent in percents]


def _percentile(ordered: Values, percent: float) -> Claim:
    needed, count, name = queries_needed(percent), int(ordered.size), f"p{percent:g}"
    if count >= needed:
        upper = float(ordered[count - over_latency(count, percent)])
        return Claim(percent, nearest_rank(ordered, percent), False, upper, count, needed, name)
    rank = least_rank(count, percent)
    return Claim(percent, float(ordered[rank - 1]) if rank else None, True, None, count, needed, name)


def nearest_rank(values: Values, percent: float) -> float:
    """The ceil(percent / 100 * n)-th smallest of n values, at least one."""
    # An exact fraction: 99.9 % of 1,000 is 999, not 999.0000000000001.
    rank = max(1, math.ceil(Fraction(str(percent)) * values.size / 100))
    return float(np.sort(values)[rank - 1])


def queries_needed(percent: float) -> int:
    """The least number of queries for a statement about a percentile: one may be above it, with 99 % confidence.

    The smallest n with P(Binomial(n, 1 - p) <= 1) <= 0.01: 64 for p90, 662 for p99, 6,636 for p99.9.
    """
    below, above = percent / 100, 1 - percent / 100

    def enough(count: int) -> bool:
        return below**count + count * above * below ** (count - 1) <= 1 - CONFIDENCE

    return bisect.bisect_left(range(MOST_QUERIES), True, 1, key=enough)


def over_latency(count: int, percent: float) -> int:
    """How many of `count` queries may reach or exceed the early-stopping estimate: the largest t with
    P(Binomial(count, 1 - p) <= t) <= 0.01. 0 if `count` is less than `queries_needed`."""
    reached = np.flatnonzero(_distribution(count, 1 - percent / 100) <= 1 - CONFIDENCE)
    return int(reached[-1]) if reached.size else 0


def least_rank(count: int, percent: float) -> int:
    """The largest rank k, from 1, whose latency is at most the true percentile with 99 % confidence; 0 without one.

    The k-th smallest exceeds the percentile only if more than count - k queries do.
    """
    above = np.flatnonzero(_distribution(count, 1 - percent / 100) >= CONFIDENCE)
    return count - int(above[0])


def _distribution(count: int, probability: float) -> Values:
    """P(Binomial(count, probability) <= k) for k = 0 .. count."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    k = np.arange(count + 1)
    logs = factorials[-1] - factorials - factorials[::-1]
    logs += k * math.log(probability) + (count - k) * math.log1p(-probability)
    values: Values = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return values


# --- Blocks in which the machine throttled, according to its kernel and firmware --------------------------------------
# Such blocks are not averaged: a board that is too hot, or has too little power, is another machine. They are left out
# like blocks in which other processes ran; the latency never decides.


# The allowed drop of a clock after a block below the artifact's usual clock (the upper quartile); steps of turbo clocks
# under one load are smaller.
CLOCK_FELL = 0.15
# The allowed drop of the clock limit below the highest one; the kernel rounds it.
LIMIT_FELL = 0.01
MOST_REASONS = 3


@dataclass(frozen=True)
class Throttled:
    """The number of `blocks`, `of` all blocks of a scenario, in which the machine throttled; whether they are left out;
    the reasons, the most frequent first."""

    blocks: int
    of: int
    left_out: bool
    seen: tuple[str, ...]

    def __str__(self) -> str:
        kept = ", left out" if self.left_out else ""
        return f"throttled: {self.blocks} of {self.of} blocks{kept} ({'; '.join(self.seen)})"


def reasons(rounds: Sequence[Round], *, loaded: bool = True) -> list[tuple[str, ...]]:
    """For each block of one artifact and scenario, why the machine was slower in it; empty for one that counts.

    `loaded`: the CPU had work until the end of each block, so that a governor had no reason to lower its clock.
    """
    limits = [block.machine.limit_mhz if block.machine else None for block in rounds]
    clocks = [block.machine.mhz if block.machine else None for block in rounds]
    highest = max((limit for limit in limits if limit is not None), default=0.0)
    known = [clock for clock in clocks if clock is not None]
    usual = float(np.quantile(known, 0.75)) if known and loaded else 0.0
    return [
        (
            *(block.machine.throttled if block.machine else ()),
            *(["the clock limit dropped"] if limit is not None and limit < (1 - LIMIT_FELL) * highest else []),
            *(["the clock dropped"] if clock is not None and clock < (1 - CLOCK_FELL) * usual else []),
        )
        for block, limit, clock in zip(rounds, limits, clocks, strict=True)
    ]


def throttled(rounds: Sequence[Round], spread: bool) -> Throttled | None:
    """The report on throttled blocks; None if no block was throttled. `spread`: the rounds of their scenario may be
    spread over processes; the caller sets `left_out`."""
    found = [reason for reason in reasons(rounds, loaded=spread) if reason]
    if not found:
        return None
    counted = Counter(text for each in found for text in each)
    return Throttled(len(found), len(rounds), False, tuple(text for text, _ in counted.most_common(MOST_REASONS)))


def mostly_slowed(entries: Sequence[Measurements], scenario: str) -> bool:
    """Whether the machine throttled in most blocks of one of these artifacts."""
    found = [reasons(entry.rounds[scenario]) for entry in entries]
    return any(2 * sum(map(bool, each)) > len(each) for each in found)
