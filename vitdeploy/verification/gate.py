"""The gate: pass, fail or undecided, and the number of images that would decide."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.spec import Budget, GateStatus
from vitdeploy.verification.agreement import TOP1_ANSWERS
from vitdeploy.verification.comparison import Comparison, least_to_prove, paired_accuracy
from vitdeploy.verification.intervals import paired_difference, wilson

# --- What a number of images can prove, reported in advance; and a bound on the drop from agreement alone -------------
# Both use the gate's intervals. An engine proves most if it gives all of the original's answers, so the original is
# compared with itself.
#
# An answer equal to the original's is as right as the original's. So top-1 cannot drop by more than the share of
# changed answers, 100 - agreement, and the upper end of that share's interval bounds the drop without any label. This
# holds only for a metric of single answers, not for mAP, PQ or neighbours.
#
# The criterion is fixed before any engine answers (`criterion_to_prove`). Choosing the better one afterwards would pass
# a bad engine more often than the nominal 2.5 %.


Criterion = Literal["labels", "agreement"]

MOST_IMAGES = 1 << 30


def provable_agreement(n: int) -> float:
    """Return the agreement in percent that `n` images prove if all answers are equal."""
    return 100 * wilson(n, n)[0]


def provable_drop(n: int, accuracy: float) -> float:
    """Return the drop in points that `n` labelled images prove if all answers are equal; `accuracy`: the original's,
    0..1."""
    right = round(accuracy * n)
    return 100 * paired_difference(right, 0, 0, n - right)[1]


def images_for_agreement(bound: float, share: float = 1.0) -> int | None:
    """Return how many images prove `bound` percent if a `share` of the answers are equal; None: no number does."""
    return _least(lambda n: 100 * wilson(round(share * n), n)[0] >= bound) if 100 * share > bound else None


def images_for_drop(bound: float, accuracy: float) -> int | None:
    """Return how many labelled images prove a drop of at most `bound` points if all answers are equal; None as
    above."""
    return _least(lambda n: provable_drop(n, accuracy) <= bound)


def drop_by_agreement(found: Comparison) -> tuple[float, float] | None:
    """Return the 95 % interval of the drop in points that follows from agreement, with or without labels; None for a
    metric that agreement does not bound."""
    if found.agreement_of != TOP1_ANSWERS:
        return None
    reach = 100 - found.agreement_ci95[0]
    return -reach, reach


def criterion_to_prove(perfect: Comparison, max_drop: float) -> Criterion:
    """Return the criterion for a drop: labels, or agreement if there are no labels, or too few to prove `max_drop`
    while agreement can.

    Args:
        perfect: the original compared with itself, so that no engine affects the choice.
    """
    bounds = drop_by_agreement(perfect)
    if bounds is None or (perfect.drop_ci95 is not None and perfect.drop_ci95[1] <= max_drop):
        return "labels"
    return "agreement" if perfect.drop_ci95 is None or bounds[1] <= max_drop else "labels"


def drop_to_judge(found: Comparison, criterion: Criterion) -> tuple[float, tuple[float, float]] | None:
    """Return the drop in points with the 95 % interval to compare with a budget. An interval within the budget passes,
    one entirely beyond it fails, which agreement alone never shows. None if nothing bounds the drop.

    Args:
        criterion: the result of `criterion_to_prove`. By agreement the "drop" is the share of changed answers, its
            upper bound.
    """
    if criterion == "labels":
        return None if found.drop is None or found.drop_ci95 is None else (found.drop, found.drop_ci95)
    interval = drop_by_agreement(found)
    return None if interval is None else (100 - found.agreement, interval)


def perfect_answers(n: int) -> Comparison:
    """Return the comparison of `n` answers, all right and all equal to the original's: the most that n samples can
    prove."""
    return Comparison(
        n=n,
        metric="top-1",
        agreement=100.0,
        agreement_ci95=(provable_agreement(n), 100.0),
        agreement_of=TOP1_ANSWERS,
        max_difference=0.0,
        **paired_accuracy(n, 0, 0, 0),
    )


def unprovable(perfect: Comparison, budget: Budget, noun: str = "image") -> list[str]:
    """Return a sentence for each accuracy bound that no engine can be proven to meet on these images.

    Args:
        perfect: the original compared with itself.
    """
    lines = []
    if perfect.control is not None and perfect.proves_nothing and budget.min_agreement != 0:
        lines.append(f"these {noun}s cannot prove anything: the original's {perfect.proves_nothing}")
    if budget.max_drop is not None:
        lines += _of_drop(perfect, budget.max_drop, noun)
    if budget.min_agreement is not None and perfect.agreement_ci95[0] < budget.min_agreement:
        proven = f"{_below(perfect.agreement_ci95[0])} % agreement (budget: {budget.min_agreement:g} %)"
        needed = images_for_agreement(budget.min_agreement) if perfect.agreement_of == TOP1_ANSWERS else None
        lines.append(_too_few(perfect.n, noun, proven, needed))
    return lines


def _of_drop(perfect: Comparison, max_drop: float, noun: str) -> list[str]:
    by_labels, by_agreement = perfect.drop_ci95, drop_by_agreement(perfect)
    bounds = [each[1] for each in (by_labels, by_agreement) if each is not None]
    if not bounds:
        return [f"max_drop needs labels, and the {noun}s have none"]
    if min(bounds) <= max_drop:
        return []
    needed = None
    if by_labels is not None and perfect.metric == "top-1" and perfect.reference_value is not None:
        needed = images_for_drop(max_drop, perfect.reference_value / 100)
    elif by_labels is None:
        needed = images_for_agreement(100 - max_drop)
    return [_too_few(perfect.n, noun, f"a drop below {_above(bounds[0])} points (budget: {max_drop:g})", needed)]


def _too_few(n: int, noun: str, proven: str, needed: int | None) -> str:
    more = f"about {needed:,}" if needed is not None else "more"
    return f"{n:,} {noun}s are too few: even if all answers match, they prove only {proven}; {more} are needed"


def _above(value: float) -> str:
    """Format with two decimals, rounded up: a smaller bound is not proven."""
    return f"{math.ceil(100 * value - 1e-9) / 100:.2f}"


def _below(value: float) -> str:
    return f"{math.floor(100 * value + 1e-9) / 100:.2f}"


def _least(enough: Callable[[int], bool]) -> int | None:
    """Return the smallest n for which `enough` holds; it holds for all larger n, except for rounding to whole
    images."""
    found = bisect.bisect_left(range(MOST_IMAGES + 1), True, 1, key=enough)
    return found if found <= MOST_IMAGES else None


# --- Judges whether a budget is met. An estimate passes or fails only if its 95 % interval does -----------------------


# What a budget bounds: the answers (drop and agreement), the time of a query, or bytes of files or of memory.
Kind = Literal["answers", "latency", "size", "memory"]


# Marks a bound that unrelated answers would meet as well.
PROVES_NOTHING = "proves nothing"


class Reason(str):
    """A sentence for a bound that is not met, or not provably; `kind`: what it bounds. In JSON only the text."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind) -> Reason:
        self = super().__new__(cls, text)
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[str, Kind]:  # type: ignore[override]
        return str(self), self.kind  # used by copy and pickle


@dataclass(frozen=True)
class Gate:
    """The verdict and one sentence for each bound that is not met, or not provably. Sentences about a budget are
    `Reason`s."""

    status: GateStatus
    reasons: tuple[str, ...] = field(default=())

    def named(self, name: str) -> Gate:
        """Return this gate with `name` before each reason."""
        return Gate(self.status, tuple(_named(reason, name) for reason in self.reasons))


def proves_nothing(gate: Gate) -> bool:
    """Whether unrelated answers would meet some bound as well."""
    return any(f"{PROVES_NOTHING}: " in reason for reason in gate.reasons)


def kinds_of(reasons: Iterable[str]) -> frozenset[Kind]:
    """Return the kinds of budget bounds in these reasons."""
    return frozenset(reason.kind for reason in reasons if isinstance(reason, Reason))


def _named(reason: str, name: str) -> str:
    text = f"{name}: {reason}"
    return Reason(text, reason.kind) if isinstance(reason, Reason) else text


def guards(budget: Budget) -> bool:
    """Whether the budget bounds neither drop nor agreement, so that the guard applies."""
    return budget.max_drop is None and budget.min_agreement is None


def with_guard(budget: Budget, guard: float) -> Budget:
    """Return the effective budget: without a bound on drop or agreement, the task's guard applies. Size and latency say
    nothing about answers. With `min_agreement` 0, any answer passes."""
    return dataclasses.replace(budget, min_agreement=guard) if guards(budget) else budget


def accuracy_gate(agreement: Comparison, budget: Budget, criterion: Criterion = "labels", guard: float = 0.0) -> Gate:
    """Judge drop and agreement. The gate passes if the whole 95 % interval is within the budget, and fails if none of
    it is.

    Otherwise it is undecided, with the number of images at which an interval around this centre would decide (its width
    shrinks with the square root of n). It is also undecided if unrelated answers would meet the bound
    (`Comparison.control`), with the reason that it proves nothing. With a `min_agreement` of 0 or a `max_drop` of 100,
    any answer passes.

    `criterion`: the result of `criterion_to_prove`. `guard`: the task's (`TaskAdapter.guard`), the least agreement
    without labels that decide.
    """
    found: list[tuple[GateStatus, str]] = []
    if budget.max_drop is not None:
        found.append(_drop_by(agreement, budget.max_drop, criterion))
        if found[0][0] == "undecided":
            found += _plainly_lost(agreement, budget.max_drop, criterion, guard)
    if budget.min_agreement is not None:
        low, high = agreement.agreement_ci95
        status = _status(-high, -low, -budget.min_agreement)
        text = f"agreement {agreement.agreement:.2f} % [{low:.2f}, {high:.2f}], budget {budget.min_agreement:g}"
        share = agreement.agreement / 100
        counted = status == "undecided" and agreement.agreement_of == TOP1_ANSWERS
        if counted and (images := images_for_agreement(budget.min_agreement, share)) is not None:
            needed = f"; undecided: needs about {images:,} images"
        else:
            needed = _needed(status, agreement.n, agreement.agreement, low, high, budget.min_agreement)
        is_guard = budget.max_drop is None and budget.min_agreement == guard
        nothing = _nothing_by_agreement(agreement, 0.0 if is_guard else budget.min_agreement)
        found.append(_proven(status, text, needed, nothing if budget.min_agreement > 0 else ""))
    return combine(found)


def _nothing_by_agreement(found: Comparison, bound: float) -> str:
    """Why an agreement of at least `bound` percent proves nothing; "" if it does. `Comparison.proves_nothing` overrides
    the guard, which is not a bound set by the user."""
    if found.control is None or found.control.agreement < bound or found.proves_nothing or not bound:
        return found.proves_nothing
    others, least = found.control.agreement, least_to_prove(found.control)
    return f"answers to other images agree to {others:.2f} %; a bound of {least:.2f} would prove it"


def _proven(status: GateStatus, text: str, needed: str, nothing: str) -> tuple[GateStatus, Reason]:
    """Return a bound's status and sentence. A bound that is met, or may be, is undecided if that proves nothing."""
    if status != "fail" and nothing:
        return "undecided", Reason(f"{text}; {PROVES_NOTHING}: {nothing}", "answers")
    return status, Reason(text + needed, "answers")


def _drop_by(found: Comparison, max_drop: float, criterion: Criterion) -> tuple[GateStatus, str]:
    drop, interval = drop_to_judge(found, criterion) or (None, None)
    if criterion == "labels" or drop is None or interval is None:
        nothing = "" if drop is None or max_drop >= 100 else found.drop_proves_nothing(max_drop)
        return _drop(found.n, drop, interval, max_drop, nothing)
    text = f"drop bounded by agreement: {drop:.2f} points [{interval[0]:.2f}, {interval[1]:.2f}]"
    status = _status(*interval, max_drop)
    if status == "undecided" and drop >= max_drop:  # the upper end stays above the budget with any number of images
        needed = "; undecided: agreement alone cannot prove it; labels may"
    else:
        needed = _needed(status, found.n, drop, 2 * drop - interval[1], interval[1], max_drop)
    nothing = _nothing_by_agreement(found, 100 - max_drop)
    return _proven(status, f"{text}, budget {max_drop:g}", needed, nothing)


def _plainly_lost(
    found: Comparison, max_drop: float, criterion: Criterion, guard: float
) -> list[tuple[GateStatus, str]]:
    """Return the reasons to fail a drop that agreement does not prove to be small: a loss shown by labels, or too few
    answers equal to the original's. These can fail a budget, never pass it."""
    if (
        criterion == "agreement"
        and found.drop is not None
        and found.drop_ci95 is not None
        and found.drop_ci95[0] > max_drop
    ):
        return [_drop(found.n, found.drop, found.drop_ci95, max_drop)]
    low, high = found.agreement_ci95
    least = min(guard, 100 - max_drop)
    if (criterion == "agreement" or found.drop is None) and high < least:
        text = f"agreement {found.agreement:.2f} % [{low:.2f}, {high:.2f}]"
        return [("fail", Reason(f"{text}, minimum without labels: {least:g}", "answers"))]
    return []


def drop_gate(n: int, drop: float | None, interval: tuple[float, float] | None, max_drop: float | None) -> Gate:
    """Judge the drop alone, in points on n images, as `accuracy_gate` does; undecided without a drop."""
    return Gate("none") if max_drop is None else combine([_drop(n, drop, interval, max_drop)])


def _drop(
    n: int, drop: float | None, interval: tuple[float, float] | None, max_drop: float, nothing: str = ""
) -> tuple[GateStatus, str]:
    if drop is None or interval is None:
        return "undecided", Reason("max_drop needs labels, and the images have none", "answers")
    low, high = interval
    status = _status(low, high, max_drop)
    text = f"drop {drop:.2f} points [{low:.2f}, {high:.2f}], budget {max_drop:g}"
    return _proven(status, text, _needed(status, n, drop, low, high, max_drop), nothing)


def bound_gate(
    what: str,
    value: float,
    bound: float | None,
    unit: str,
    flags: Sequence[str] = (),
    interval: Sequence[float | None] | None = None,
    *,
    kind: Kind,
) -> Gate:
    """Judge one value against an upper bound, by its 95 % interval if it was measured (an end is None if unknown). A
    flagged measurement is undecided."""
    if bound is None:
        return Gate("none")
    low, high = interval or (value, value)
    shown = "" if interval is None else " [" + ", ".join("?" if end is None else f"{end:.4g}" for end in interval) + "]"
    amount, most = (f"{value:,.0f}", f"{bound:,.0f}") if unit == "bytes" else (f"{value:.4g}", f"{bound:g}")
    text = f"{what} {amount}{shown} {unit}, budget {most}"
    if flags:
        return Gate("undecided", (Reason(f"{text}; the measurement is flagged {', '.join(flags)}", kind),))
    status = _status(-math.inf if low is None else low, math.inf if high is None else high, bound)
    text += "; undecided: needs a longer benchmark" if status == "undecided" else ""
    return combine([(status, Reason(text, kind))])


def slowdown_gate(
    what: str, ratio: float, interval: tuple[float, float], max_slowdown: float | None, flags: Sequence[str] = ()
) -> Gate:
    """Judge a slowdown: `ratio` is new / old, `max_slowdown` a percentage. A flagged measurement never passes."""
    if max_slowdown is None:
        return Gate("none")
    low, high = (100 * (bound - 1) for bound in interval)
    status = _status(low, high, max_slowdown)
    text = f"{what} {100 * (ratio - 1):+.1f} % [{low:+.1f}, {high:+.1f}], budget {max_slowdown:+g} %"
    if status == "pass" and flags:
        return Gate("undecided", (f"{text}; the measurement is flagged {', '.join(flags)}",))
    if status == "undecided":
        text += "; undecided: needs more rounds (--duration)"
    return combine([(status, text)])


def combine(found: list[tuple[GateStatus, str]]) -> Gate:
    """Combine several bounds into one gate: fail outweighs undecided, which outweighs pass."""
    for status in ("fail", "undecided"):
        if any(each == status for each, _ in found):
            return Gate(status, tuple(text for each, text in found if each in ("fail", "undecided")))
    return Gate("pass" if any(each == "pass" for each, _ in found) else "none")


def join(gates: list[Gate]) -> Gate:
    """Combine several gates into one."""
    found: list[tuple[GateStatus, str]] = []
    for gate in gates:
        found += [(gate.status, reason) for reason in gate.reasons] or [(gate.status, "")]
    return combine(found)


def _status(low: float, high: float, bound: float) -> GateStatus:
    if high <= bound:
        return "pass"
    return "fail" if low > bound else "undecided"


def _needed(status: GateStatus, n: int, centre: float, low: float, high: float, bound: float) -> str:
    if status != "undecided":
        return ""
    distance = abs(centre - bound)
    if distance < 1e-9:
        return "; undecided: the estimate lies on the bound"
    # The interval's reach towards the bound decides. The shorter side grows relative to the longer one as n rises
    # (Wilson's centre moves towards the estimate), so at least half of the width is used.
    reach = max(centre - low if bound < centre else high - centre, (high - low) / 2)
    return f"; undecided: needs about {math.ceil(n * (reach / distance) ** 2 * 1.1):,} images"
