"""How the engines' answers differ from the original's, sample by sample and class by class: `answers` in report.json.

Its size is bounded for any number of classes and samples; the limits are those of `verification.classes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitdeploy.document.answers import AnswerFacts, ChangedCounts, ExampleFacts
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.plan import candidates
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.step import ORIGINAL, REFERENCE
from vitdeploy.store.store import Artifact
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.tasks.examples import choose, example
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.classes import by_class, confusion, reliability
from vitdeploy.verification.collect import Answers


def report_answers(
    job: Job, artifacts: Mapping[str, Artifact]
) -> tuple[tuple[ExampleFacts, ...], AnswerFacts, dict[str, bytes]]:
    """`examples` and `answers` of report.json, and the pictures by the names that the examples have for them."""
    reference = read_answers(artifacts[REFERENCE].path)
    engines = {c.artifact: read_answers(artifacts[c.step("verify")].path) for c in candidates(job)}
    labels = job.labels or None
    examples: list[ExampleFacts] = []
    images: dict[str, bytes] = {}
    for chosen in choose(job.adapter, reference, engines, job.data):
        row, pictures = example(job.adapter, job.data, chosen, reference, engines, labels)
        examples.append(row)
        images |= pictures
    return tuple(examples), answer_facts(job.adapter, job.data, reference, engines, labels), images


def answer_facts(
    adapter: TaskAdapter, data: Data, reference: Answers, engines: Mapping[str, Answers], labels: Sequence[str] | None
) -> AnswerFacts:
    """Summarize all answers; by class if samples have classes."""
    changed = {name: _counts(adapter.changes(found, reference, data)) for name, found in engines.items()}
    original = adapter.classified(reference, data)
    if original is None:
        return AnswerFacts(changed)
    found = {name: known for name, each in engines.items() if (known := adapter.classified(each, data)) is not None}
    every = {ORIGINAL: original, **found}
    highest = max(int(max(each.truth.max(), each.answer.max())) for each in every.values())
    told = labels or data.classes
    names = [label_of(i, told) for i in range(max(len(told), highest + 1))]
    return AnswerFacts(
        changed,
        confusion(every, names),
        by_class(original, found, names),
        {name: reliability(each) for name, each in every.items() if each.confidence is not None},
    )


def _counts(changes: Changes) -> ChangedCounts:
    return ChangedCounts(
        int(changes.changed.sum()),
        None if changes.lost is None else int(changes.lost.sum()),
        None if changes.gained is None else int(changes.gained.sum()),
    )
