"""The first screen of each page: a headline, a badge for answers and one for speed, four numbers, and what would change
the decision."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vitdeploy.document.comparison import ComparisonDocument, PairFacts
from vitdeploy.document.history import HistoryDocument
from vitdeploy.document.report import ORIGINAL, Judgement
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.report import page, table, text
from vitdeploy.report.table import Badge, Cell
from vitdeploy.spec import GateStatus
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import drop_by_agreement

NUMBERS = 4
# The bound of a budget that a reason begins with (`verification.gate`), by its words.
_KEYS = {"drop": "budget.max_drop", "agreement": "budget.min_agreement", "size": "budget.max_size"}
_KEYS |= {"p50 latency": "budget.max_latency", "peak memory": "budget.max_memory"}
_MORE = ("more images in --data", "a longer --duration on a quiet machine")
_WORST: tuple[GateStatus, ...] = ("fail", "undecided", "pass", "none")


@dataclass(frozen=True)
class First:
    """`of`: the artifact of the numbers, unless it is recommended; `reasons`: further lines, collapsed."""

    sentence: str
    badges: tuple[Badge, Badge]
    numbers: tuple[Cell, ...]
    change: str
    reasons: tuple[str, ...]
    of: str = ""


def of_run(report: Judgement) -> First:
    """The first screen of a run or a search."""
    verdict, numbers = report.verdict, table.headline(report)
    passed = sum(engine.gate.status == "pass" for engine in report.engines)
    numbers += [
        Cell(f"{passed} of {len(report.engines)}", "engines provably meet the budget"),
        Cell(text.number(report.data.evaluation_images, 0), f"evaluation {report.data.noun}s"),
    ]
    of, shown = "", table.shown_engine(report)
    if shown is not None and shown.artifact != report.starred:
        leading = verdict.grade == "leading" and shown.artifact == verdict.stands_for_all
        of = f"Leading candidate: {shown.artifact} (ranking not final)"
        of = of if leading else f"Numbers of {shown.artifact} (not recommended):"
    badges = (table.gate(verdict.gate, table.judges(report)), table.grade(verdict))
    change, reasons = change_of(report), [*verdict.remarks, *_reasons(report)]
    others = tuple(line for line in dict.fromkeys(reasons) if _detail(line) not in change)
    return First(verdict.sentence, badges, tuple(numbers[:NUMBERS]), change, others, of)


def change_of(report: Judgement) -> str:
    """What would change the decision of a run or a search, in a sentence."""
    verdict = report.verdict
    if verdict.gate in ("fail", "undecided") and verdict.reasons:
        reason = verdict.reasons[0]
        key = next((key for words, key in _KEYS.items() if f": {words} " in reason), "budget")
        more = f"More evaluation {report.data.noun}s (data.evaluation.images)"
        if key in ("budget.max_latency", "budget.max_memory"):
            more = "A longer bench (bench.duration) on a quiet machine"
        return f"{more if verdict.gate == 'undecided' else 'Another engine'}, or another {key}. {reason}"
    if verdict.remarks and verdict.grade in ("leading", "no ranking"):
        return verdict.remarks[0]
    if verdict.remarks and verdict.rivals:
        return f"A longer bench on a quiet machine. {verdict.remarks[0]}"
    if report.starred == ORIGINAL:
        return "Another target, precision or machine where an engine is provably faster and keeps its answers."
    engine = report.engine(report.starred)
    return f"{_stricter(engine.verify, table.budget(report)) if engine else ''}Or another machine or runtime version."


def _stricter(verify: Comparison, budget: str) -> str:
    """The bounds on the answers that the engine would not be proven to meet."""
    reach = [bounds[1] for bounds in (verify.drop_ci95, drop_by_agreement(verify)) if bounds]
    keys = [f"budget.max_drop below {text.number(min(reach))} points"] if "max_drop" in budget and reach else []
    if "min_agreement" in budget or not keys:
        keys.append(f"budget.min_agreement above {text.number(verify.agreement_ci95[0])} %")
    return f"A stricter bound: {' or '.join(keys)} (now {budget or 'no bound'}). "


def _reasons(report: Judgement) -> list[str]:
    """The gate's reasons that no remark contains, and those of undecided times."""
    shown = " ".join([report.verdict.sentence, *report.verdict.remarks])
    reasons = [reason for reason in report.verdict.reasons if _detail(reason) not in shown]
    return reasons + page.by_reason(report.undecided)


def _detail(line: str) -> str:
    """A reason without the name of its engine."""
    return line.partition(": ")[2].rstrip(".") or line


def of_comparison(document: ComparisonDocument) -> First:
    """The first screen of a comparison: the worst number of each kind over all engines."""
    engines, gate, reasons = document.engines, document.gate, [*document.gate.reasons, *document.remarks]
    answers = [check.status for engine in engines for check in engine.checks if check.name == "accuracy"]
    speed = [check.status for engine in engines for check in engine.checks if check.name != "accuracy"]
    within = sum(all(check.status in ("pass", "none") for check in engine.checks) for engine in engines)
    differing = sum(pair.differs for pair in document.digests)
    limits = document.limits
    limited = limits.max_drop is not None or limits.max_slowdown is not None
    numbers = [
        *_worst_answers(engines),
        *_worst_time(engines),
        Cell(
            f"{within} of {len(engines)}", "engines within all limits" if limited else "engines compared, no limit set"
        ),
        Cell(f"{differing} of {len(document.digests)}", "inputs and files differ between both sides"),
        Cell(
            text.number(sum(not ratio.decided for engine in engines for ratio in engine.ratios), 0), "undecided ratios"
        ),
        Cell(text.number(len(reasons), 0), "reasons and remarks"),
    ]
    if gate.status in ("fail", "undecided"):
        ways = {"fail": ("a wider --max-drop", "a wider --max-slowdown")}.get(gate.status, _MORE)
        settle = " and ".join(way for way, kind in zip(ways, (answers, speed), strict=True) if gate.status in kind)
        change = " ".join([f"{text.capital(settle or ways[0])}.", *reasons[:1]])
        reasons = reasons[1:]
    elif limited:
        change = "A stricter --max-drop or --max-slowdown, other images in --data, or another machine."
    else:
        change = "A limit: --max-drop POINTS, or --max-slowdown PERCENT."
    undecided = page.by_reason(document.bench.undecided) if document.bench else []
    badges = (table.gate(_worst(answers), "Answers"), table.gate(_worst(speed), "Speed"))
    return First(document.sentence, badges, tuple(numbers[:NUMBERS]), change, (*reasons, *undecided))


def _worst(statuses: Iterable[GateStatus]) -> GateStatus:
    return min(statuses, key=_WORST.index, default="none")


def _worst_answers(engines: Sequence[PairFacts]) -> list[Cell]:
    """The largest drop, and the least agreement."""
    rows = [(engine.engine, engine.accuracy) for engine in engines if engine.accuracy is not None]
    cells = []
    drops = [(facts.drop, facts.drop_ci95, facts.metric, name) for name, facts in rows if facts.drop is not None]
    if drops:
        drop, bounds, metric, name = max(drops, key=lambda row: row[0])
        note = f"largest drop in {metric or 'accuracy'} against the baseline, of {name}"
        cells.append(Cell(f"{text.number(drop)} pt", note + _interval(text.interval(bounds))))
    agreements = [(facts.agreement, facts, name) for name, facts in rows if facts.agreement is not None]
    if agreements:
        least, facts, name = min(agreements, key=lambda row: row[0])
        samples = "the same files" if facts.how == "same files" else f"on {text.count(facts.n, 'sample')}"
        note = f"least agreement with the baseline, of {name}, {samples}"
        cells.append(Cell(f"{text.number(least)} %", note + _interval(text.interval(facts.agreement_ci95))))
    return cells


def _worst_time(engines: Sequence[PairFacts]) -> list[Cell]:
    """The largest latency ratio; an undecided one is worse than any other."""
    rows = [(ratio, engine.engine) for engine in engines for ratio in engine.ratios if ratio.metric == "latency"]
    if not rows:
        return []
    ratio, name = max(rows, key=lambda row: (not row[0].decided, row[0].ratio))
    value, note = table.time_ratio(ratio).value, f"of the baseline’s latency, the largest ratio, of {name}"
    if not ratio.decided:
        return [Cell(value, note)]
    return [Cell(f"{value}×", note + _interval(text.ratio_interval(ratio.ci95)))]


def _interval(words: str) -> str:
    return "" if words == text.MISSING else f"; 95 % interval {words}"


def of_sweep(document: SweepDocument) -> First:
    """The first screen of a sweep."""
    reports = {recipe.name: recipe.report for recipe in document.recipes if recipe.report}
    count, failed = len(document.recipes), [recipe for recipe in document.recipes if recipe.error]
    begun = [recipe for recipe in document.recipes if recipe.not_begun is None]
    starred = {name: engine for name, report in reports.items() if (engine := report.engine(report.starred))}
    passed = sum(report.verdict.gate in ("pass", "none") for report in reports.values())
    status = _worst("fail" if recipe.report is None else recipe.report.verdict.gate for recipe in begun)
    symbol = table.gate(status).symbol
    ranked = "pass" if starred and len(starred) == count else "undecided"
    badges = (
        Badge(status, symbol, f"Answers: {passed} of {count} passed"),
        Badge(ranked, "✓" if ranked == "pass" else "?", f"Speed: {len(starred)} of {count} recommended"),
    )
    numbers = []
    ratios = [(ratio, name) for name, engine in starred.items() if (ratio := reports[name].ratio(engine.artifact))]
    if ratios:
        ratio, name = min(ratios, key=lambda row: row[0].sure[1])
        cell = table.speed(ratio)
        numbers.append(Cell(cell.value, f"{cell.note}: {starred[name].artifact} of {name}, the largest speedup"))
    if starred:
        name, engine = min(starred.items(), key=lambda row: row[1].verify.agreement)
        bounds = text.interval(engine.verify.agreement_ci95)
        note = f"least agreement of a recommended engine with its original, of {name}{_interval(bounds)}"
        numbers.append(Cell(f"{text.number(engine.verify.agreement)} %", note))
    undecided = sum(report.verdict.gate == "undecided" for report in reports.values())
    numbers += [
        Cell(f"{len(failed)} of {count}", "recipes ended with an error"),
        Cell(f"{undecided} of {count}", "recipes whose gate is undecided"),
        Cell(text.number(sum(len(report.engines) for report in reports.values()), 0), "engines verified"),
        Cell(f"{len(reports)} of {count}", "recipes have a report"),
    ]
    changing = {name: report for name, report in reports.items() if not report.starred or len(starred) == count}
    open_ones = [f"{name}: {change_of(report)}" for name, report in changing.items()]
    errors = [
        f"{recipe.name} ended with an error: {recipe.error.fix or recipe.error.message}"
        for recipe in failed
        if recipe.error
    ]
    lines = [*errors, *open_ones] or ["Other data, another machine or another runtime version: run it again there."]
    times = [
        {f"{name}: {artifact}": why for artifact, why in report.undecided.items()} for name, report in reports.items()
    ]
    sentence = f"An engine is recommended in {len(starred)} of {text.count(count, 'recipe')}."
    return First(sentence, badges, tuple(numbers[:NUMBERS]), lines[0], (*lines[1:], *page.by_reason(*times)))


def of_history(document: HistoryDocument) -> First:
    """The first screen of a history: the latest change of each series."""
    series, wrong = document.series, len(document.canaries)
    latest = [one.changes[-1].direction for one in series if one.changes]
    slower, short = latest.count("slower"), sum(bool(one.too_few) for one in series)
    searched = len(series) - short
    if wrong:
        sentence = f"{text.count(wrong, 'engine')} gave wrong answers."
    elif slower:
        sentence = f"Latency rose in {slower} of {text.count(searched, 'searched series', 'searched series')}."
    elif searched:
        sentence = f"No rise of latency in {text.count(searched, 'searched series', 'searched series')}."
    else:
        sentence = "Too few results to detect a change of latency."
    answers = Badge("fail", "✕", f"Answers: {wrong} wrong") if wrong else Badge("pass", "✓", "Answers: none wrong")
    speed = Badge("fail", "✕", f"Speed: {slower} slower") if slower else Badge("pass", "✓", "Speed: none slower")
    if not searched:
        speed = Badge("none", "–", "Speed: too few results")
    numbers = (
        Cell(
            text.number(document.results, 0), f"number of recorded runs; {text.count(len(series), 'series', 'series')}"
        ),
        Cell(f"{searched} of {len(series)}", "series have enough decided results for change detection"),
        Cell(text.number(slower, 0), "series whose latest change of p50 latency is slower"),
        Cell(text.number(latest.count("faster"), 0), "series whose latest change of p50 latency is faster"),
    )
    change = "The next results: add them, and make this page again."
    if wrong:
        change = f"Another release of the runtime: {document.canaries[0].sentence}"
    elif slower:
        risen = next(one.changes[-1] for one in series if one.changes and one.changes[-1].direction == "slower")
        change = f"Undoing what changed: {risen.sentence}"
    elif short:
        needs = next(one.too_few for one in series if one.too_few)
        change = f"More results: {text.count(short, 'series has', 'series have')} too few, such as {needs}."
    return First(sentence, (answers, speed), numbers, change, ())
