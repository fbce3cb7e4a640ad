"""Choose the finalist to ship: a test in a fixed order, so that trying many of them makes no wrong answer likelier.

The finalists are tested in the order of their distance on the calibration images, the nearest to the original first.
The first one that the evaluation images do not confirm ends the test: those further away are not considered. Each step
is a test at the usual level, and so is the whole (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995, in
Biometrie in der chemisch-pharmazeutischen Industrie 6; Wiens 2003, Pharmaceutical Statistics 2:211-215). To take
whichever of many passes would be a choice by the evaluation images, which could not judge it any more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.document.bench import Bench, Ratio
from vitdeploy.pipeline.verdict import beats, between, find_ratio, keeps_answers, kept, relative_times, sentence
from vitdeploy.spec import Grade
from vitdeploy.stages.step import ORIGINAL
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate
from vitdeploy.workflows.tuning.variants import Variant


@dataclass(frozen=True)
class Finalist:
    """`distance`: on the calibration images. `verified`: the result of `verify`. `accuracy`: the gate of its answers,
    `gate`: that of the whole budget. `guarded`: no budget bounds the loss."""

    variant: Variant
    distance: float
    verified: Comparison
    accuracy: Gate
    gate: Gate
    guarded: bool = False

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def keeps(self) -> bool:
        return keeps_answers(self.accuracy, self.verified, guarded=self.guarded)


@dataclass(frozen=True)
class Choice:
    """`best`: what to ship, or the best found where `gate` is not met; `grade`: how surely by the times; `rivals`: the
    other finalists to ship that may be as fast. `confirmed`: by name, the nearest first; `stopped`: the finalist that
    was not."""

    best: Finalist
    gate: Gate
    sentence: str
    remarks: tuple[str, ...]
    confirmed: tuple[str, ...]
    stopped: str | None
    grade: Grade
    rivals: tuple[Finalist, ...]


def choose(finalists: Sequence[Finalist], bench: Bench) -> Choice:
    """The fastest finalist that is confirmed and meets the budget; among those not provably slower, prefer one whose
    graph is not changed, then the nearest to the original.

    `bench` is the result of `pipeline.measure` for the original and all finalists. What its times leave open is said:
    nothing is ruled out by a time that is not decided.
    """
    order = sorted(finalists, key=lambda each: each.distance)
    kept_count = next((i for i, each in enumerate(order) if not each.keeps), len(order))
    confirmed, stopped = order[:kept_count], order[kept_count] if kept_count < len(order) else None
    allowed = [each for each in confirmed if each.gate.status in ("pass", "none")]
    # Where nothing is allowed, the best found is what comes nearest to it: confirmed but too slow or large, or else the
    # nearest to the original.
    best = _fastest(allowed or confirmed or order[:1], bench)
    rivals = tuple(each for each in allowed if each is not best and _is_open(each, best, bench))
    remarks = [kept(best.name, best.verified)]
    if rivals:
        names = " or ".join(each.name for each in (best, *rivals))
        remarks.insert(0, f"Undecided: whether {names} is fastest; the recipe keeps the targets of all.")
    if stopped is not None:
        remarks.append(_stopped(stopped, order[kept_count + 1 :]))
    return Choice(
        best,
        best.gate,
        _sentence(best, allowed, bench),
        tuple(remarks),
        tuple(each.name for each in confirmed),
        stopped.name if stopped is not None else None,
        _grade(best, allowed, bench),
        rivals,
    )


def _sentence(best: Finalist, allowed: Sequence[Finalist], bench: Bench) -> str:
    if not allowed:
        return f"Nothing is proven to meet the budget; the best is {best.name}."
    return sentence(best.name, bench.ratios)


def _grade(best: Finalist, allowed: Sequence[Finalist], bench: Bench) -> Grade:
    against = between(bench, best.name, ORIGINAL)
    if not allowed or against is None or against.decided or beats(bench, best.name, ORIGINAL):
        return "recommended" if allowed else "no ranking"
    return "leading" if against.verdict == "seems faster" else "no ranking"


def _is_open(one: Finalist, best: Finalist, bench: Bench) -> bool:
    """Whether another finalist may be as fast, for all that its times say."""
    ratio = between(bench, one.name, best.name)
    return (ratio is None or not ratio.decided) and not beats(bench, best.name, one.name)


def _fastest(among: Sequence[Finalist], bench: Bench) -> Finalist:
    times = relative_times(bench)
    fastest = min(among, key=lambda each: times[each.name])
    as_fast = [each for each in among if each is fastest or not _slower(each.name, fastest.name, bench.ratios)]
    return min(as_fast, key=lambda each: (each.variant != each.variant.plain, each.distance))


def _slower(a: str, b: str, ratios: Sequence[Ratio]) -> bool:
    """Whether `a` is provably slower than `b`; if undecided, whether it seems so."""
    ratio = find_ratio(ratios, a, b)
    if ratio is None:
        return True
    return (ratio.ci95[0] if ratio.decided else ratio.ratio) > 1


def _stopped(stopped: Finalist, further: Sequence[Finalist]) -> str:
    reasons = "; ".join(stopped.accuracy.reasons) or _loss(stopped.verified)
    text = f"{stopped.name} is not confirmed: {reasons}."
    if further:
        names = ", ".join(each.name for each in further)
        text += f" What is further from the original is not considered: {names}."
    return text


def _loss(verified: Comparison) -> str:
    low, high = verified.drop_ci95 or (math.nan, math.nan)
    return f"it loses {verified.drop:.2f} points of {verified.metric} [{low:.2f}, {high:.2f}]"
