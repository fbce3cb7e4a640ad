"""The answers of a report: samples with all answers to them, and what is proven class by class."""

from __future__ import annotations

from vitdeploy.document.report import ORIGINAL, Report
from vitdeploy.report import text
from vitdeploy.spec import Task
from vitdeploy.tasks.answers import ExampleFacts, Said
from vitdeploy.tasks.registry import TASKS
from vitdeploy.verification.classes import Drops


def examples(report: Report, changed: bool) -> list[tuple[int, ExampleFacts]]:
    """Those whose answer changed, in the report's order, the worst first; or the others. Each with its number."""
    numbered = enumerate(report.examples, start=1)
    return [(number, each) for number, each in numbered if (reason(each) == "changed") == changed]


def reason(example: ExampleFacts) -> str:
    """Why an example is shown: "changed", "unsure" or "usual"."""
    return example.why or ("changed" if len(answers_by_label(example)) > 1 else "usual")


def answers_by_label(example: ExampleFacts) -> dict[str, dict[str, Said]]:
    """The answers to one example by what they say, each by its artifact: the original's first, the others as they
    come."""
    groups: dict[str, dict[str, Said]] = {}
    for artifact, answer in {ORIGINAL: example.reference, **example.engines}.items():
        groups.setdefault(answer.label, {})[artifact] = answer
    return groups


def is_label(answer: str, example: ExampleFacts, task: Task) -> bool:
    """Whether an answer in words is the whole answer, and the label."""
    return TASKS[task].in_words and answer == example.label


def ticked(report: Report) -> bool:
    """Whether an answer that is shown anywhere is the label."""
    return any(is_label(label, each, report.task) for each in report.examples for label in answers_by_label(each))


def change_words(example: ExampleFacts, task: Task) -> str:
    """What became of the answer to an example, or why it is shown; "" where that needs no words."""
    if reason(example) != "changed":
        return "The original is least sure of it" if example.why == "unsure" else ""
    others = {label: each for label, each in answers_by_label(example).items() if label != example.reference.label}
    engines = sum(map(len, others.values()))
    differ = text.count(engines, "engine differs", "engines differ") if engines else "An engine differs"
    if not TASKS[task].in_words or example.label is None:
        return differ
    if example.reference.label == example.label:
        return f"Right became wrong ({text.count(engines, 'engine')})"
    now = len(others.get(example.label, ()))
    return f"Wrong became right ({text.count(now, 'engine')})" if now else f"Wrong otherwise ({differ})"


def boxes(example: ExampleFacts) -> list[tuple[str, ...]]:
    """The rectangles on the picture of an example: who found each ("both", or one alone), its left, top, width and
    height in percents of the picture's sides."""
    return [
        (kind, *(f"{100 * each:.2f}%" for each in (left, top, right - left, bottom - top)))
        for kind in ("both", "original", "artifact")
        for left, top, right, bottom in (getattr(example.marks, kind) if example.marks else ())
    ]


def bar(score: float | None) -> str:
    """The length of a score's bar."""
    share = score if score is not None and text.known(score) else 0.0
    return f"{100 * min(max(share, 0.0), 1.0):.1f}%"


# --- Class by class: which are confused, and which provably lose ------------------------------------------------------


# A phone has room for this many digits in a row of the matrix.
PHONE_DIGITS = 32
# Classes that a sentence names.
NAMED_CLASSES = 5
LONGEST_NAME, UPRIGHT_NAME = 18, 3  # letters of a class above its column, at all and without being turned


def class_engines(report: Report) -> list[str]:
    """The shipped or recommended engines whose answers are known class by class, the recommended first."""
    found = report.answers
    if found is None or found.confusion is None or found.classes is None:
        return []
    return [name for name in report.focus if name in found.changed]


def class_headline(classes: Drops, artifact: str) -> str:
    """The classes that lose, if the intervals of all classes together prove it."""
    lost = classes.lost[artifact]
    if not lost.classes:
        return f"No class provably loses accuracy ({text.count(classes.classes, 'class', 'classes')} together, 95 %)."
    parts = [
        f"{each.name} {text.number(each.drop)} points ({text.interval(each.drop_ci95)})"
        for each in lost.worst[:NAMED_CLASSES]
    ]
    more = f"; and {lost.classes - NAMED_CLASSES} more" if lost.classes > NAMED_CLASSES else ""
    return f"Provably lost: {'; '.join(parts)}{more}."
