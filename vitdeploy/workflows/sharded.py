"""`verify` of a classifier on any number of images, in the memory of a few thousand.

The images in sorted order are cut into shards (`data.shards`). First the original answers those shards that it has not
answered before, then the engine those that it has not been compared on; what each leaves is stored. Counts are exact,
so their sum over shards is the comparison on all images, the same to the last bit. A command that was killed goes on
with the shard where it was; another engine needs none of the original's answers again; a folder that grows has few new
shards.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from vitdeploy.data.classes import ClassMap
from vitdeploy.data.file_digests import FileDigests
from vitdeploy.data.folder import Ints, Samples
from vitdeploy.data.shards import MOST, WINDOW, cut
from vitdeploy.document.verification import Verification
from vitdeploy.errors import DataError
from vitdeploy.pipeline.foresight import bounds_answers, criterion_by
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import Budget
from vitdeploy.stages.shards import Answered, Identity, ShardStore, run_shards, shard_digest
from vitdeploy.stages.verify import explained
from vitdeploy.store.places import store_folder
from vitdeploy.store.store import Store
from vitdeploy.tasks.adapter import Data, DataChoice
from vitdeploy.tasks.adapters import make_adapter
from vitdeploy.tasks.classification import ClassificationKit
from vitdeploy.tasks.images import scratch_folder
from vitdeploy.verification.agreement import Tally, tally
from vitdeploy.verification.feasible import unprovable
from vitdeploy.verification.gate import GUARD, accuracy_gate
from vitdeploy.workflows.sides import settings_of, verification
from vitdeploy.workflows.subjects import Subject

DIGESTS_FILE = "digests.sqlite"
Note = Callable[[str], None]


def verify_in_shards(
    ours: Subject,
    theirs: Subject,
    choice: DataChoice,
    *,
    skip_bad: bool,
    budget: Budget,
    progress: Progress,
    note: Note,
) -> Verification | None:
    """As `comparison.verify_subjects`, whose arguments and errors these are; unreadable images are found as they come.

    None where shards are not for: images that one shard could hold, which are better decoded once and kept; other tasks
    than classification; two ways to prepare an image; an artifact of no known identity; no store that can be written.
    """
    adapter = _classifier(ours, theirs)
    if adapter is None or scratch_folder() != store_folder():
        return None
    listed, mapping = adapter.listed(choice)
    if len(listed.evaluation) <= MOST:
        return None
    found = _Evaluation(adapter, listed.evaluation, skip_bad, progress, note)
    found.answer(theirs)
    perfect = found.total(each.itself for each in found.answered).agreement()
    if bounds_answers(budget):
        for text in unprovable(perfect, budget, adapter.noun):
            note(text)
    preprocess = (adapter.setting.preprocess, adapter.setting.preprocess)
    image = found.compare(ours).agreement()
    verified = explained(image, image, ours.precision, preprocess)
    gate = accuracy_gate(verified, budget, criterion_by(perfect, budget), GUARD[adapter.setting.task])
    data = Data(choice.path, (), listed.evaluation, "", "", skipped=found.skipped(), mapping=mapping)
    return verification(ours, theirs, verified, data, gate, found.doubt(listed.evaluation, mapping))


def _classifier(ours: Subject, theirs: Subject) -> ClassificationKit | None:
    """The adapter of two classifiers that shards are for."""
    own, other = settings_of(ours, theirs)
    adapter = make_adapter(own)
    known = ours.identity is not None and theirs.identity is not None
    fits = own.task == "classification" and own.preprocess == other.preprocess
    return adapter if known and fits and isinstance(adapter, ClassificationKit) else None


class _Evaluation:
    """The shards of some images, and what artifacts leave of them. `answered`: the original's answers, by shard."""

    def __init__(
        self, adapter: ClassificationKit, evaluation: Samples, skip_bad: bool, progress: Progress, note: Note
    ) -> None:
        self._adapter, self._skip_bad, self._progress, self._note = adapter, skip_bad, progress, note
        # Of each image in sorted order its place in the evaluation.
        self._order = np.argsort(evaluation.places)
        self._samples = evaluation.pick(self._order)
        self._labels = self._samples.labels
        self._shards = [np.arange(shard.start, shard.stop) for shard in cut(self._samples.names, WINDOW, MOST)]
        self._store = ShardStore(Store(store_folder()))
        self._digests = self._read_digests()
        self.answered: list[Answered] = []

    def _read_digests(self) -> list[str]:
        count = Counter(self._progress, "digests of the images", len(self._samples))
        found = []
        with FileDigests(store_folder() / DIGESTS_FILE) as digests:
            for shard in self._shards:
                samples = self._samples.pick(shard)
                found.append(shard_digest(samples, digests.of(samples)))
                count(len(shard))
        return found

    def answer(self, original: Subject) -> None:
        """Find the original's answers to all shards; it runs for those that are missing."""
        keys = [self._identity(original, samples=digest) for digest in self._digests]
        found = [self._store.answered(key) for key in keys]
        if not self._skip_bad:  # an unreadable image is an error, which reading it again gives
            for i, each in enumerate(found):
                if each is not None and len(each.unreadable):
                    self._store.drop_answers(keys[i])
                    found[i] = None
        missing = [i for i, each in enumerate(found) if each is None]
        ran = self._run(original, [self._shards[i] for i in missing])
        for i, (logits, unreadable) in zip(missing, ran, strict=True):
            labels = self._labels_of(np.delete(self._shards[i], unreadable))
            found[i] = self._store.keep_answers(keys[i], logits, unreadable, labels)
        self.answered = [each for each in found if each is not None]

    def compare(self, ours: Subject) -> Tally:
        """The counts of an artifact against the original; it runs for the shards whose counts are missing."""
        shards = [
            (
                np.delete(shard, each.unreadable),
                each,
                self._identity(ours, samples=digest, answers=each.artifact.digest),
            )
            for shard, each, digest in zip(self._shards, self.answered, self._digests, strict=True)
            if each.itself is not None
        ]
        found = [self._store.tallied(key) for _, _, key in shards]
        missing = [i for i, each in enumerate(found) if each is None]
        ran = self._run(ours, [shards[i][0] for i in missing])
        for i, (logits, _) in zip(missing, ran, strict=True):
            readable, original, key = shards[i]
            found[i] = self._store.keep_tally(key, tally(logits, original.logits(), self._labels_of(readable)))
        return self.total(found)

    def _identity(self, subject: Subject, **digests: str) -> Identity:
        assert subject.identity is not None
        return subject.identity().on(self._adapter.setting.images, **digests)

    def _run(self, subject: Subject, parts: list[Ints]) -> Iterator[tuple[Array, Ints]]:
        if not parts:
            return iter(())
        count = Counter(self._progress, subject.name, sum(map(len, parts)))

        def busy(computed: float, seconds: float) -> None:
            share = 100 * computed / seconds
            self._note(f"{subject.name} computed for {share:.0f} % of {seconds:.0f} s; the rest waited for its images")

        return run_shards(
            *(subject.runner(), self._samples, parts, self._adapter.setting.images),
            skip_bad=self._skip_bad,
            progress=count,
            busy=busy,
        )

    def _labels_of(self, images: Ints) -> Ints | None:
        return None if self._labels is None else self._labels[images].astype(np.int64)

    def total(self, counted: Iterable[Tally | None]) -> Tally:
        """The counts of all shards.

        Raises:
            DataError: no image could be read.
        """
        tallies = [each for each in counted if each is not None]
        if not tallies:
            raise DataError("not one image could be read", found=f"{len(self._samples)} unreadable files")
        return functools.reduce(operator.add, tallies)

    def skipped(self) -> tuple[str, ...]:
        """The images that could not be read, in the order of the evaluation."""
        both = zip(self._shards, self.answered, strict=True)
        found = [int(i) for shard, each in both for i in shard[each.unreadable]]
        return tuple(self._samples[i].shown for i in sorted(found, key=lambda i: int(self._order[i])))

    def doubt(self, evaluation: Samples, mapping: ClassMap | None) -> str | None:
        """As `ClassificationKit.doubt`."""
        labels = evaluation.labels
        if labels is None:
            return None
        answers = np.full(len(self._samples), -1)
        for shard, each in zip(self._shards, self.answered, strict=True):
            answers[self._order[np.delete(shard, each.unreadable)]] = each.best
        read = answers >= 0
        classes = max(each.classes for each in self.answered)
        return self._adapter.doubt_answers(answers[read], labels[read].astype(np.int64), classes, mapping)
