"""What a run cannot decide, and why: measurements that do not show how fast an artifact is on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from vitdeploy.benchmark.flags import falls_back, load_disturbs
from vitdeploy.benchmark.paired import PairedRatio, clustered, medians_of, ratio_of_rounds
from vitdeploy.benchmark.percentiles import nearest_rank
from vitdeploy.benchmark.precision import Interval
from vitdeploy.benchmark.protocol import parse_scenario
from vitdeploy.benchmark.quiet import Unrest, awake, enough, quiet_together, together, undelayed, unrest, usable
from vitdeploy.benchmark.results import BenchRun, Entry, Round, Values
from vitdeploy.benchmark.slowed import throttled

# The limit on the spread of the ratios of paired rounds, a fifth clipped on either side: a larger spread is not timer
# noise, and nothing that the kernel reported explains it.
WILD_SPREAD, WILD_ROUNDS = 0.25, 6
# How far the quotient of the medians of all queries may be from the ratio of paired rounds, beyond its interval.
APART_REACH = 0.1
# Of what is claimed beside others: the level of all looks together, the least factor that is claimed, what is taken off
# each for the differences of processes and of queries, and how long a query may be to fit between two turns of others
# (Linux gives a busy process turns of 3 ms; beside a loop the digits' original of 4 ms ran no query in less than 8).
ONE_SIDED, LEAST_CLAIM, CAUTION, SHORT_MS = 0.025, 1.1, 0.85, 3.0
# The least share that is mentioned.
MENTIONED = 0.005
MADE_FOR = "was made for"
MEASURE_AGAIN = "measure again when the machine is quiet, or for longer (--duration; bench.duration in a recipe)"
COOL_DOWN = "let it cool down or give it more power (`vitdeploy doctor` says of each what helps), then measure again"


@dataclass(frozen=True)
class Judged:
    """The ratio of two artifacts in one scenario, and the reason if its interval is unreliable.

    over_ms, under_ms: numerator and denominator, the latencies at the machine's usual speed in these rounds. Of an
    unreliable one, bounds: what the ratio is at least and at most all the same, None where nothing is known;
    estimate: the middle one of three, and seems: the sign of its logarithm if all three agree, else 0.
    """

    ratio: PairedRatio
    reason: str
    over_ms: float
    under_ms: float
    bounds: Interval = (None, None)
    estimate: float = math.nan
    seems: int = 0

    @property
    def decided(self) -> bool:
        return not self.reason


def judged(bench_run: BenchRun, a: str, b: str, scenario: str) -> Judged:
    """The latency of `a` over that of `b`, from the rounds in which neither was disturbed."""
    named = {entry.artifact: entry for entry in bench_run.entries}
    pair = (named[a], named[b])
    rounds = together(bench_run.protocol, pair, scenario)
    ratio = ratio_of_rounds(*rounds)
    reason = (
        _fallback(pair)
        or _disturbed(bench_run, pair, scenario)
        or _wild(ratio, len(rounds[0]), scenario)
        or _apart(ratio, [usable(bench_run.protocol, entry, scenario) for entry in pair])
    )
    level = _level(rounds)
    found = Judged(ratio, reason, math.exp(level + ratio.log / 2), math.exp(level - ratio.log / 2))
    if not reason or _fallback(pair) or not parse_scenario(scenario).spread:
        return found
    return _bounded(found, bench_run, pair, scenario)


def _bounded(found: Judged, bench_run: BenchRun, pair: tuple[Entry, Entry], scenario: str) -> Judged:
    """With what holds beside others.

    Contention slows one artifact more than another, and no interval over such rounds holds the truth. What it cannot do
    is to make a query faster, or to make one need less CPU time. So a claim is the smallest of three: by order, a
    factor that all but a few rounds reach in the middle one of their measures (a sign test, at a level shared by all
    looks at the rounds so far); by the fastest queries, of which short ones fit between two turns of others; by the CPU
    time of a query. Threads that spin while they wait distort the last, long queries the second, and unequal turns the
    first: seldom the same way.
    """
    numbers = awake([entry.rounds[scenario] for entry in pair])
    over, under = ([entry.rounds[scenario][number] for number in numbers] for entry in pair)
    cpus = max(1, len(pair[0].affinity))
    measures = [np.array([_measures(block) for block in rounds]) for rounds in (over, under)]
    if not all((each > 0).all() for each in measures):  # the CPU time is not known
        return found
    logs = np.log(measures[0] / measures[1])
    order, cpu = np.median(logs, axis=1), math.exp(float(np.median(logs[:, 2])))
    middle = [float(np.median(order)), math.log(_typical(over) / _typical(under)), math.log(cpu)]
    slower = _at_least(order, over, under, cpu, cpus)
    faster = _at_least(-order, under, over, 1 / cpu, cpus)
    agree = min(middle) > math.log(LEAST_CLAIM) or max(middle) < -math.log(LEAST_CLAIM)
    return replace(
        found,
        bounds=(slower, None if faster is None else 1 / faster),
        estimate=math.exp(float(np.median(middle))),
        seems=int(math.copysign(1, middle[0])) if agree else 0,
    )


def _at_least(order: Values, slow: Sequence[Round], fast: Sequence[Round], cpu: float, cpus: int) -> float | None:
    """How many times as fast one artifact is as another at least; None if nobody can say that it is faster. `order`:
    the logarithms of slow over fast, round by round."""
    processes = np.asarray([block.process for block in slow])
    look = len(set(processes.tolist()))
    # A run may end after any process. All looks share the level, however many they are: the sum of 1 / k (k + 1) is 1.
    rank = _sign_rank(order.size, ONE_SIDED / (look * (look + 1)))
    if rank == 0:
        return None
    of_each = min(float(np.median(order[processes == each])) for each in set(processes.tolist()))
    sure = min(float(np.sort(order)[rank - 1]), of_each)
    floor = min(float(block.latencies_ms.min()) for block in slow)
    if floor > SHORT_MS:  # others had a turn in each of these queries
        alone = [1e3 * undelayed(block, cpus) / block.latencies_ms.size for block in slow]
        floor = min(floor, float(np.median(alone)))
    claim = CAUTION * min(math.exp(sure), floor / _typical(fast), cpu)
    return claim if claim >= LEAST_CLAIM else None


def _typical(rounds: Sequence[Round]) -> float:
    """An upper bound of the latency alone, in ms: of the block that was disturbed least, by its fastest queries."""
    return min(nearest_rank(block.latencies_ms, 10) for block in rounds)


def _measures(block: Round) -> tuple[float, float, float]:
    """Of one block, in ms: what a tenth of the queries stays below, the least latency, and the CPU time of a query."""
    cpu = 0.0 if block.machine is None else 1e3 * block.machine.own_seconds / block.latencies_ms.size
    return nearest_rank(block.latencies_ms, 10), float(block.latencies_ms.min()), cpu


def _sign_rank(count: int, level: float) -> int:
    """The largest k such that of `count` fair coins fewer than k fall one way with this probability at most; so the
    median is above the k-th smallest of as many values but with that probability."""
    rank, tail = 0, 0.5**count
    while tail <= level:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return rank


def _level(rounds: Sequence[Sequence[Round]]) -> float:
    """The log of the latency in ms midway between two artifacts, in the same rounds."""
    middle = np.mean([np.log(medians_of(each)) for each in rounds], axis=0)
    return clustered(middle, [block.process for block in rounds[0]]).log


def alone_reason(bench_run: BenchRun, entry: Entry) -> str:
    """Why the measurements of one artifact, compared with no other, are unreliable; empty if they are reliable."""
    return _fallback([entry]) or _disturbed(bench_run, [entry], bench_run.protocol.latency_scenario)


def disturbed_reason(bench_run: BenchRun) -> str:
    """Why the rounds that all candidates have in common are unreliable; empty if they are reliable."""
    return _disturbed(bench_run, bench_run.entries, bench_run.protocol.latency_scenario)


def _fallback(entries: Sequence[Entry]) -> str:
    for entry in entries:
        if falls_back(entry):
            return f"it ran on {entry.provider}, and {MADE_FOR} {entry.made_for}: compile it on this machine"
    return ""


def _disturbed(bench_run: BenchRun, entries: Sequence[Entry], scenario: str) -> str:
    """Too few rounds were quiet for all."""
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
        return f"only {len(numbers)} of {len(every)} rounds of {scenario} count, {worst}: {COOL_DOWN}"
    said = "; ".join(filter(None, [_said(seen), *map(str, slowed[:1])]))
    return f"only {len(numbers)} of {len(every)} rounds of {scenario} were undisturbed ({said}): {MEASURE_AGAIN}"


def _said(seen: Sequence[Unrest]) -> str:
    """The share that others took of the blocks that they disturbed, in words."""
    hit = [each for each in seen if each.disturbs]
    if not hit:
        return "the measuring process had less CPU time than before"
    shares = {
        "others had {} of the CPUs' time": [each.others for each in hit],
        "a thread waited {} of the time for a CPU": [each.waited for each in hit],
        "other virtual machines took {} of the CPUs' time": [each.stolen for each in hit],
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
        f"the ratios of the {rounds} rounds of {scenario} vary by {100 * ratio.spread:.0f} %, though nothing else was "
        f"seen to run; another virtual machine on the same cores may: {MEASURE_AGAIN}"
    )


def _apart(ratio: PairedRatio, rounds: Sequence[Sequence[Round]]) -> str:
    """The reason if the medians printed next to a ratio, each from its own blocks, contradict it: then neither is
    reliable."""
    p50 = [nearest_rank(np.concatenate([block.latencies_ms for block in each]), 50) for each in rounds]
    quotient = float(np.log(p50[0] / p50[1]))
    if abs(quotient - ratio.log) <= ratio.reach + APART_REACH:
        return ""
    return (
        f"the medians of all queries are {p50[0]:.3g} and {p50[1]:.3g} ms, a ratio of {np.exp(quotient):.3g}, and "
        f"rounds side by side have one of {np.exp(ratio.log):.3g}: the machine's speed moved; {MEASURE_AGAIN}"
    )
