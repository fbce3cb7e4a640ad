"""An evaluation in shards, on any executor."""

import contextlib
import dataclasses
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from vitdeploy.benchmark.machine import open_lock, take_lock
from vitdeploy.data.file_digests import DIGESTS_FILE, FileDigests
from vitdeploy.data.folder import MOST, WINDOW, Ints, Samples, cut, first_of_copies
from vitdeploy.document.report import VerifyDocument
from vitdeploy.errors import DataError, HostError, StorageError, VitdeployError, error_with_code
from vitdeploy.pipeline import run, verdict
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.spec import Budget
from vitdeploy.stages import answers, shards, workers
from vitdeploy.store.key import Identity
from vitdeploy.store.store import store_folder
from vitdeploy.tasks.adapter import Data, DataChoice, Setting
from vitdeploy.tasks.counted import CountedAdapter, Truth
from vitdeploy.tasks.images import copies_among, scratch_folder
from vitdeploy.tasks.registry import counted_adapter
from vitdeploy.verification import changes, comparison
from vitdeploy.verification.gate import Criterion, accuracy_gate, unprovable
from vitdeploy.workflows.subjects import Portable, Subject, settings_of, verification

# --- Some shards of an evaluation as a piece of work for an executor; results go to the store -------------------------


# The variables that set the threads of PyTorch before it is loaded. Ray sets them for its tasks, and rounding may
# depend on them.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class _ShardTask:
    """Shards to evaluate with one artifact: `parts` of `samples`, with labels `truth`. `identity`: the artifact's.
    `setting`: the setting of the task; `answering`: the setting of the artifact's side. `threads`: the command's values
    of `THREADS`."""

    portable: Portable
    identity: Identity
    setting: Setting
    answering: Setting
    skip_bad: bool
    samples: Samples
    truth: Truth | None
    parts: tuple[shards.Part, ...]
    threads: tuple[str | None, ...]


def threads_here() -> tuple[str | None, ...]:
    """For `Work.threads`."""
    return tuple(os.environ.get(name) for name in THREADS)


def do(work: _ShardTask) -> None:
    """Evaluate the shards that are not in the store yet, for example from a process that died.

    Errors as in `evaluate` and `Portable.runner`.
    """
    store = run.default_store()
    parts = [part for part in work.parts if not shards.holds(store, part, work.skip_bad)]
    if not parts:
        return
    adapter, answering = counted_adapter(work.setting), counted_adapter(work.answering)
    assert adapter is not None and answering is not None, "a piece of a task that is counted in shards"
    shards.evaluate(
        *(_held.predictor(work), work.samples, work.truth, parts, adapter, answering.kept, store),
        skip_bad=work.skip_bad,
        processes=1,
        turn=machine_turn,
    )


class _Held:
    """The artifact that this process ran last, which the next piece of work probably needs."""

    def __init__(self) -> None:
        self._what: tuple[Portable, Identity, Setting] | None = None
        self._predictor: Predictor | None = None

    def predictor(self, work: _ShardTask) -> Predictor:
        what = work.portable, work.identity, work.setting
        if self._predictor is None or self._what != what:
            if self._predictor is not None:
                self._predictor.close()
                self._predictor = None
            for name, value in zip(THREADS, work.threads, strict=True):
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            runner = work.portable.runner(work.identity, run.default_store())
            self._what, self._predictor = what, Predictor(runner, work.setting.images)
        return self._predictor


_held = _Held()


# --- `verify` on any number of images, in the memory of a few thousand ------------------------------------------------
# The images in sorted order are cut into shards (`folder.cut`). First the original runs on the shards without its
# answers, then the engine on the shards without a comparison; the counts of each shard are stored. The comparison is
# computed from these counts (`tasks.counted`), so all shards together give the comparison on all images, bit for bit. A
# killed command resumes at its shard; another engine reuses the original's answers; a growing folder adds few shards.


F = TypeVar("F")
# Maximum shards per piece of work, and minimum number of pieces: a dead or slow process then delays little.
MOST_AT_ONCE, LEAST_PIECES = 4, 16
# Maximum number of failed pieces named.
NAMED = 3
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
    executor: workers.Executor | None = None,
) -> VerifyDocument | None:
    """Like `comparison.verify_subjects`, with the same arguments and errors; unreadable images are found on reading.

    None if shards are not used: without an executor, for images that fit one shard (decoded once and kept); for tasks
    without counts; for different preprocessing on both sides; for an artifact without identity; without a writable
    store. With an executor, the reason is noted.

    Raises:
        VitdeployError: some shards failed; it names their images. Finished shards are stored.
    """
    own, other = settings_of(ours, theirs)
    adapter, counterpart = counted_adapter(own), counted_adapter(other)
    reason = _reason(ours, theirs, own, other)
    if reason or adapter is None or counterpart is None:
        if executor is not None:
            note(f"--executor is not used; images are evaluated in this process: {reason}")
        return None
    most = MOST // adapter.finer
    if executor is None and choice.evaluation != "all" and choice.evaluation <= most:
        return None
    listed = adapter.listed(choice, skip_bad=skip_bad)
    if len(listed.evaluation) <= most and executor is None:
        return None
    listed = _without_copies(listed)
    for text in listed.warnings:
        note(text)
    evaluation = _Evaluation(adapter, listed, skip_bad, progress, note, executor)
    evaluation.answer(theirs, counterpart)
    criterion: Criterion = "labels"
    if verdict.bounds_answers(budget):
        perfect = evaluation.itself()
        criterion = verdict.criterion_by(perfect, budget)
        for text in unprovable(perfect, budget, adapter.noun):
            note(text)
    preprocess = (adapter.setting.preprocess, adapter.setting.preprocess)
    image = evaluation.compare(ours)
    verified = answers.explained(image, image, ours.precision, preprocess)
    gate = accuracy_gate(verified, budget, criterion, adapter.guard)
    data = dataclasses.replace(listed, skipped=(*listed.skipped, *evaluation.skipped()))
    return verification(ours, theirs, verified, data, gate, evaluation.doubt(image))


def _reason(ours: Subject, theirs: Subject, own: Setting, other: Setting) -> str:
    """The reason why these two cannot be evaluated in shards; "" if they can."""
    if counted_adapter(own) is None:
        return f"the task {own.task} does not support shards"
    if own.inputs:
        return "each image brings further inputs"
    if own.preprocess != other.preprocess:
        return "the two sides have different preprocessing"
    unknown = next((each.name for each in (ours, theirs) if each.identity is None), None)
    if unknown is not None:
        return f"{unknown} has no identity for a key"
    return "" if scratch_folder() == store_folder() else f"the store at {store_folder()} is not writable"


def _without_copies(listed: Data) -> Data:
    """The data without duplicate images: the first of each content, in sorted order."""
    images = listed.evaluation
    assert isinstance(images, Samples)
    order = np.argsort(images.places)
    with FileDigests(run.default_store().root / DIGESTS_FILE) as digests:
        chunks = (images.pick(order[start : start + MOST]) for start in range(0, len(order), MOST))
        first = first_of_copies(images, order, (digest for chunk in chunks for digest in digests.of(chunk)))
    kept, copies, (notes, doubts) = copies_among(images, first, listed.truth)
    return dataclasses.replace(
        listed,
        evaluation=images if copies is None else images.pick(kept),
        copies=copies,
        remarks=(*listed.remarks, *notes),
        doubts=(*listed.doubts, *doubts),
    )


class _Evaluation:
    """The shards of some images, and the results of artifacts on them. `answered`: the original's answers by shard."""

    def __init__(
        self,
        adapter: CountedAdapter,
        listed: Data,
        skip_bad: bool,
        progress: Progress,
        note: Note,
        executor: workers.Executor | None,
    ) -> None:
        self._adapter, self._skip_bad, self._progress, self._note = adapter, skip_bad, progress, note
        self._executor, self._listed = executor, listed
        # The place in the evaluation of each image in sorted order.
        assert isinstance(listed.evaluation, Samples)
        self._order = np.argsort(listed.evaluation.places)
        self._samples = listed.evaluation.pick(self._order)
        cuts = cut(self._samples.names, WINDOW // adapter.finer, MOST // adapter.finer)
        self._shards = [np.arange(shard.start, shard.stop) for shard in cuts]
        self._store = run.default_store()
        # For each shard: the digest in its keys, and the identity of its images.
        self._digests: list[tuple[str, str]] = self._read_digests()
        self.answered: list[shards.Answered] = []

    def _read_digests(self) -> list[tuple[str, str]]:
        count = Counter(self._progress, "digests of the images", len(self._samples))
        found = []
        with FileDigests(self._store.root / DIGESTS_FILE) as digests:
            for shard in self._shards:
                samples = self._samples.pick(shard)
                of_images = shards.digests_of(samples, self._listed.truth, digests)
                found.append((shards.shard_digest(samples, of_images), shards.content_digest(samples, of_images)))
                count(len(shard))
        return found

    def answer(self, original: Subject, answering: CountedAdapter) -> None:
        """Find the original's answers to all shards, in the form of its own adapter; run it for missing ones."""
        none = np.zeros(0, np.int64)
        parts = [
            shards.Part(shard, none, content, self._identity("shard-answers", original, answering, samples=digest))
            for shard, (digest, content) in zip(self._shards, self._digests, strict=True)
        ]
        self.answered = self._all(original, answering, parts, self._usable)

    def _usable(self, by: Identity) -> shards.Answered | None:
        answered = shards.find_answers(self._store, by)
        if answered is not None and len(answered.unreadable) and not self._skip_bad:
            self._store.remove(by.key)  # an unreadable image is an error, raised when it is read again
            return None
        return answered

    def itself(self) -> comparison.Comparison:
        """The original compared with itself. DataError: no image could be read."""
        return self._total([each.itself() for each in self.answered if each.count])

    def compare(self, ours: Subject) -> comparison.Comparison:
        """An artifact compared with the original; it runs for shards without counts. Errors as in `itself`."""
        parts = [
            shards.Part(
                shard,
                each.unreadable,
                content,
                self._identity("shard-tally", ours, self._adapter, samples=digest, answers=each.digest),
                each.artifact.key,
            )
            for shard, each, (digest, content) in zip(self._shards, self.answered, self._digests, strict=True)
            if each.count
        ]
        return self._total(self._all(ours, self._adapter, parts, functools.partial(shards.find_counts, self._store)))

    def _identity(
        self, kind: shards.ShardKind, subject: Subject, answering: CountedAdapter, **digests: str
    ) -> Identity:
        assert subject.identity is not None
        return shards.shard_identity(kind, subject.identity(), self._adapter, answering, **digests)

    def _all(
        self,
        subject: Subject,
        answering: CountedAdapter,
        parts: list[shards.Part],
        find: Callable[[Identity], F | None],
    ) -> list[F]:
        """The results of an artifact on some shards; it runs for those without a stored result."""
        found = self._store.side_by_side(find, [part.by for part in parts])
        missing = [i for i, each in enumerate(found) if each is None]
        if missing:
            self._run(subject, answering, [parts[i] for i in missing])
        for i, each in zip(missing, self._store.side_by_side(find, [parts[i].by for i in missing]), strict=True):
            found[i] = each
        here = [each for each in found if each is not None]
        if len(here) < len(parts):
            raise StorageError(
                f"answers of {subject.name} are missing in the store",
                found=f"{len(parts) - len(here)} of {len(parts)} shards missing, although all were evaluated",
                expected="one store for the whole evaluation",
                fix="with several machines, set VITDEPLOY_SHARED_STORE on all of them; then run the command again",
            )
        return here

    def _run(self, subject: Subject, answering: CountedAdapter, parts: list[shards.Part]) -> None:
        """Evaluate some shards."""
        count = Counter(self._progress, subject.name, sum(len(part.readable) for part in parts))
        if self._executor is not None:
            self._share_out(self._executor, subject, answering.setting, parts, count)
            return
        begun = time.perf_counter()
        with Predictor(subject.runner(), self._adapter.setting.images) as predictor:
            shards.evaluate(
                *(predictor, self._samples, self._listed.truth, parts, self._adapter, answering.kept, self._store),
                skip_bad=self._skip_bad,
                progress=count,
            )
            timings, seconds = predictor.timings, time.perf_counter() - begun
        share = timings.images * timings.infer / 10 / seconds
        self._note(f"{subject.name}: {share:.0f} % of {seconds:.0f} s was inference, the rest waited for images")

    def _share_out(
        self, executor: workers.Executor, subject: Subject, answering: Setting, parts: list[shards.Part], count: Counter
    ) -> None:
        """Evaluate some shards by an executor; raise an error that names failed ones."""
        assert subject.identity is not None and subject.portable is not None
        identity = subject.identity()
        portable = subject.portable.sent(identity, self._store)
        size = min(MOST_AT_ONCE, -(-len(parts) // LEAST_PIECES))
        works = []
        for start in range(0, len(parts), size):
            own = parts[start : start + size]
            images = np.concatenate([part.images for part in own])
            ends = np.cumsum([0, *(len(part.images) for part in own)])
            moved = [
                dataclasses.replace(part, images=np.arange(first, end))
                for part, (first, end) in zip(own, itertools.pairwise(ends.tolist()), strict=True)
            ]
            samples, truth = self._samples.pick(images).packed(), self._listed.truth
            known = None if truth is None else {sample.path: truth[sample.path] for sample in samples}
            how = (self._adapter.setting, answering, self._skip_bad)
            works.append(_ShardTask(portable, identity, *how, samples, known, tuple(moved), threads_here()))
        failed = []
        for index, result in executor.map(do, works):
            if isinstance(result, VitdeployError):
                failed.append((works[index], result))
            else:
                count(sum(len(part.readable) for part in works[index].parts))
        if failed:
            raise _unfinished(subject.name, failed)

    def _places(self) -> list[Ints]:
        """For each shard, the places in the evaluation of its readable images."""
        both = zip(self._shards, self.answered, strict=True)
        return [self._order[np.delete(shard, each.unreadable)] for shard, each in both]

    def _total(self, counts: list[changes.Counts]) -> comparison.Comparison:
        """The comparison from the counts of all shards with answers."""
        if not counts:
            raise DataError(
                "no image could be read",
                found=f"{len(self._samples)} unreadable files",
                expected="at least one readable image",
            )
        return self._adapter.verified(changes.joined(counts, [places for places in self._places() if len(places)]))

    def skipped(self) -> tuple[str, ...]:
        """The images that could not be read, in the order of the evaluation."""
        both = zip(self._shards, self.answered, strict=True)
        found = [int(i) for shard, each in both for i in shard[each.unreadable]]
        return tuple(self._samples[i].shown for i in sorted(found, key=lambda i: int(self._order[i])))

    def doubt(self, found: comparison.Comparison) -> str | None:
        """As `TaskAdapter.doubt`."""
        facts = [each.facts for each in self.answered if each.count]
        places = [place for place in self._places() if len(place)]
        return self._adapter.doubt_counted(found, facts, places, self._listed)


def _unfinished(name: str, failed: Sequence[tuple[_ShardTask, VitdeployError]]) -> VitdeployError:
    """The error of an evaluation with failed pieces; errors of inputs come before others."""
    error = min((error for _, error in failed), key=lambda error: isinstance(error, HostError))
    texts = []
    for work, _ in sorted(failed, key=lambda each: next(each[0].samples.names))[:NAMED]:
        names = list(work.samples.names)
        texts.append(f"{names[0]} to {names[-1]}")
    rest = len(failed) - NAMED
    more = f", and {rest} more piece{'' if rest == 1 else 's'}" if rest > 0 else ""
    count = sum(len(work.samples) for work, _ in failed)
    return error_with_code(
        error.code,
        f"{name} was not evaluated on {count} images: {error.message}",
        found=f"{error.found}; in {', '.join(texts)}{more}" if error.found else f"in {', '.join(texts)}{more}",
        expected=error.expected,
        fix="; ".join(filter(None, (error.fix, "run the same command again: all other shards are stored"))),
    )


# --- Parallel evaluation processes of one machine: they decode in parallel, and run their engines one by one ----------
# An engine uses all cores. With fewer threads per process its sums may be rounded differently, and the answers would
# depend on the number of processes.


@contextlib.contextmanager
def machine_turn() -> Iterator[None]:
    """Wait for the turn of this process among the user's processes on this machine. The lock is the kernel's (flock),
    released when its process ends for any reason; without such a lock (Windows) nothing waits."""
    if os.name != "posix":
        yield
        return
    descriptor = open_lock(Path(tempfile.gettempdir()) / f"vitdeploy-evaluation-{os.getuid()}.lock")
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # not every file system supports locks
                take_lock(descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
