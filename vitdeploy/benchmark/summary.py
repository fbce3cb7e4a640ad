"""The results of a bench as numbers: rows per artifact, and decided or undecided ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from vitdeploy.benchmark.evidence import (
    Interval,
    PairedRatio,
    Unrest,
    awake,
    clustered,
    enough,
    falls_back,
    first_and_last,
    flags,
    images_per_second,
    in_common,
    load_disturbs,
    medians_of,
    percentile_interval,
    quiet,
    quiet_together,
    ratio_of_rounds,
    taken_by_others,
    throughput_interval,
    together,
    undelayed,
    unrest,
    usable,
)
from vitdeploy.benchmark.protocol import parse_scenario
from vitdeploy.benchmark.results import (
    DEFAULT,
    BenchRun,
    Claim,
    Measurements,
    Round,
    Throttled,
    Values,
    nearest_rank,
    percentiles,
    throttled,
)
from vitdeploy.spec import SPARSE

# --- The report of a bench on one artifact: percentiles with claims, throughput, flags, loading, energy ---------------


Metric = Literal["latency", "throughput"]
UNKNOWN: Interval = (None, None)
# From this many seconds per second on, waiting for a quota is reported.
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
    """95 % intervals in milliseconds; None for an unknown bound."""

    p50: Interval = UNKNOWN
    p90: Interval = UNKNOWN
    p99: Interval = UNKNOWN


@dataclass(frozen=True)
class BatchSizes:
    """Images per query in the scenarios of the latency (`single`) and of the throughput (`offline`)."""

    single: int
    offline: int


@dataclass(frozen=True)
class Blocks:
    """All blocks in order of time: the start of each, in seconds since the start of the run; the number of its process;
    its median latency in ms, None if no query was answered; whether it was quiet (no other processes, no
    throttling)."""

    begun_seconds: tuple[float, ...] = ()
    process: tuple[int, ...] = ()
    median_ms: tuple[float | None, ...] = ()
    quiet: tuple[bool, ...] = ()


@dataclass(frozen=True)
class ScenarioResult:
    """All numbers of one scenario; `throughput` in images per second.

    For "server" only: `offered` queries per second, the share of the time with a running query (`busy`), and the number
    of queries `unanswered` at the end. For "sustain" only, images per second: at `first`, at `last`, their quotient,
    and in each block (`bins`). `throttled`: the blocks in which the machine throttled, None without any.
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
    """The median time of each stage from an image to its answer, in ms; None for a stage that this back end lacks.
    `copies`: whether copies to and from the device are separate stages. `images`: the number of timed images."""

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
    """Joules per image of the whole package or board, and their source; None if the machine does not measure them."""

    source: str = ""
    joules_per_image: float | None = None


@dataclass(frozen=True)
class MachineUse:
    """The state of the machine during the bench. mhz, celsius: minimum, median and maximum of the samples after each
    block. engine_threads: the threads that compute one query. quota_waits: seconds per second that the quota of a
    control group kept threads from running."""

    affinity: tuple[int, ...]
    process_threads: int | None
    cpus_used: float | None
    taken_by_others: float | None
    mhz: tuple[float, float, float] | None
    celsius: tuple[float, float, float] | None
    engine_threads: int | None = None
    quota_waits: float | None = None


@dataclass(frozen=True)
class Row:
    """One artifact.

    `latency_ms` comes from the scenario "single", `throughput` (images per second) from "offline"; each falls back to
    the first scenario. `samples` is the number of queries behind `latency_ms`. `flags`: see docs/measuring.md.
    `parts_ms`: the median time of each graph of one query, in a model with several.
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


def machine_remarks(rows: Sequence[Row]) -> list[str]:
    """Remarks on what may have slowed artifacts: other processes that cannot be seen, and a control group's quota."""
    unseen = any("unwatched" in row.flags for row in rows)
    remarks = ["unwatched: other processes are not visible on this system; measure on Linux"] if unseen else []
    waits = [
        (row.artifact, row.machine) for row in rows if row.machine and (row.machine.quota_waits or 0) >= LEAST_WAIT
    ]
    return remarks + [
        f"{artifact}: throttled by the CPU quota of its control group (cpu.max): threads waited "
        f"{machine.quota_waits:.2f} s per second; threads per query: {machine.engine_threads or 'unknown'}"
        for artifact, machine in waits
    ]


# --- From the measurements of a run to the numbers of a report: percentiles, throughput, flags ------------------------


NOT_APART = "not timed separately by this back end"


def rows(bench_run: BenchRun, percents: Sequence[float] = DEFAULT) -> list[Row]:
    """One row per candidate, in the benchmark run's order; `percents` are the percentiles to claim for each scenario.

    Disturbed blocks are left out if enough quiet blocks remain (see `usable`).
    """
    return [_row(bench_run, entry, percents) for entry in bench_run.entries]


def _row(bench_run: BenchRun, entry: Measurements, percents: Sequence[float]) -> Row:
    single, scenarios = bench_run.protocol.latency_scenario, bench_run.protocol.scenarios
    offline = "offline" if "offline" in scenarios else scenarios[0]
    rounds, batches = (usable(bench_run.protocol, entry, name) for name in (single, offline))
    latencies, throughput = _latencies(rounds), images_per_second(batches)
    counted = _with_unanswered(rounds)
    every = [block for blocks in entry.rounds.values() for block in blocks]
    return Row(
        artifact=entry.artifact,
        target=entry.target,
        precision=entry.precision,
        provider=entry.provider,
        batch=BatchSizes(bench_run.protocol.batch_of(single), bench_run.protocol.batch_of(offline)),
        latency_ms=Latency(
            p50=nearest_rank(latencies, 50),
            p90=nearest_rank(latencies, 90),
            p99=nearest_rank(latencies, 99),
            mean=float(latencies.mean()),
        ),
        latency_ms_ci95=LatencyIntervals(*(percentile_interval(counted, percent) for percent in (50, 90, 99))),
        throughput=throughput,
        throughput_ci95=throughput_interval(batches, throughput),
        flags=tuple(flags(bench_run, entry, single, percents)),
        samples=int(latencies.size),
        load_seconds=float(entry.load_seconds),
        warm_load_seconds=entry.warm_load_seconds,
        first_inference_ms=float(entry.first_inference_ms),
        peak_memory_bytes=entry.peak_memory_bytes,
        scenarios={name: _scenario(bench_run, entry, name, percents) for name in entry.rounds},
        stages_ms=_stages(entry.stages_ms),
        parts_ms={name: float(np.median(times)) for name, times in entry.parts_ms.items()} or None,
        energy=_energy(entry, rounds),
        machine=_machine(entry, every),
    )


def _scenario(bench_run: BenchRun, entry: Measurements, name: str, percents: Sequence[float]) -> ScenarioResult:
    """The numbers of one scenario; "server" and "sustain" have additional ones."""
    rounds = usable(bench_run.protocol, entry, name)
    latencies, counted, scenario = _latencies(rounds), _with_unanswered(rounds), parse_scenario(name)
    seconds = sum(block.seconds for block in rounds)
    found = ScenarioResult(
        batch=rounds[0].batch,
        queries=int(latencies.size),
        seconds=seconds,
        percentiles=tuple(
            replace(claim, ci95=percentile_interval(counted, claim.percent))
            for claim in percentiles(latencies, percents)
        ),
        mean_ms=float(latencies.mean()),
        throughput=images_per_second(rounds),
        blocks=_blocks(entry, entry.rounds[name]),
        throttled=_throttled(bench_run, entry, name),
    )
    if scenario.kind == "server":
        busy = sum(block.busy_seconds for block in rounds) / seconds
        return replace(found, offered=scenario.value, busy=busy, unanswered=len(rounds[-1].waiting_ms))
    if scenario.kind == "sustain":
        first, last = first_and_last(rounds)
        bins = tuple(block.images_per_second for block in rounds)
        return replace(found, first=first, last=last, last_over_first=last / first, bins=bins)
    return found


def _throttled(bench_run: BenchRun, entry: Measurements, name: str) -> Throttled | None:
    """The report on throttled blocks, and whether they are left out (see `usable`)."""
    every = entry.rounds[name]
    found = throttled(every, parse_scenario(name).spread)
    left_out = len(usable(bench_run.protocol, entry, name)) < len(every)
    return None if found is None else replace(found, left_out=left_out)


def _blocks(entry: Measurements, rounds: Sequence[Round]) -> Blocks:
    return Blocks(
        tuple(round(block.begun_seconds, 3) for block in rounds),
        tuple(block.process for block in rounds),
        tuple(float(np.median(block.latencies_ms)) if block.latencies_ms.size else None for block in rounds),
        tuple(quiet(rounds, len(entry.affinity))),
    )


def _stages(stages: Mapping[str, Sequence[float]]) -> StageTimes | None:
    """The stage times; None if the artifact takes no images."""
    if not stages:
        return None
    whole = np.asarray(stages["end_to_end"])
    return StageTimes(
        **{name: float(np.median(times)) for name, times in stages.items()},
        end_to_end_p90=nearest_rank(whole, 90),
        copies="apart" if "copy_in" in stages else NOT_APART,
        images=len(whole),
    )


def _energy(entry: Measurements, rounds: Sequence[Round]) -> Energy:
    joules = [block.machine.joules if block.machine is not None else None for block in rounds]
    known = [each for each in joules if each is not None]
    images = sum(block.batch * block.latencies_ms.size for block in rounds)
    complete = len(known) == len(joules) and images > 0
    return Energy(entry.energy, sum(known) / images if complete else None)


def _machine(entry: Measurements, rounds: Sequence[Round]) -> MachineUse:
    machines = [block.machine for block in rounds if block.machine is not None]
    seconds = sum(block.seconds for block in rounds)
    return MachineUse(
        tuple(entry.affinity),
        entry.process_threads,
        sum(each.own_seconds for each in machines) / seconds if machines else None,
        taken_by_others(entry, rounds),
        _spread([each.mhz for each in machines if each.mhz is not None]),
        _spread([each.celsius for each in machines if each.celsius is not None]),
        entry.engine_threads,
        sum(each.quota_seconds or 0.0 for each in machines) / seconds if seconds else None,
    )


def _spread(values: Sequence[float]) -> tuple[float, float, float] | None:
    return (min(values), float(np.median(values)), max(values)) if values else None


def block_medians(bench_run: BenchRun) -> dict[str, tuple[float, ...]]:
    """The median latency in ms of each round per artifact, in order of time. All artifacts have the same rounds: the
    quiet ones, if there are enough. Rounds without an answered query are left out."""
    rounds = together(bench_run.protocol, in_common(bench_run.entries), bench_run.protocol.latency_scenario)
    return {
        entry.artifact: tuple(float(np.median(block.latencies_ms)) for block in blocks if block.latencies_ms.size)
        for entry, blocks in zip(bench_run.entries, rounds, strict=True)
    }


def samples(bench_run: BenchRun, limit: int = 600) -> dict[str, tuple[float, ...]]:
    """At most `limit` latencies in ms per artifact, sampled evenly over time."""
    scenario = bench_run.protocol.latency_scenario
    return {
        entry.artifact: _evenly(_latencies(usable(bench_run.protocol, entry, scenario)), limit)
        for entry in bench_run.entries
    }


def _latencies(rounds: Sequence[Round]) -> Values:
    """Every latency in ms, including queries that were never answered."""
    return np.concatenate([block.latencies_ms for block in _with_unanswered(rounds)])


def _with_unanswered(rounds: Sequence[Round]) -> list[Round]:
    """The rounds with unanswered queries included. Each counts with its waiting time at the end, a lower bound of its
    latency; without them, an overloaded server would look faster."""
    *before, last = rounds
    every = np.concatenate([last.latencies_ms, np.asarray(last.waiting_ms, np.float64)])
    return [*before, replace(last, latencies_ms=every)]


def _evenly(values: Values, limit: int) -> tuple[float, ...]:
    if values.size > limit:
        values = values[np.linspace(0, values.size - 1, limit).round().astype(int)]
    return tuple(float(value) for value in values)


# --- Ratios, and the reasons why one is not decided -------------------------------------------------------------------


# The limit on the spread of the ratios of paired rounds, with 20 % clipped on either side: a larger spread is not timer
# noise, and nothing that the kernel reported explains it.
WILD_SPREAD, WILD_ROUNDS = 0.25, 6
# The allowed difference, beyond its interval, between the ratio of the medians of all queries and that of paired
# rounds.
APART_REACH = 0.1
# For claims on a busy machine: the level of all looks together; the least factor that is claimed; the reduction of each
# claim for differences between processes and queries; and the longest query, in ms, that fits between two turns of
# other processes (Linux gives a busy process turns of 3 ms; on a CPU shared with a busy loop, the digits' original of
# 4 ms ran no query in less than 8).
ONE_SIDED, LEAST_CLAIM, CAUTION, SHORT_MS = 0.025, 1.1, 0.85, 3.0
UNLIKELY = 0.001
# The least share that a reason mentions.
MENTIONED = 0.005
NOT_DECIDED = "not decided"
MADE_FOR = "was made for"
MEASURE_AGAIN = "measure again on a quiet machine, or for longer (--duration; bench.duration in a recipe)"
COOL_DOWN = "let it cool down or give it more power (`vitdeploy doctor` says which helps), then measure again"


@dataclass(frozen=True)
class Ratio:
    """The ratio a / b of two artifacts with its 95 % interval, from the median queries of paired rounds.

    `verdict` on `a`: faster, slower, no difference, or not decided; seems faster or seems slower if the evidence points
    there without proof. `decided`: whether the interval is reliable; if not, `reason` says why, `ratio` may lie outside
    `ci95`, and `bounds` still hold: the ratio is at least the first and at most the second, each None if unknown.
    `a_ms`, `b_ms`: the latencies of the ratio, from paired rounds. `unstable`: the ratios of paired rounds vary too
    much.
    """

    a: str
    b: str
    metric: Metric
    ratio: float
    ci95: tuple[float, float]
    verdict: str = ""
    decided: bool = True
    reason: str = ""
    a_ms: float | None = field(default=None, metadata=SPARSE)
    b_ms: float | None = field(default=None, metadata=SPARSE)
    unstable: bool = False
    bounds: Interval = UNKNOWN

    @property
    def sure(self) -> tuple[float, float]:
        """Reliable bounds of the ratio: its interval, or the `bounds` of an undecided one."""
        low, high = self.bounds
        return self.ci95 if self.decided else (low or 0.0, math.inf if high is None else high)

    @property
    def inverse(self) -> Ratio:
        """b / a."""
        low, high = self.bounds
        words = {"faster": "slower", "slower": "faster", "seems faster": "seems slower", "seems slower": "seems faster"}
        return replace(
            self,
            a=self.b,
            b=self.a,
            ratio=1 / self.ratio,
            ci95=(1 / self.ci95[1], 1 / self.ci95[0]),
            verdict=words.get(self.verdict, self.verdict),
            a_ms=self.b_ms,
            b_ms=self.a_ms,
            bounds=(high and 1 / high, low and 1 / low),
        )


def judged(bench_run: BenchRun, a: str, b: str, scenario: str, metric: Metric = "latency") -> Ratio:
    """The latency, or throughput, of `a` over that of `b`, from the rounds in which neither was disturbed. The verdict
    on an undecided ratio without bounds is `NOT_DECIDED`, or a "seems" verdict."""
    named = {entry.artifact: entry for entry in bench_run.entries}
    over, under = in_common((named[a], named[b]) if metric == "latency" else (named[b], named[a]))
    pair = (over, under)
    rounds = together(bench_run.protocol, pair, scenario)
    paired = ratio_of_rounds(*rounds)
    reason = (
        _fallback(pair)
        or _disturbed(bench_run, pair, scenario)
        or _wild(paired, len(rounds[0]), scenario)
        or _apart(paired, [usable(bench_run.protocol, entry, scenario) for entry in pair])
    )
    # The log of the latency midway between the two, in the same rounds.
    middle = np.mean([np.log(medians_of(blocks)) for blocks in rounds], axis=0)
    level = clustered(middle, [block.process for block in rounds[0]]).log
    milliseconds = {over.artifact: math.exp(level + paired.log / 2), under.artifact: math.exp(level - paired.log / 2)}
    bounds, (ratio, *ci95), seems = UNKNOWN, paired.interval, 0
    if reason and not _fallback(pair) and parse_scenario(scenario).spread:
        bounds, ratio, seems = _beside_others(pair, scenario) or (bounds, ratio, seems)
    made = Ratio(
        *(a, b, metric, ratio, (ci95[0], ci95[1])),
        decided=not reason,
        reason=reason,
        a_ms=milliseconds[a],
        b_ms=milliseconds[b],
        unstable=paired.spread > WILD_SPREAD,
        bounds=bounds,
    )
    sign = 1 if metric == "latency" else -1
    low, high = made.sure
    if low <= 1 <= high:
        words = ("seems faster", NOT_DECIDED if reason else "no difference", "seems slower")
        return replace(made, verdict=words[1 + sign * seems])
    return replace(made, verdict="slower" if (low > 1) == (sign > 0) else "faster")


def _beside_others(pair: tuple[Measurements, Measurements], scenario: str) -> tuple[Interval, float, int] | None:
    """Claims about the ratio of two latencies on a busy machine: its lower and upper bound, None if unknown; the median
    of three estimates; and the sign of its logarithm if all three agree, otherwise 0. None if the CPU time is unknown.

    Contention slows one artifact more than another, so no interval over such rounds is reliable. But contention cannot
    make a query faster, or reduce its CPU time. So a claim is the smallest of three factors: by order, the factor that
    all except a few rounds reach in the median of their measures (a sign test, at a level shared by all looks at the
    rounds so far); by the fastest queries, which fit between two turns of other processes if they are short; by the CPU
    time of a query. Spinning threads distort the last, long queries the second, and unequal turns the first, but seldom
    in the same direction.
    """
    numbers = awake([entry.rounds[scenario] for entry in pair])
    over, under = ([entry.rounds[scenario][number] for number in numbers] for entry in pair)
    cpus = max(1, len(pair[0].affinity))
    measures = [np.array([_measures(block) for block in rounds]) for rounds in (over, under)]
    if not all((measured > 0).all() for measured in measures):
        return None
    logs = np.log(measures[0] / measures[1])
    order, cpu = np.median(logs, axis=1), math.exp(float(np.median(logs[:, 2])))
    middle = [float(np.median(order)), math.log(_typical(over) / _typical(under)), math.log(cpu)]
    slower = _at_least(order, over, under, cpu, cpus)
    faster = _at_least(-order, under, over, 1 / cpu, cpus)
    agree = min(middle) > math.log(LEAST_CLAIM) or max(middle) < -math.log(LEAST_CLAIM)
    bounds = (slower, None if faster is None else 1 / faster)
    return bounds, math.exp(float(np.median(middle))), int(math.copysign(1, middle[0])) if agree else 0


def _at_least(order: Values, slow: Sequence[Round], fast: Sequence[Round], cpu: float, cpus: int) -> float | None:
    """A lower bound of how many times as fast as `slow` the artifact `fast` is; None if it is not provably faster.
    `order`: the logarithms of slow over fast, round by round."""
    processes = np.asarray([block.process for block in slow])
    look = len(set(processes.tolist()))
    # A run may end after any process. All looks share the level, whatever their number: the sum of 1 / k (k + 1) is 1.
    rank = _sign_rank(order.size, ONE_SIDED / (look * (look + 1)))
    if rank == 0:
        return None
    of_each = min(float(np.median(order[processes == each])) for each in set(processes.tolist()))
    proven = min(float(np.sort(order)[rank - 1]), of_each)
    floor = min(float(block.latencies_ms.min()) for block in slow)
    if floor > SHORT_MS:  # other processes may have had a turn in each of these queries
        alone = [1e3 * undelayed(block, cpus) / block.latencies_ms.size for block in slow]
        fits_none = _fits_no_turn(sum(block.latencies_ms.size for block in slow), cpus)
        floor = max(fits_none, min(floor, float(np.median(alone))))
    claim = CAUTION * min(math.exp(proven), floor / _typical(fast), cpu)
    return claim if claim >= LEAST_CLAIM else None


def _fits_no_turn(count: int, cpus: int) -> float:
    """A lower bound, in ms, of the undisturbed latency of `count` queries, none of which fitted into a turn of
    `SHORT_MS` on all CPUs: a query of t ms fits with the probability 1 - t / SHORT_MS, so it is unlikely that none
    does."""
    seldom = 1 - UNLIKELY ** (1 / count)
    return float(SHORT_MS * (1 - seldom ** (1 / cpus)))


def _typical(rounds: Sequence[Round]) -> float:
    """An upper bound of the undisturbed latency in ms, from the fastest queries of the least disturbed block."""
    return min(nearest_rank(block.latencies_ms, 10) for block in rounds)


def _measures(block: Round) -> tuple[float, float, float]:
    """Three measures of one block, in ms: p10, the least latency, and the CPU time per query."""
    cpu = 0.0 if block.machine is None else 1e3 * block.machine.own_seconds / block.latencies_ms.size
    return nearest_rank(block.latencies_ms, 10), float(block.latencies_ms.min()), cpu


def _sign_rank(count: int, level: float) -> int:
    """The largest k such that P(Binomial(count, 1/2) < k) <= `level`: the median of `count` values is above their k-th
    smallest, except with that probability."""
    rank, tail = 0, 0.5**count
    while tail <= level:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return rank


def alone_reason(bench_run: BenchRun, entry: Measurements) -> str:
    """Why the measurements of one artifact alone are unreliable; empty if they are reliable."""
    return _fallback([entry]) or _disturbed(bench_run, [entry], bench_run.protocol.latency_scenario)


def disturbed_reason(bench_run: BenchRun) -> str:
    """Why the rounds that all candidates have in common are unreliable; empty if they are reliable."""
    return _disturbed(bench_run, in_common(bench_run.entries), bench_run.protocol.latency_scenario)


def _fallback(entries: Sequence[Measurements]) -> str:
    for entry in entries:
        if falls_back(entry):
            return f"it ran on {entry.provider}, but {MADE_FOR} {entry.made_for}: compile it on this machine"
    return ""


def _disturbed(bench_run: BenchRun, entries: Sequence[Measurements], scenario: str) -> str:
    """The reason if too few rounds were quiet for all entries; empty otherwise."""
    numbers, every = quiet_together(entries, scenario), entries[0].rounds[scenario]
    if enough(bench_run.protocol, numbers, every):
        loud = any(load_disturbs(bench_run, entry) for entry in entries)
        return (
            f"the load average was {bench_run.load_average:.1f} on {bench_run.cpus} CPUs: {MEASURE_AGAIN}"
            if loud
            else ""
        )
    seen = [
        unrest(block.machine, block.seconds, max(1, len(entry.affinity)))
        for entry in bench_run.entries  # all, so that candidates with the same disturbance get the same message
        for block in entry.rounds[scenario]
        if block.machine is not None
    ]
    slowed = [found for entry in entries if (found := throttled(entry.rounds[scenario], spread=True)) is not None]
    if slowed and not any(each.disturbs for each in seen):
        worst = max(slowed, key=lambda each: each.blocks)
        return f"only {len(numbers)} of {len(every)} {scenario} rounds count, {worst}: {COOL_DOWN}"
    causes = "; ".join(filter(None, [_disturbance(seen), *map(str, slowed[:1])]))
    count = f"only {len(numbers)}" if numbers else "none"
    were = "were" if len(numbers) > 1 else "was"
    return f"{count} of the {len(every)} {scenario} rounds {were} clean ({causes}): {MEASURE_AGAIN}"


def _disturbance(seen: Sequence[Unrest]) -> str:
    """The median share that other processes took of the disturbed blocks, in words."""
    hit = [each for each in seen if each.disturbs]
    if not hit:
        return "the measuring process had less CPU time than before"
    shares = {
        "other processes used {} of the CPU time": [each.others for each in hit],
        "a thread waited {} of the time for a CPU": [each.waited for each in hit],
        "other virtual machines used {} of the CPU time": [each.stolen for each in hit],
    }
    medians = {text: float(np.median(values)) for text, values in shares.items()}
    texts = [text.format(f"{100 * share:.0f} %") for text, share in medians.items() if share >= MENTIONED]
    if any(each.suspended for each in hit):
        texts.append("the machine slept")
    return ", ".join(texts)


def _wild(ratio: PairedRatio, rounds: int, scenario: str) -> str:
    if rounds < WILD_ROUNDS or ratio.spread <= WILD_SPREAD:
        return ""
    return (
        f"the ratios of the {rounds} {scenario} rounds vary by {100 * ratio.spread:.0f} %, but no other process was "
        f"seen; another virtual machine may share these cores: {MEASURE_AGAIN}"
    )


def _apart(ratio: PairedRatio, rounds: Sequence[Sequence[Round]]) -> str:
    """The reason if a ratio contradicts the medians printed next to it, each from its own blocks: then neither is
    reliable."""
    p50 = [nearest_rank(np.concatenate([block.latencies_ms for block in each]), 50) for each in rounds]
    quotient = float(np.log(p50[0] / p50[1]))
    if abs(quotient - ratio.log) <= ratio.reach + APART_REACH:
        return ""
    return (
        f"two estimates disagree ({np.exp(quotient):.3g} from the medians of all queries, {p50[0]:.3g} and "
        f"{p50[1]:.3g} ms; {np.exp(ratio.log):.3g} from paired rounds): the machine's speed changed; {MEASURE_AGAIN}"
    )
