"""The samples of a report with all answers to them: those whose answer changed, and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitdeploy.document.report import ORIGINAL, Report
from vitdeploy.report import text
from vitdeploy.report.accuracy import class_engines
from vitdeploy.report.page import RunPage, data_uri
from vitdeploy.spec import Task
from vitdeploy.tasks.answers import ExampleFacts, Marks
from vitdeploy.tasks.registry import TASKS

_WHY = {"unsure": "The original is least sure of it"}


@dataclass(frozen=True)
class Answer:
    """The score of one artifact's answer, in words and as the length of a bar; None if the task has none."""

    artifact: str
    score: str | None
    bar: str


@dataclass(frozen=True)
class AnswerGroup:
    """The artifacts that gave the same answer to an example."""

    label: str
    differs: bool
    correct: bool
    answers: list[Answer]


@dataclass(frozen=True)
class Box:
    """A rectangle on a picture, in percents of its sides; `kind`: found by both, or by one alone."""

    kind: str
    x: str
    y: str
    width: str
    height: str


@dataclass(frozen=True)
class PanelView:
    """The picture of one answer, as a data URI; None if it is not included."""

    title: str
    source: str | None


@dataclass(frozen=True)
class Example:
    """An example with all answers, those that agree with the original first. `pictured`: it is an image at all. `name`:
    what a person finds it by. `what`: what became of its answer, or why it is here. `boxes` are those of `boxed`.
    `panels`: answers that are pictures."""

    pictured: bool
    source: str | None
    alt: str
    name: str
    label: str | None
    changed: bool
    lost: int
    what: str
    groups: list[AnswerGroup]
    boxes: list[Box]
    boxed: str
    panels: list[PanelView]

    @property
    def disagreements(self) -> int:
        """The number of engines that answered differently from the original."""
        return sum(len(group.answers) for group in self.groups if group.differs)


def examples(report: Report, images: Mapping[str, bytes]) -> tuple[list[Example], list[Example]]:
    """Those whose answer changed, in the report's order, the worst first; and the others."""
    every = [_example(report, each, index, images) for index, each in enumerate(report.examples, start=1)]
    return [each for each in every if each.changed], [each for each in every if not each.changed]


@dataclass(frozen=True)
class ExamplesView:
    """The section of unchanged samples. `which`: their name next to the changed ones; `chosen`: how many are shown for
    which reason; `by_class`: they are spread over classes."""

    noun: str
    which: str
    examples: list[Example]
    chosen: dict[str, int]
    by_class: bool
    ticked: bool
    bars: str | None


def examples_view(page: RunPage) -> list[ExamplesView]:
    """The section; none where every example changed, or there is none."""
    report = page.report
    changed, others = examples(report, page.images)
    if not others:
        return []
    reasons = [example.why or "usual" for example in report.examples]
    chosen = {reason: reasons.count(reason) for reason in ("changed", "unsure", "usual")}
    which, by_class = "Other" if changed else "Example", bool(class_engines(report))
    return [ExamplesView(report.data.noun, which, others, chosen, by_class, ticked(page), TASKS[report.task].score)]


def ticked(page: RunPage) -> bool:
    """Whether an answer that is shown anywhere is the label."""
    changed, others = examples(page.report, page.images)
    return any(group.correct for each in (*changed, *others) for group in each.groups)


def _example(report: Report, example: ExampleFacts, index: int, images: Mapping[str, bytes]) -> Example:
    """One example: its image, if it is one, as a data URI, and its answers."""
    label, name = example.label, example.image
    source = None if name is None else data_uri(images.get(name))
    alt = f"Example {report.data.noun} {index}" + ("" if label is None else f", labelled {label}")
    groups = _answer_groups(report.task, example)
    differs = any(group.differs for group in groups)
    why = example.why or ("changed" if differs else "usual")
    lost, what = _what(report.task, example, groups) if why == "changed" else (0, _WHY.get(why, ""))
    return Example(
        name is not None,
        source,
        alt,
        example.sample,
        label,
        why == "changed",
        lost,
        what,
        groups,
        _boxes(example.marks) if example.marks else [],
        example.marks.engine if example.marks else "",
        [PanelView(panel.title, data_uri(images.get(panel.image))) for panel in example.panels],
    )


def _what(task: Task, example: ExampleFacts, groups: list[AnswerGroup]) -> tuple[int, str]:
    """The number of engines that lost a right answer, and the change of the answer in words."""
    engines = sum(len(group.answers) for group in groups if group.differs)
    differ = text.count(engines, "engine differs", "engines differ") if engines else "An engine differs"
    if not TASKS[task].in_words or example.label is None:
        return 0, differ
    was = example.reference.label == example.label
    now = sum(len(group.answers) for group in groups if group.differs and group.correct)
    if was:
        return engines, f"Right became wrong ({text.count(engines, 'engine')})"
    return 0, f"Wrong became right ({text.count(now, 'engine')})" if now else f"Wrong otherwise ({differ})"


def _boxes(marks: Marks) -> list[Box]:
    return [
        Box(kind, *(f"{100 * each:.2f}%" for each in (left, top, right - left, bottom - top)))
        for kind in ("both", "original", "artifact")
        for left, top, right, bottom in getattr(marks, kind)
    ]


def _answer_groups(task: Task, example: ExampleFacts) -> list[AnswerGroup]:
    """The answers to one sample by what they say: the original's answer first, the others as they come."""
    original = example.reference.label
    wanted = example.label if TASKS[task].in_words else None
    groups: dict[str, AnswerGroup] = {}
    for artifact, answer in {ORIGINAL: example.reference, **example.engines}.items():
        label = answer.label
        group = groups.setdefault(label, AnswerGroup(label, label != original, label == wanted, []))
        group.answers.append(_answer(artifact, answer.score))
    return list(groups.values())


def _answer(artifact: str, score: float | None) -> Answer:
    """An artifact's score in words and as the length of a bar."""
    share = score if score is not None and text.known(score) else 0.0
    shown = None if score is None else text.percent(score)
    return Answer(artifact, shown, f"{100 * min(max(share, 0.0), 1.0):.1f}%")
