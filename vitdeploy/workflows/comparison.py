"""`verify` and `bench` for subjects: two artifacts on the same samples, several artifacts in one benchmark run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from vitdeploy.benchmark import results, run
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.document import bench, report
from vitdeploy.errors import AnswersError
from vitdeploy.pipeline.measure import measure
from vitdeploy.pipeline.verdict import bounds_answers, criterion_of, foresee
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import Budget
from vitdeploy.stages.answers import judge
from vitdeploy.stages.workers import Executor
from vitdeploy.tasks.adapter import DataChoice, TaskAdapter
from vitdeploy.tasks.registry import make_adapter
from vitdeploy.verification.gate import accuracy_gate
from vitdeploy.verification.records import Answers
from vitdeploy.workflows.sharded import verify_in_shards
from vitdeploy.workflows.subjects import Subject, settings_of, verification


def verify_subjects(
    ours: Subject,
    theirs: Subject,
    choice: DataChoice,
    *,
    skip_bad: bool,
    budget: Budget,
    progress: Progress,
    note: Callable[[str], None] = lambda text: None,
    executor: Executor | None = None,
) -> report.VerifyDocument:
    """Compare `ours` with `theirs`, one runtime after the other; return the result and its gate. Errors as in `Trial`.
    `note` is called with bounds of the budget that the data cannot prove, before `ours` runs. Large image sets are
    evaluated in shards; with an `executor`, any number of images in its processes."""
    document = verify_in_shards(
        ours, theirs, choice, skip_bad=skip_bad, budget=budget, progress=progress, note=note, executor=executor
    )
    if document is not None:
        return document
    trial = Trial(ours, theirs, choice, skip_bad=skip_bad, progress=progress)
    for text in (*trial.data.warnings, *trial.foresee(budget)):
        note(text)
    return trial.judge(ours, trial.answers(ours), budget)


class Trial:
    """Artifacts of one setting compared with an original on the same samples; the original runs once, on first use.

    Raises:
        InputError: neither side has preprocessing, or the two have different tasks or classes. Errors of data and
            engines propagate.
    """

    def __init__(
        self, ours: Subject, theirs: Subject, choice: DataChoice, *, skip_bad: bool, progress: Progress
    ) -> None:
        self._own, self._other = settings_of(ours, theirs)
        self._adapter, self._theirs, self._progress = make_adapter(self._own), theirs, progress
        self.data = self._adapter.load(choice, skip_bad=skip_bad, progress=progress)

    def foresee(self, budget: Budget) -> list[str]:
        """The bounds of a budget that these samples cannot prove."""
        return foresee(self._adapter, self._reference, self.data, budget) if bounds_answers(budget) else []

    def answers(self, ours: Subject) -> Answers:
        """Return an artifact's answers to the samples."""
        return self._run(self._adapter, ours.runner(), ours.name)

    def _run(self, by: TaskAdapter, runner: Runner, name: str) -> Answers:
        return by.answers(runner, self.data, Counter(self._progress, name, len(self.data.evaluation)))

    @functools.cached_property
    def _reference(self) -> Answers:
        return self._run(make_adapter(self._other), self._theirs.runner(), self._theirs.name)

    @functools.cached_property
    def _same_tensor(self) -> Answers | None:
        """The original's answers to our tensors: resized, cropped and normalised our way. None if both have the same
        preprocessing, or if the original cannot take them: it has another input shape or normalises differently."""
        own, other = self._own, self._other
        if own.preprocess == other.preprocess:
            return None
        if (own.images.crop, own.images.channels) != (other.images.crop, other.images.channels):
            return None
        runner = self._theirs.runner()
        adapter = make_adapter(dataclasses.replace(other, preprocess=own.preprocess))
        answers = self._run(adapter, runner, f"{self._theirs.name} on the same tensor")
        by_itself = runner.inputs[0].dtype == "uint8"
        return None if by_itself and not own.images.same_scale(other.images) else answers

    def judge(self, ours: Subject, answers: Answers, budget: Budget) -> report.VerifyDocument:
        """Compare the answers of `ours`; return the result and its gate."""
        preprocess = (self._own.preprocess, self._other.preprocess)
        found = judge(self._adapter, answers, self._reference, self.data, ours.precision, preprocess, self._same_tensor)
        criterion = criterion_of(self._adapter, self._reference, self.data, budget)
        gate = accuracy_gate(found, budget, criterion, self._adapter.guard)
        doubt = self._adapter.doubt(self._reference, self.data, found)
        return verification(ours, self._theirs, found, self.data, gate, doubt)


def bench_subjects(
    subjects: Sequence[Subject], protocol: Protocol, progress: Progress, percents: Sequence[float] = results.DEFAULT
) -> bench.BenchDocument:
    """Measure all subjects in one benchmark run, each compared with the last. A repeated artifact is measured twice."""
    names = unique([subject.name for subject in subjects])
    bench_candidates = [subject.bench_candidate(name) for subject, name in zip(subjects, names, strict=True)]
    try:
        found = measure(bench_candidates, protocol, run.against_last(names), progress, percents, context=True)
    except AnswersError as error:  # raised in a measuring process
        for name, subject in zip(names, subjects, strict=True):
            if subject.artifact and error.message.startswith(f"{name}: "):
                error.engine, error.bundle = subject.artifact, subject.name.removesuffix(f":{subject.artifact}")
        raise
    remarks = dict.fromkeys(text for subject in subjects for text in subject.remarks)
    return bench.BenchDocument(**vars(found), remarks=tuple(remarks))


def unique(names: Sequence[str]) -> list[str]:
    return [
        name if names[:i].count(name) == 0 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)
    ]
