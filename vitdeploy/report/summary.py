"""The summary of a run: one line per question, with links to the sections, and the facts about changed answers."""

from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import ORIGINAL, Report
from vitdeploy.report import page as notes
from vitdeploy.report import table, text
from vitdeploy.report.context import calibration_words, engines_with_costs, sensitivity_headline
from vitdeploy.runtime.host import name_host
from vitdeploy.spec import Task, bound_words
from vitdeploy.tasks.answers import ChangedCounts, ExampleFacts, Said
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.classes import Drops


def wrong_otherwise(counts: ChangedCounts) -> int | None:
    """The number of wrong answers that became other wrong answers; None without labels."""
    if counts.lost is None or counts.gained is None:
        return None
    return counts.changed - counts.lost - counts.gained - counts.kept


def summary(report: Report) -> list[tuple[str, str, str]]:
    """The summary of the recommended engine, or else of the first shipped one; empty without engines.

    Each row has the name of a question, the answer, and the id of the section with details ("" without one).
    """
    names = report.focus
    engine = report.engine(names[0]) if names else None
    if engine is None:
        return []
    artifact = names[0]
    lines = [
        ("Engine", _engine(report, engine), "comparison"),
        ("Answers", _answers(report, engine), "comparison"),
        ("Changed answers", _changed(report, engine), "changed" if changed(report) else ""),
        ("Classes", _classes(report, artifact), "classes"),
        ("Confidence", _confidence(report, artifact), "reliability"),
        ("Speed", _speed(report, artifact), "comparison"),
        ("Where the time goes", _time(report, artifact), "context"),
        ("What INT8 costs", _cost(engine), _sensitivity_section(report, engine)),
        ("Flags", ", ".join(flag for flag, _ in notes.legend(report.flags) if flag != "not shipped"), "flags"),
        ("Measured", _measured(report), "details"),
    ]
    return [line for line in lines if line[1]]


def _engine(report: Report, engine: EngineFacts) -> str:
    starred, grade = engine.artifact == report.starred, report.verdict.grade
    parts = [
        f"{engine.artifact}, {engine.precision} on {engine.provider}, {text.megabytes(engine.bytes)} MB",
        "recommended" if starred else "not recommended" if grade in (None, "recommended") else grade,
        table.gate(engine.gate.status, table.judges(report)).words.lower(),
    ]
    return "; ".join(parts)


def _answers(report: Report, engine: EngineFacts) -> str:
    verify = engine.verify
    cell = table.agreement(verify)
    words = f"{cell.value} % the same as the original’s ({cell.note})"
    metric = table.metric(report)
    if metric is None or verify.drop is None:
        return f"{words}; no labels, so accuracy is unknown"
    drop = f"drop {text.number(verify.drop)} points ({text.interval(verify.drop_ci95)})"
    both = f"{text.number(verify.value)} %, the original’s {text.number(verify.reference_value)} %"
    return f"{words}; {metric.words} {both}, {drop}"


def _changed(report: Report, engine: EngineFacts) -> str:
    counts = report.answers.changed.get(engine.artifact) if report.answers else None
    if counts is None:
        return ""
    words = f"{text.number(counts.changed, 0)} of {text.number(engine.verify.n, 0)}"
    other = wrong_otherwise(counts)
    if other is None or not counts.changed:
        return words
    lost, gained = text.number(counts.lost, 0), text.number(counts.gained, 0)
    kept = f", {text.number(counts.kept, 0)} as right as before" if counts.kept else ""
    wrong = f"{text.number(other, 0)} wrong, but differently"
    return f"{words}: {lost} right became wrong, {gained} wrong became right{kept}, {wrong}"


def _classes(report: Report, artifact: str) -> str:
    found = report.answers.classes if report.answers else None
    return class_headline(found, artifact) if found else ""


def _confidence(report: Report, artifact: str) -> str:
    found = (report.answers.reliability if report.answers else None) or {}
    names = [name for name in (ORIGINAL, artifact) if name in found]
    return " ".join(calibration_words(name, found[name]) for name in names)


def _speed(report: Report, artifact: str) -> str:
    if not report.bench:
        return "the bench was not run"
    ratio = report.ratio(artifact)
    if ratio is None:
        return ""
    if not ratio.decided and not bound_words(ratio.bounds):
        return "not decided"
    cell = table.speed(ratio)
    return f"{cell.value} {cell.note}"


def _time(report: Report, artifact: str) -> str:
    context = report.bench.context if report.bench else None
    lines = (each.line for each in (context.artifacts if context else ()) if each.artifact == artifact)
    return next((line for line in lines if line), "")


def _cost(engine: EngineFacts) -> str:
    sensitivity = engine.quantization.sensitivity if engine.quantization else None
    return sensitivity_headline(sensitivity) if sensitivity else ""


def _sensitivity_section(report: Report, engine: EngineFacts) -> str:
    known = [cost.artifact for cost in engines_with_costs(report)]
    return f"sensitivity-of-{1 + known.index(engine.artifact)}" if engine.artifact in known else ""


def _measured(report: Report) -> str:
    environment = report.environment
    machine = [*name_host(environment), *([environment["system"]] if "system" in environment else [])]
    samples = text.count(report.data.evaluation_images, f"evaluation {report.data.noun}")
    return ", ".join([samples, *machine, text.date(report.created)])


# --- The answers of a report: example samples with all answers --------------------------------------------------------


def examples(report: Report, changed: bool) -> list[tuple[int, ExampleFacts]]:
    """The numbered examples whose answer changed, in the report's order (the worst first), or all others."""
    numbered = enumerate(report.examples, start=1)
    return [(number, each) for number, each in numbered if (reason(each) == "changed") == changed]


def changed(report: Report) -> list[Report]:
    """The report, if any answer of any engine changed."""
    counts = report.answers.changed.values() if report.answers else ()
    return [report] if any(row.changed for row in counts) or examples(report, True) else []


def reason(example: ExampleFacts) -> str:
    """Why an example is shown: "changed", "unsure" or "usual"."""
    return example.why or ("changed" if example.differing else "usual")


def answers_by_label(example: ExampleFacts) -> dict[tuple[str, bool], dict[str, Said]]:
    """The answers to one example by their label and whether they differ from the original's, each by its artifact, the
    original's first. Different answers may have the same label, and equal answers different labels."""
    groups: dict[tuple[str, bool], dict[str, Said]] = {}
    for artifact, answer in {ORIGINAL: example.reference, **example.engines}.items():
        groups.setdefault((answer.label, artifact in example.differing), {})[artifact] = answer
    return groups


def is_label(answer: str, example: ExampleFacts, task: Task) -> bool:
    """Whether a label stands for the whole answer, and is the correct one."""
    return TASKS[task].in_words and answer == example.label


def ticked(report: Report) -> bool:
    """Whether any shown answer is correct."""
    return any(is_label(label, each, report.task) for each in report.examples for label, _ in answers_by_label(each))


def change_words(example: ExampleFacts, task: Task) -> str:
    """The change of the answer to an example, or why it is shown; "" if neither needs words."""
    if reason(example) != "changed":
        return "Low confidence of the original" if example.why == "unsure" else ""
    engines = len(example.differing)
    differ = text.count(engines, "engine differs", "engines differ") if engines else "An engine differs"
    if not TASKS[task].in_words or example.label is None:
        return differ
    if example.reference.label == example.label:
        return f"Right became wrong ({text.count(engines, 'engine')})"
    now = sum(example.engines[name].label == example.label for name in example.differing)
    return f"Wrong became right ({text.count(now, 'engine')})" if now else f"Wrong, differently ({differ})"


def boxes(example: ExampleFacts) -> list[tuple[str, ...]]:
    """The rectangles on the picture of an example: who found each ("both", "original" or "artifact"), and its left,
    top, width and height in percent of the picture's sides."""
    return [
        (kind, *(f"{100 * each:.2f}%" for each in (left, top, right - left, bottom - top)))
        for kind in ("both", "original", "artifact")
        for left, top, right, bottom in (getattr(example.marks, kind) if example.marks else ())
    ]


def bar(score: float | None) -> str:
    """The length of a score's bar as a CSS value."""
    share = score if score is not None and text.known(score) else 0.0
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


# --- Results by class: confusions, and classes that provably lose accuracy --------------------------------------------


# A phone has room for this many digits in a row of the matrix.
PHONE_DIGITS = 32
# The number of classes that a sentence names.
NAMED_CLASSES = 5
LONGEST_NAME, UPRIGHT_NAME = 18, 3  # letters of a class name above its column: at most, and without turning it


def class_engines(report: Report) -> list[str]:
    """The shipped or recommended engines with known answers by class, the recommended one first."""
    found = report.answers
    if found is None or found.confusion is None or found.classes is None:
        return []
    return [name for name in report.focus if name in found.changed]


def class_headline(classes: Drops, artifact: str) -> str:
    """A sentence on the classes that provably lose accuracy, by the intervals of all classes together."""
    lost = classes.lost[artifact]
    if not lost.classes:
        together = text.count(classes.classes, "class", "classes")
        return f"No class provably loses accuracy (95 % for {together} together)."
    parts = [
        f"{each.name} {text.number(each.drop)} points ({text.interval(each.drop_ci95)})"
        for each in lost.worst[:NAMED_CLASSES]
    ]
    more = f"; and {lost.classes - NAMED_CLASSES} more" if lost.classes > NAMED_CLASSES else ""
    return f"Provably lost: {'; '.join(parts)}{more}."
