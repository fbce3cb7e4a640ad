"""What a run cannot decide, and why: measurements that do not show how fast an artifact is on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.benchmark.flags import falls_back, load_disturbs
from vitdeploy.benchmark.paired import PairedRatio, clustered, medians_of, ratio_of_rounds
from vitdeploy.benchmark.percentiles import nearest_rank
from vitdeploy.benchmark.quiet import Unrest, enough, quiet_together, together, unrest, usable
from vitdeploy.benchmark.results import BenchRun, Entry, Round
from vitdeploy.benchmark.slowed import throttled

# The limit on the spread of the ratios of paired rounds, a fifth clipped on either side: a larger spread is not timer
# noise, and nothing that the kernel reported explains it.
WILD_SPREAD, WILD_ROUNDS = 0.25, 6
# How far the quotient of the medians of all queries may be from the ratio of paired rounds, beyond its interval.
APART_REACH = 0.1
# The least share that is mentioned.
MENTIONED = 0.005
MEASURE_AGAIN = "measure again when the machine is quiet, or for longer (--duration; bench.duration in a recipe)"
COOL_DOWN = "let it cool down or give it more power (`vitdeploy doctor` says of each what helps), then measure again"


@dataclass(frozen=True)
class Judged:
    """The ratio of two artifacts in one scenario, and the reason if it is unreliable.

    over_ms, under_ms: numerator and denominator, the latencies at the machine's usual speed in these rounds.
    """

    ratio: PairedRatio
    reason: str
    over_ms: float
    under_ms: float

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
    return Judged(ratio, reason, math.exp(level + ratio.log / 2), math.exp(level - ratio.log / 2))


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
            return f"it ran on {entry.provider}, and was made for {entry.made_for}: compile it on this machine"
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
