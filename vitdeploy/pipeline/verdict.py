"""Which engine to ship, in one sentence that a person can defend, and which engines the bundle holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.row import Row
from vitdeploy.document.bench import Bench, Ratio
from vitdeploy.spec import Budget, GateStatus
from vitdeploy.stages.step import ORIGINAL, Candidate
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate, Reason, bound_gate, join, proves_nothing

# Of gates, the one that is nearest to a budget first.
RANK: tuple[GateStatus, ...] = ("pass", "none", "undecided", "fail")
MIB = 1 << 20
MEASURE_AGAIN = "measure again on a machine with nothing else running"


@dataclass(frozen=True)
class Judged:
    """One engine as the verdict sees it.

    `gate` is that of the whole budget, `verified` the result of `verify`. `guarded`: no budget bounds the loss, so the
    guard does.
    """

    candidate: Candidate
    gate: Gate
    verified: Comparison
    guarded: bool

    @property
    def name(self) -> str:
        return self.candidate.artifact

    @property
    def keeps_answers(self) -> bool:
        return keeps_answers(self.gate, self.verified, guarded=self.guarded)


@dataclass(frozen=True)
class Verdict:
    """The recommendation in a `sentence`; `remarks` say what it keeps and what speaks against the requested engines.

    `recommended` is an artifact, or the original; None if nothing is decided. `ships` are the engines of the bundle,
    the recommended one first. `gate` judges the recipe's own engines: the budget is met when one of them meets it.
    """

    sentence: str
    remarks: tuple[str, ...]
    recommended: str | None
    ships: tuple[Candidate, ...]
    gate: Gate

    @property
    def leading(self) -> str:
        """The artifact that stands for the run in a table: recommended, or the first of the bundle, or the original."""
        return self.recommended or (self.ships[0].artifact if self.ships else ORIGINAL)


def engine_gate(accuracy: Gate, budget: Budget, size: int, row: Row | None) -> Gate:
    """One gate of accuracy, size, memory and latency (the last two left undecided where they were not measured)."""
    gates = [accuracy, bound_gate("size", size, budget.max_size, "bytes", kind="size")]
    if budget.max_latency is not None:
        if row is None:
            gates.append(Gate("undecided", (Reason("max_latency needs a bench", "latency"),)))
        else:
            p50, interval = row.latency_ms.p50, row.latency_ms_ci95.p50
            # "short" says that there were too few queries for a high percentile; the median has its interval.
            flags = [flag for flag in row.flags if flag != "short"]
            gates.append(bound_gate("p50 latency", p50, budget.max_latency, "ms", flags, interval, kind="latency"))
    if budget.max_memory is not None:
        memory = row.peak_memory_bytes if row is not None else None
        if memory is None:
            gates.append(Gate("undecided", (Reason("max_memory needs a bench, on Linux", "memory"),)))
        else:
            gates.append(bound_gate("peak memory", memory / MIB, budget.max_memory / MIB, "MiB", kind="memory"))
    return join(gates)


def keeps_answers(gate: Gate, verified: Comparison, *, guarded: bool) -> bool:
    """Whether an engine may be recommended: its gate passes. If only the guard judges it, it must not provably lose
    anything either, because the user gave no bound."""
    return gate.status == "pass" and not (guarded and provably_loses(verified))


def provably_loses(verified: Comparison) -> bool:
    """The whole interval of the drop is above zero; without labels nothing is proven."""
    return verified.drop_ci95 is not None and verified.drop_ci95[0] > 0


def decide(judged: Sequence[Judged], bench: Bench, *, include_failed: bool = False) -> Verdict:
    """Recommend the fastest of the original and of every engine that keeps its answers.

    Args:
        judged: every engine that was made, including those that were not requested.
        bench: the result of `pipeline.measure` for the original and all engines.
        include_failed: the bundle also includes engines that fail their gate, last.
    """
    times = relative_times(bench)
    order = sorted(judged, key=lambda each: times[each.name])
    keeping = [each for each in order if each.keeps_answers]
    asked = [each for each in judged if each.candidate.shipped]
    noisy = undecided_among(bench, _names(keeping))
    recommended: str | None = None
    if keeping and not noisy:
        recommended = min([ORIGINAL, *_names(keeping)], key=lambda name: times[name])
        keeps_original = recommended == ORIGINAL
        said = _keep(_names(keeping), bench.ratios) if keeps_original else sentence(recommended, bench.ratios)
    elif keeping:
        said = f"Not decided which is fastest: {noisy}."
    elif any(each.gate.status == "pass" for each in order):
        recommended = ORIGINAL
        said = "Keep the original: every engine that is proven to meet the budget provably loses accuracy."
    elif any(each.gate.status == "undecided" for each in order):
        said = f"Not decided: no engine is proven to meet the budget. {_first_reason(order)}"
    else:
        recommended = ORIGINAL
        said = "Keep the original: every engine fails its budget."
    ships = _ships(order, recommended, include_failed=include_failed)
    remarks = [kept(each.name, each.verified) for each in order if each.name == recommended]
    if not keeping and recommended is None and ships:
        remarks = [kept(ships[0].name, ships[0].verified)]
    remarks += [_elsewhere(each.candidate) for each in order if each.name == recommended and _device(each) != "CPU"]
    for each in asked:
        remarks += _remarks(each, bench.ratios)
    return Verdict(said, tuple(remarks), recommended, tuple(each.candidate for each in ships), _best(asked))


def relative_times(bench: Bench) -> dict[str, float]:
    """The time of a query over the original's, by artifact: the ratio that is claimed, so that what is said to be
    faster is what is chosen; that of the medians of all queries where the two were not compared."""
    p50 = {row.artifact: float(row.latency_ms.p50) for row in bench.results}
    ratios = {name: find_ratio(bench.ratios, name, ORIGINAL) for name in p50}
    return {name: ratio.ratio if ratio else p50[name] / p50[ORIGINAL] for name, ratio in ratios.items()}


def undecided_among(bench: Bench, names: Sequence[str]) -> str:
    """Why the speed of these artifacts against the original's is not decided; empty where it is."""
    ratios = [find_ratio(bench.ratios, name, ORIGINAL) for name in names]
    return "; ".join(dict.fromkeys(ratio.reason for ratio in ratios if ratio and not ratio.decided))


def _names(judged: Sequence[Judged]) -> list[str]:
    return [each.name for each in judged]


def _first_reason(order: Sequence[Judged]) -> str:
    first = next(each for each in order if each.gate.status == "undecided")
    return f"{first.name}: {first.gate.reasons[0]}." if first.gate.reasons else ""


def _ships(order: Sequence[Judged], recommended: str | None, *, include_failed: bool) -> list[Judged]:
    """The bundle's engines: the recommended one, and the requested ones that do not fail their gate. A target for which
    none of these is proven gets its fastest other proven engine, or at least one that does not fail.

    Proven ones come before undecided ones, and the fastest first among equals. `order` is by latency.
    """
    usable = [each for each in order if each.gate.status != "fail" and not _shows_nothing(each)]
    usable = usable or [each for each in order if each.gate.status != "fail"]
    chosen = {each.name for each in (order if include_failed else usable) if each.candidate.shipped}
    chosen |= {each.name for each in order if each.name == recommended}
    for target in {each.candidate.target for each in usable}:
        found = [each for each in usable if each.candidate.target == target]
        proven = [each for each in found if each.keeps_answers]
        if not chosen.intersection(_names(proven)):
            spare = proven if proven or chosen.intersection(_names(found)) else found
            chosen |= {*_names(spare[:1])}
    return sorted(
        (each for each in order if each.name in chosen),
        key=lambda each: (each.name != recommended, not each.keeps_answers, RANK.index(each.gate.status)),
    )


def _shows_nothing(judged: Judged) -> bool:
    """Whether an engine is of another precision, and nothing shows that it has the original's answers."""
    return judged.candidate.precision != "fp32" and proves_nothing(judged.gate)


def _best(asked: Sequence[Judged]) -> Gate:
    """The gate of the engine that comes nearest to its budget, whose reasons name it."""
    nearest = min(asked, key=lambda each: RANK.index(each.gate.status))
    return nearest.gate.named(nearest.name)


def _keep(names: Sequence[str], ratios: Sequence[Ratio]) -> str:
    """Why the original stays, of these engines that keep its answers."""
    found = [find_ratio(ratios, name, ORIGINAL) for name in names]
    surely = all(ratio is None or ratio.ci95[0] > 1 for ratio in found)
    return f"Keep the original: no engine that keeps its answers is {'' if surely else 'provably '}faster."


def sentence(recommended: str, ratios: Sequence[Ratio]) -> str:
    """Say what to ship, and how much faster than the original it is, as far as the interval supports it."""
    ratio = find_ratio(ratios, recommended, ORIGINAL)
    if ratio is None:
        return f"Ship {recommended}."
    low, high = 1 / ratio.ci95[1], 1 / ratio.ci95[0]
    times = f"{1 / ratio.ratio:.2f} times as fast"
    if not ratio.decided:
        return f"Ship {recommended}. How much faster than the original it is, is not decided: {MEASURE_AGAIN}."
    if low <= 1:
        return f"Ship {recommended}: not provably faster than the original ({times} [{low:.2f}, {high:.2f}])."
    return f"Ship {recommended}: {times} as the original [{low:.2f}, {high:.2f}]."


def kept(name: str, verified: Comparison) -> str:
    """How much of the original's answers and accuracy an engine keeps."""
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
    """The original of a run computes on the CPU, whatever the target (`models.torch_runner`)."""
    device = TARGETS[candidate.target].device
    ran = f"{candidate.artifact} ran on the {device} and the original on the CPU"
    return f"{ran}: how much faster is also the {device}'s part."


def _remarks(judged: Judged, ratios: Sequence[Ratio]) -> list[str]:
    """What speaks against a requested engine; nothing if it is faster and keeps the answers."""
    remarks, candidate, gate = [], judged.candidate, judged.gate
    name, ratio = candidate.precision.upper(), find_ratio(ratios, candidate.artifact, f"{candidate.target}-fp32")
    if ratio is not None and not ratio.decided:
        remarks.append(f"Whether {name} is faster than FP32 on {candidate.target} is not decided.")
    elif ratio is not None and ratio.ci95[0] > 1:
        remarks.append(
            f"{name} is slower than FP32 on {candidate.target} (latency ratio {ratio.ratio:.2f}): ship FP32 there."
        )
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
    """The measured ratio of the times of two artifacts: of their latencies or, if the bench measured none, of their
    inverse throughputs. None if the pair was not compared."""
    found = [each for each in ratios if each.a == a and each.b == b]
    latency = next((each for each in found if each.metric == "latency"), None)
    if latency is not None or not found:
        return latency
    low, high = found[0].ci95
    return replace(found[0], metric="latency", ratio=1 / found[0].ratio, ci95=(1 / high, 1 / low))
