"""The verdict of a run: which engine to ship, in one defensible sentence, and which engines the bundle contains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.evidence import NARROW_REACH
from vitdeploy.benchmark.summary import MADE_FOR, Ratio, Row
from vitdeploy.data.folder import USUAL_CALIBRATION, has_own_split, usual_calibration
from vitdeploy.document.bench import Bench
from vitdeploy.errors import GateError
from vitdeploy.spec import Budget, GateStatus, Grade, bound_words
from vitdeploy.stages.step import ORIGINAL, Candidate
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.verification import agreement, comparison, records
from vitdeploy.verification.gate import (
    Criterion,
    Gate,
    Reason,
    bound_gate,
    criterion_to_prove,
    join,
    perfect_answers,
    proves_nothing,
    unprovable,
)

if TYPE_CHECKING:
    from vitdeploy.pipeline.job import Job

# Gate statuses, the closest to meeting the budget first.
RANK: tuple[GateStatus, ...] = ("pass", "none", "undecided", "fail")
MIB = 1 << 20
MEASURE_AGAIN = "run the same command on a quiet machine: only the bench is measured again"


@dataclass(frozen=True)
class Judged:
    """One engine as the verdict sees it.

    `gate` is the gate of the whole budget, `verified` the result of `verify`. `guarded`: no budget bounds the loss, so
    the guard does.
    """

    candidate: Candidate
    gate: Gate
    verified: comparison.Comparison
    guarded: bool

    @property
    def name(self) -> str:
        return self.candidate.artifact

    @property
    def keeps_answers(self) -> bool:
        return keeps_answers(self.gate, self.verified, guarded=self.guarded)


@dataclass(frozen=True)
class Verdict:
    """The recommendation in a `sentence` of at most twelve words; `remarks` state the answers that it keeps, open
    questions, and objections to the requested engines.

    `recommended` is an artifact, or the original; None if nothing is decided. `grade`: how certain it is; a "leading"
    artifact is ahead by its measured times, but not conclusively. `rivals` may be as fast as the first of `ships`, the
    engines of the bundle; with "no ranking" these are in a fixed order. `gate` judges the recipe's own engines: one of
    them has to meet the budget.
    """

    sentence: str
    remarks: tuple[str, ...]
    recommended: str | None
    ships: tuple[Candidate, ...]
    gate: Gate
    grade: Grade = "no ranking"
    rivals: tuple[str, ...] = ()

    @property
    def leading(self) -> str:
        """The artifact that represents the run: the recommended one, the first of the bundle, or the original."""
        return self.recommended or (self.ships[0].artifact if self.ships else ORIGINAL)


def engine_gate(accuracy: Gate, budget: Budget, size: int, row: Row | None) -> Gate:
    """The gate of accuracy, size, memory and latency together; unmeasured memory or latency is undecided."""
    gates = [accuracy, bound_gate("size", size, budget.max_size, "bytes", kind="size")]
    if budget.max_latency is not None:
        if row is None:
            gates.append(Gate("undecided", (Reason("max_latency needs a bench", "latency"),)))
        else:
            p50, interval = row.latency_ms.p50, row.latency_ms_ci95.p50
            # "short" means too few queries for a high percentile; the median has its own interval.
            flags = [flag for flag in row.flags if flag != "short"]
            gates.append(bound_gate("p50 latency", p50, budget.max_latency, "ms", flags, interval, kind="latency"))
    if budget.max_memory is not None:
        memory = row.peak_memory_bytes if row is not None else None
        if memory is None:
            gates.append(Gate("undecided", (Reason("max_memory needs a bench, on Linux", "memory"),)))
        else:
            gates.append(bound_gate("peak memory", memory / MIB, budget.max_memory / MIB, "MiB", kind="memory"))
    return join(gates)


def keeps_answers(gate: Gate, verified: comparison.Comparison, *, guarded: bool) -> bool:
    """Whether an engine may be recommended: its gate passes, and it does not provably lose accuracy if only the guard
    bounds the loss."""
    return gate.status == "pass" and not (guarded and provably_loses(verified))


def provably_loses(verified: comparison.Comparison) -> bool:
    """Whether the whole interval of the drop is above zero; False without labels."""
    return verified.drop_ci95 is not None and verified.drop_ci95[0] > 0


@dataclass(frozen=True)
class _Ranked:
    """The ranking by times of the engines that keep the answers, and of the original."""

    grade: Grade
    best: str
    sentence: str
    rivals: tuple[str, ...] = ()


def decide(judged: Sequence[Judged], bench: Bench, *, include_failed: bool = False) -> Verdict:
    """Recommend the best of the engines that keep the answers, if the measurements support it.

    A partial order is enough: an engine that is conclusively faster than the original is recommended, even if it is
    undecided against others that no engine conclusively beats.

    Args:
        judged: all engines, including baselines; engines without a ranking keep this order.
        bench: the result of `pipeline.measure` for the original and all engines.
        include_failed: the bundle also includes engines that fail their gate, last.
    """
    asked = [each for each in judged if each.candidate.shipped]
    keeping = [each.name for each in judged if each.keeps_answers]
    if keeping:
        ranked = _rank(keeping, bench)
    elif any(each.gate.status == "pass" for each in judged):
        text = "Keep the original: every engine within the budget provably loses accuracy."
        ranked = _Ranked("recommended", ORIGINAL, text)
    elif any(each.gate.status == "undecided" for each in judged):
        ranked = _Ranked("no ranking", "", "Undecided: no engine provably meets the budget.")
    else:
        ranked = _Ranked("recommended", ORIGINAL, "Keep the original: every engine fails its budget.")
    order = [each for name in in_order([each.name for each in judged], bench) for each in judged if each.name == name]
    ships = _ships(order, ranked.best, include_failed=include_failed)
    best = ranked.best if ranked.best != ORIGINAL else ""
    first = best or (ships[0].name if ranked.grade == "no ranking" and ships else "")
    remarks = [*_open(ranked, bench), *(kept(each.name, each.verified) for each in judged if each.name == first)]
    remarks += [_elsewhere(each.candidate) for each in judged if each.name == best and _device(each) != "CPU"]
    for each in asked:
        remarks += _remarks(each, bench.ratios, matters=each in ships and each.name not in (best, *ranked.rivals))
    recommended = ranked.best if ranked.grade == "recommended" else None
    chosen = tuple(ship.candidate for ship in ships)
    return Verdict(ranked.sentence, tuple(remarks), recommended, chosen, _best(asked), ranked.grade, ranked.rivals)


def _rank(names: Sequence[str], bench: Bench) -> _Ranked:
    """The best of these engines and the original by times, with its grade: the fastest by estimate among the engines
    that none conclusively beats and, if there are any, that are conclusively faster than the original."""
    times = relative_times(bench)
    # Each pair has its own rounds, so three engines could beat each other in a circle.
    unbeaten = [name for name in names if not any(beats(bench, other, name) for other in names)] or list(names)
    proven = [name for name in names if beats(bench, name, ORIGINAL)]
    faster = [name for name in unbeaten if name in proven or any(beats(bench, name, other) for other in proven)]
    best = min(faster or unbeaten, key=times.__getitem__)
    rivals = tuple(name for name in unbeaten if name != best and _is_open(between(bench, name, best)))
    against = between(bench, best, ORIGINAL)
    if against is None:
        return _Ranked("recommended", best, f"Ship {best}.", rivals)
    if best in faster:
        return _Ranked("recommended", best, sentence(best, bench.ratios), rivals)
    slower = [between(bench, name, ORIGINAL) for name in names]
    if all(ratio is None or ratio.sure[0] > 1 or (ratio.decided and ratio.ratio >= 1) for ratio in slower):
        proven_slower = all(ratio is None or ratio.sure[0] > 1 for ratio in slower)
        word = "" if proven_slower else "provably "
        text = f"Keep the original: no engine that keeps its answers is {word}faster."
        return _Ranked("recommended", ORIGINAL, text)
    if against.decided and against.ratio < 1:
        return _Ranked("recommended", best, sentence(best, bench.ratios), rivals)
    if against.verdict == "seems faster":
        return _Ranked("leading", best, f"{best} leads, but is not provably the fastest.", (*rivals, ORIGINAL))
    return _Ranked("no ranking", "", "No ranking: the measurements do not show which engine is faster.")


def still_open(names: Sequence[str], bench: Bench) -> set[str]:
    """The artifacts to measure in further rounds, including the original; empty if further rounds would not change
    `_rank`.

    An interval has to be clear at twice its width, so that repeated looks prove nothing false. On a busy machine, a
    proven bound of the best against the original is enough, and measuring also ends without a tendency; artifacts that
    seem slower than the best are then not measured again, as no round would show by how much.
    """
    if not names:
        return set()
    ranked = _rank(names, bench)
    times = relative_times(bench)
    best = ranked.best if ranked.best in names else min(names, key=times.__getitem__)
    against = between(bench, best, ORIGINAL)
    ratios = {name: between(bench, name, best) for name in names if name != best}
    to_best = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if against is not None and not against.decided:
        if ranked.grade == "recommended" or not against.verdict.startswith("seems"):
            return set()
        return {ORIGINAL, *names} - {name for name, ratio in to_best.items() if ratio.verdict.endswith("slower")}
    unclear = {name for name, ratio in to_best.items() if ratio.decided and not _clear(ratio)}
    if not unclear and (against is None or _clear(against)):
        return set()
    return {ORIGINAL, *names} - {name for name, ratio in to_best.items() if ratio.sure[0] > 1 and name not in unclear}


def _clear(ratio: Ratio) -> bool:
    reach = math.log(ratio.ci95[1] / ratio.ci95[0]) / 2
    return reach <= max(NARROW_REACH, abs(math.log(ratio.ratio)) / 2)


def beats(bench: Bench, a: str, b: str) -> bool:
    """Whether `a` is conclusively faster than `b`: by their ratio or, if the two were not compared, by their ratios to
    the original."""
    ratio = between(bench, a, b)
    if ratio is not None:
        return ratio.sure[1] < 1
    one, other = between(bench, a, ORIGINAL), between(bench, b, ORIGINAL)
    return one is not None and other is not None and one.sure[1] < other.sure[0]


def between(bench: Bench, a: str, b: str) -> Ratio | None:
    """The measured ratio a / b of two artifacts, in whichever order they were compared; None if they were not."""
    turned = find_ratio(bench.ratios, b, a)
    return find_ratio(bench.ratios, a, b) or (turned.inverse if turned else None)


def in_order(names: Sequence[str], bench: Bench) -> list[str]:
    """The names with conclusively faster ones first, and otherwise in the given order, independent of noise."""
    left, found = list(names), list[str]()
    while left:
        ahead = (name for name in left if not any(beats(bench, other, name) for other in left))
        found.append(next(ahead, left[0]))
        left.remove(found[-1])
    return found


def _is_open(ratio: Ratio | None) -> bool:
    """Whether a ratio is missing or not decided."""
    return ratio is None or not ratio.decided


def _open(ranked: _Ranked, bench: Bench) -> list[str]:
    """Remarks on what the times leave undecided, and how to settle it."""
    reasons = [ratio.reason for ratio in bench.ratios if not ratio.decided]
    settle = next((f"{reason}." for reason in reasons if MADE_FOR in reason), f"To settle it, {MEASURE_AGAIN}.")
    if ranked.grade == "recommended" and ranked.rivals:
        *others, last = ranked.rivals
        return [
            f"Undecided: whether it, {', '.join(others)} or {last} is fastest."
            if others
            else f"Undecided: whether it or {last} is faster."
        ]
    if ranked.grade == "leading":
        rivals = " or ".join("the original" if name == ORIGINAL else name for name in ranked.rivals)
        return [f"The machine was not quiet, and {rivals} may be faster. {settle}"]
    if ranked.grade == "no ranking" and reasons:
        return [f"The engines are listed in a fixed order. {settle}"]
    return []


def relative_times(bench: Bench) -> dict[str, float]:
    """The time of a query relative to the original's, by artifact: the reported ratio, so that the choice agrees with
    it, or the ratio of the medians of all queries if the two were not compared."""
    p50 = {row.artifact: float(row.latency_ms.p50) for row in bench.results}
    ratios = {name: between(bench, name, ORIGINAL) for name in p50}
    return {name: ratio.ratio if ratio else p50[name] / p50[ORIGINAL] for name, ratio in ratios.items()}


def _names(judged: Sequence[Judged]) -> list[str]:
    return [each.name for each in judged]


def _ships(order: Sequence[Judged], best: str, *, include_failed: bool) -> list[Judged]:
    """The bundle's engines: the best one, and the requested ones that do not fail their gate. For a target without a
    proven engine among these, its first other proven engine, or else one that does not fail.

    Proven engines come before undecided ones; equals are in the order of `order` (see `in_order`).
    """
    usable = [judged for judged in order if judged.gate.status != "fail" and not _shows_nothing(judged)]
    usable = usable or [each for each in order if each.gate.status != "fail"]
    chosen = {each.name for each in (order if include_failed else usable) if each.candidate.shipped}
    chosen |= {each.name for each in order if each.name == best}
    for target in {each.candidate.target for each in usable}:
        found = [each for each in usable if each.candidate.target == target]
        proven = [each for each in found if each.keeps_answers]
        if not chosen.intersection(_names(proven)):
            spare = proven if proven or chosen.intersection(_names(found)) else found
            chosen |= {*_names(spare[:1])}
    return sorted(
        (each for each in order if each.name in chosen),
        key=lambda each: (each.name != best, not each.keeps_answers, RANK.index(each.gate.status)),
    )


def _shows_nothing(judged: Judged) -> bool:
    """Whether an engine is not FP32 and nothing proves that it keeps the original's answers."""
    return judged.candidate.precision != "fp32" and proves_nothing(judged.gate)


def _best(asked: Sequence[Judged]) -> Gate:
    """The gate of the engine closest to meeting its budget, with its name in the reasons."""
    nearest = min(asked, key=lambda each: RANK.index(each.gate.status))
    return nearest.gate.named(nearest.name)


def sentence(recommended: str, ratios: Sequence[Ratio]) -> str:
    """The sentence on what to ship, with its speed relative to the original if the measurements support it."""
    ratio = find_ratio(ratios, recommended, ORIGINAL)
    if ratio is None:
        return f"Ship {recommended}."
    high = ratio.sure[1]
    if not ratio.decided and high < 1:
        # Other processes may slow the original more than an engine, so the factor may be smaller on a quiet machine.
        return f"Ship {recommended}: {bound_words((1 / high, None))} times the original's speed under load."
    if not ratio.decided:
        return f"Ship {recommended}: how much faster than the original is not decided."
    low, high = 1 / ratio.ci95[1], 1 / ratio.ci95[0]
    if low <= 1:
        return f"Ship {recommended}: about as fast as the original [{low:.2f}, {high:.2f}]."
    return f"Ship {recommended}: {1 / ratio.ratio:.2f} times as fast as the original [{low:.2f}, {high:.2f}]."


def kept(name: str, verified: comparison.Comparison) -> str:
    """A remark on how much of the original's answers and accuracy an engine keeps."""
    low, high = verified.agreement_ci95
    kept = f"{name} gives {verified.agreement:.2f} % of the original's answers [{low:.2f}, {high:.2f}]"
    if verified.control is not None:
        kept += f" (unrelated {verified.control.agreement:.2f} %)"
    if verified.drop is None or verified.drop_ci95 is None:
        return f"{kept}."
    low, high = verified.drop_ci95
    return f"{kept}; {verified.metric} drop {_plain(verified.drop)} points [{_plain(low)}, {_plain(high)}]."


def _device(judged: Judged) -> str:
    return TARGETS[judged.candidate.target].device


def _elsewhere(candidate: Candidate) -> str:
    """A remark on the device: the original always runs on the CPU (`models.torch_runner`)."""
    device = TARGETS[candidate.target].device
    ran = f"{candidate.artifact} ran on the {device} and the original on the CPU"
    return f"{ran}: part of the speedup is due to the {device}."


def _remarks(judged: Judged, ratios: Sequence[Ratio], *, matters: bool) -> list[str]:
    """Objections to a requested engine; empty if it is faster and keeps the answers. `matters`: it ships, and no other
    remark covers whether FP32 may be faster on its target."""
    remarks, candidate, gate = [], judged.candidate, judged.gate
    name, ratio = candidate.precision.upper(), find_ratio(ratios, candidate.artifact, f"{candidate.target}-fp32")
    if ratio is not None and ratio.sure[0] > 1:
        by = f"{ratio.ratio:.2f}" if ratio.decided else bound_words(ratio.bounds)
        remarks.append(f"{name} is slower than FP32 on {candidate.target} (latency ratio {by}): ship FP32 there.")
    elif ratio is not None and not ratio.decided:
        if matters and ratio.sure[1] >= 1:
            remarks.append(f"Whether {name} is faster than FP32 on {candidate.target} is not decided.")
    elif ratio is not None and ratio.ci95[1] >= 1:
        remarks.append(f"{name} is not provably faster than FP32 on {candidate.target}.")
    half = find_ratio(ratios, candidate.artifact, f"{candidate.target}-bf16")
    if half is not None and half.decided and half.ci95[0] > 1:
        remarks.append(f"{name} is slower than BF16 on {candidate.target} (latency ratio {half.ratio:.2f}).")
    interval = judged.verified.drop_ci95
    if gate.status == "pass" and not judged.keeps_answers and interval is not None:
        low, high = interval
        remarks.append(
            f"{candidate.artifact} loses {judged.verified.drop:.2f} points of {judged.verified.metric} "
            f"[{low:.2f}, {high:.2f}]."
        )
    if gate.status in ("fail", "undecided"):
        word = "misses the budget" if gate.status == "fail" else "is not proven to meet the budget"
        remarks.append(f"{candidate.artifact} {word}: {'; '.join(gate.reasons)}.")
    return remarks


def _plain(value: float) -> str:
    """Two decimals, without the sign of a zero."""
    return f"{value + 0.0 if abs(value) >= 0.005 else 0.0:.2f}"


def find_ratio(ratios: Sequence[Ratio], a: str, b: str) -> Ratio | None:
    """The measured ratio of the times of two artifacts: of their latencies or, if these were not measured, of their
    inverse throughputs. None if the pair was not compared."""
    found = [ratio for ratio in ratios if ratio.a == a and ratio.b == b]
    latency = next((each for each in found if each.metric == "latency"), None)
    if latency is not None or not found:
        return latency
    turned = found[0].inverse
    return replace(found[0], metric="latency", ratio=turned.ratio, ci95=turned.ci95, bounds=turned.bounds)


# --- Bounds of a budget that the samples cannot prove: before any work, and after the original's answers --------------


def bounds_answers(budget: Budget) -> bool:
    """Whether a budget bounds the drop or the agreement."""
    return (budget.max_drop, budget.min_agreement) != (None, None)


def criterion_of(adapter: TaskAdapter, reference: records.Answers, data: Data, budget: Budget) -> Criterion:
    """The criterion for a bound on the drop, given these samples; it depends only on the original's answers."""
    return "labels" if budget.max_drop is None else criterion_by(adapter.compare(reference, reference, data), budget)


def criterion_by(perfect: comparison.Comparison, budget: Budget) -> Criterion:
    """As `criterion_of`, from `perfect`: the original compared with itself."""
    return "labels" if budget.max_drop is None else criterion_to_prove(perfect, budget.max_drop)


def foresee(adapter: TaskAdapter, reference: records.Answers, data: Data, budget: Budget) -> list[str]:
    """A sentence for each bound that no engine can be proven to meet on the evaluation samples.

    The original is compared with itself, by the task's own comparison: no engine can prove more.
    """
    if not bounds_answers(budget):
        return []
    return unprovable(adapter.verify(reference, reference, data), budget, adapter.noun)


def split_notes(job: Job) -> list[str]:
    """Notes on the split of the samples before any work: fewer calibration samples than usual, or a bound of the budget
    that no engine can be proven to meet, whatever it answers.

    Raises:
        GateError: such a bound, if fewer calibration samples would leave enough evaluation samples.
    """
    data, noun = job.data, job.adapter.noun
    calibrates, evaluates = len(data.calibration), len(data.evaluation)
    total, own = calibrates + evaluates, has_own_split(Path(job.recipe.data.path))
    notes = []
    if job.recipe.data.calibration.images == "auto" and calibrates < USUAL_CALIBRATION:
        notes.append(
            f"{calibrates} of {total} {noun}s are for calibration (usual: {USUAL_CALIBRATION}), {evaluates} for "
            "evaluation; data.calibration.images sets another number"
        )
    # If answers are right or wrong, the number of samples alone bounds what can be proven.
    if job.adapter.compared is not agreement.Agreement or not evaluates:
        return notes
    limits = unprovable(perfect_answers(evaluates), job.budget, noun)
    if limits and not own and (fewer := _enough_left(job, total)) is not None:
        raise GateError(
            f"the budget cannot be proven on the {evaluates} {noun}s that remain for evaluation",
            found=f"{'; '.join(limits)}; {calibrates} of {total} are for calibration",
            expected=f"more evaluation {noun}s",
            fix=f"--set data.calibration.images={fewer}",
        )
    return notes + [f"{text}; the result will be undecided unless the budget is wider" for text in limits]


def _enough_left(job: Job, total: int) -> int | None:
    """A number of calibration samples with which the budget can be proven; None without one."""
    fewer = usual_calibration(total)
    if fewer >= len(job.data.calibration) or job.recipe.data.evaluation.images != "all":
        return None
    return None if unprovable(perfect_answers(total - fewer), job.budget) else fewer
