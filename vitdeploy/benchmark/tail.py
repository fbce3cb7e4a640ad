"""The 99th percentile of one artifact against that of another, from rounds that both were measured in; numpy only."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.benchmark import results, summary
from vitdeploy.benchmark.evidence import clustered, in_common, left_over, ratio_of_rounds, together

PERCENT = 99.0
# Groups of rounds per process. In a group with few queries the percentile is the slowest query, for both artifacts.
GROUPS = 4


@dataclass(frozen=True)
class Tail:
    """p99 of `a` over p99 of `b` with its 95 % interval, and both in ms over all rounds. `median`: the ratio of the
    median queries with its interval. `reason`: why the measurement is unreliable; "" if it is reliable."""

    ratio: float
    low: float
    high: float
    a_ms: float
    b_ms: float
    queries: int
    median: tuple[float, float, float]
    reason: str = ""

    def slower(self, worse: float) -> bool:
        """Whether `a` is more than `worse` (0.1: 10 %) slower, beyond its interval. This also holds on a busy machine,
        which disturbs both artifacts in turn. If it blurs the tails, medians decide: an artifact that is slower in most
        queries is not faster in the slowest ones."""
        return max(self.low, self.median[1]) > 1 + worse

    def undecided(self, worse: float) -> str:
        """Why it is unknown whether `a` is more than `worse` slower; "" if it is clear."""
        if self.slower(worse):
            return ""
        if self.reason or self.high <= 1 + worse:
            return self.reason
        return f"p99 is {self.ratio:.2f} times ({self.low:.2f} to {self.high:.2f}): measure for longer"


def tail_of(bench_run: results.BenchRun, a: str, b: str) -> Tail:
    """The tail of `a` against `b`, two artifacts of a run.

    Rounds are put into groups of neighbours of one process, as the percentile of a single round is one query; the
    ratios of the groups are then treated as those of rounds are (`paired.clustered`).
    """
    scenario = bench_run.protocol.latency_scenario
    named = {entry.artifact: entry for entry in bench_run.entries}
    rounds = together(bench_run.protocol, in_common((named[a], named[b])), scenario)
    groups = _groups([block.process for block in rounds[0]])
    over, under = ([_percentile([each[index] for index in group]) for group in groups] for each in rounds)
    logs = clustered(np.log(over) - np.log(under), [rounds[0][group[0]].process for group in groups])
    ratio = dataclasses.replace(logs, bias=max(map(left_over, rounds)))
    middle, low, high = ratio.interval
    a_ms, b_ms = (_percentile(each) for each in rounds)
    queries = sum(block.latencies_ms.size for block in rounds[0])
    reason = summary.judged(bench_run, a, b, scenario).reason
    return Tail(middle, low, high, a_ms, b_ms, queries, ratio_of_rounds(*rounds).interval, reason)


def p99_ms(bench_run: results.BenchRun, artifact: str) -> float:
    """p99 of one artifact that was measured alone, in ms."""
    entry = next(each for each in bench_run.entries if each.artifact == artifact)
    (rounds,) = together(bench_run.protocol, (entry,), bench_run.protocol.latency_scenario)
    return _percentile(rounds)


def _groups(processes: Sequence[int]) -> list[list[int]]:
    """The numbers of the rounds of each group."""
    found: list[list[int]] = []
    for process in dict.fromkeys(processes):
        own = [index for index, each in enumerate(processes) if each == process]
        size = max(1, math.ceil(len(own) / GROUPS))
        found += [own[start : start + size] for start in range(0, len(own), size)]
    return found


def _percentile(rounds: Sequence[results.Round]) -> float:
    return results.nearest_rank(np.concatenate([block.latencies_ms for block in rounds]), PERCENT)
