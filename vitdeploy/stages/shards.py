"""What is stored of one shard of an evaluation: the original's answers, and the counts of an engine against them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.data.decoding import Loaded, decode_each
from vitdeploy.data.file_digests import UNREAD, FileDigests
from vitdeploy.data.folder import Ints, Samples
from vitdeploy.data.pixels import skippable
from vitdeploy.errors import DataError, ImageError, StorageError
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PreprocessSpec, encode
from vitdeploy.stages.answers import ANSWERS_FILE, read_answers
from vitdeploy.stages.files import read_json, write_json
from vitdeploy.stages.tools import package_versions
from vitdeploy.store.key import artifact_key, canonical_json
from vitdeploy.store.sources import source_digest
from vitdeploy.store.store import Artifact, Store
from vitdeploy.verification.agreement import Tally, tally
from vitdeploy.verification.collect import Answers, Turn, gather

SUMMARY_FILE, TALLY_FILE = "summary.json", "tally.json"
LOGITS = "logits"


@dataclass(frozen=True)
class Identity:
    """Everything that some answers depend on, as the key of a stage has it: config, digests of files, and versions of
    what computes them."""

    config: dict[str, object]
    inputs: dict[str, str]
    tools: dict[str, str]

    def on(self, preprocess: PreprocessSpec, **digests: str) -> Identity:
        """The same of answers to images with these digests, prepared in this way."""
        config = {"artifact": self.config, "images": encode(preprocess), **digests}
        return Identity(config, self.inputs, {**self.tools, **_shard_tools()})


@functools.cache
def _shard_tools() -> dict[str, str]:
    return {**package_versions(("pillow", "numpy")), "shards": source_digest((__name__,))}


def shard_digest(samples: Samples, digests: Sequence[str]) -> str:
    """SHA-256 over the names, labels and digests of the images of a shard, in order."""
    labels = [None] * len(samples) if samples.labels is None else samples.labels.tolist()
    rows = list(zip(samples.names, labels, digests, strict=True))
    return hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def content_digest(samples: Samples, digests: Sequence[str]) -> str:
    """The same, and equal where the same images cannot be read."""
    return shard_digest(samples, [UNREAD if digest.startswith(UNREAD) else digest for digest in digests])


@dataclass(frozen=True)
class Answered:
    """The original's answers to a shard. `unreadable`: int64, which of its images have none. `best`: int64 [n], the
    classes of the others, of `classes`. `itself`: the original compared with itself, None without any answer."""

    artifact: Artifact
    unreadable: Ints
    best: Ints
    classes: int
    itself: Tally | None

    @property
    def digest(self) -> str:
        """Of the answers, however they were made."""
        return self.artifact.digest

    def logits(self) -> Array:
        """float32 [n, classes]."""
        return read_answers(self.artifact.path).stacked(LOGITS)


class ShardStore:
    """A store, for what shards leave."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answered(self, by: Identity) -> Answered | None:
        """The answers that are there."""
        return self.answered_at(_key("shard-answers", by))

    def answered_at(self, key: str) -> Answered | None:
        """The same by the key of the artifact."""
        found = self._store.find(key)
        return None if found is None else _answered(found)

    def keep_answers(self, by: Identity, logits: Array, unreadable: Ints, labels: Ints | None) -> Answered:
        """Store the original's answers, float32 [n, classes], to the readable images; `labels`: int64 [n], theirs."""

        def write(out: Path) -> None:
            itself = tally(logits, logits, labels).to_dict() if len(logits) else None
            Answers({LOGITS: tuple(logits)}).save(out / ANSWERS_FILE)
            best = logits.argmax(axis=1).tolist() if len(logits) else []
            facts = {"unreadable": unreadable.tolist(), "best": best, "classes": logits.shape[1], "itself": itself}
            write_json(out / SUMMARY_FILE, facts)

        return _answered(self._make("shard-answers", by, write))

    def drop_answers(self, by: Identity) -> None:
        """Forget answers."""
        self._store.remove(_key("shard-answers", by))

    def tallied(self, by: Identity) -> Tally | None:
        """The counts that are there."""
        found = self._store.find(_key("shard-tally", by))
        return None if found is None else Tally.from_dict(read_json(found.path / TALLY_FILE))

    def keep_tally(self, by: Identity, counted: Tally) -> Tally:
        """Store an engine's counts."""
        made = self._make("shard-tally", by, lambda out: write_json(out / TALLY_FILE, counted.to_dict()))
        return Tally.from_dict(read_json(made.path / TALLY_FILE))

    def holds(self, part: Part, skip_bad: bool) -> bool:
        """Whether what a shard leaves is there already, and is of use to this evaluation."""
        if part.original is not None:
            return self.tallied(part.by) is not None
        found = self.answered(part.by)
        return found is not None and (skip_bad or not len(found.unreadable))

    def _make(self, kind: str, by: Identity, write: Callable[[Path], None]) -> Artifact:
        return self._store.make(_key(kind, by), kind, by.config, by.inputs, by.tools, write)


def _key(kind: str, by: Identity) -> str:
    return artifact_key(kind, by.config, by.inputs, by.tools)


def _answered(artifact: Artifact) -> Answered:
    facts = read_json(artifact.path / SUMMARY_FILE)
    unreadable, best = (np.array(facts[name], np.int64) for name in ("unreadable", "best"))
    itself = None if facts["itself"] is None else Tally.from_dict(facts["itself"])
    return Answered(artifact, unreadable, best, facts["classes"], itself)


@dataclass(frozen=True)
class Part:
    """One shard that an artifact has to answer.

    images: int64, which of some samples it has; unreadable: int64, which of these cannot be read, as far as that is
    known. content: `content_digest` of all of them as they were when the evaluation began. by: the key of what is
    stored. original: where the original's answers are, which an engine's are compared with; None of the original
    itself.
    """

    images: Ints
    unreadable: Ints
    content: str
    by: Identity
    original: str | None = None

    @property
    def readable(self) -> Ints:
        return np.delete(self.images, self.unreadable)


def evaluate(
    predictor: Predictor,
    samples: Samples,
    parts: Sequence[Part],
    preprocess: PreprocessSpec,
    store: ShardStore,
    digests: Path,
    *,
    skip_bad: bool,
    progress: Callable[[int], None] = lambda images: None,
    processes: int | None = None,
    turn: Turn = contextlib.nullcontext,
) -> None:
    """Answer some shards, and store what each leaves as soon as it is there. Images of later shards are decoded while
    the predictor computes.

    Args:
        digests: the file of `FileDigests`.
        processes: as of `decode_each`. turn: as of `gather`.

    Raises:
        ImageError: an unreadable image, and `skip_bad` is False; or one that could be read for the original.
        DataError: images changed since the evaluation began. EngineError: an output is NaN or infinite.
        StorageError: the original's answers are not in the store.
    """
    loaded = decode_each(samples.pick(np.concatenate([part.readable for part in parts])), preprocess, processes)
    with contextlib.closing(loaded):
        for part in parts:
            unreadable: list[int] = []
            skips = skip_bad and part.original is None
            images = _readable(loaded, len(part.readable), unreadable if skips else None)
            answers = gather(
                predictor,
                images,
                lambda outputs, size: {LOGITS: outputs[LOGITS]},
                progress,
                fill=True,
                turn=turn,
            )
            logits = answers.stacked(LOGITS) if len(answers) else np.zeros((0, 0), np.float32)
            progress(len(unreadable))
            _require_unchanged(samples.pick(part.images), part.content, digests)
            answered = samples.pick(np.delete(part.readable, unreadable))
            labels = None if answered.labels is None else answered.labels.astype(np.int64)
            _keep(store, part, logits, np.array(unreadable, np.int64), labels)


def _readable(loaded: Iterator[Loaded | ImageError], count: int, unreadable: list[int] | None) -> Iterator[Loaded]:
    """The next `count` images; of those that cannot be read, the index goes to `unreadable` (None: an error)."""
    for index in range(count):
        found = next(loaded)
        if not isinstance(found, ImageError):
            yield found
        elif unreadable is None:
            raise skippable(found)
        else:
            unreadable.append(index)


def _require_unchanged(samples: Samples, content: str, file: Path) -> None:
    """Raise DataError if these images are not those whose digests are in the keys: the answers would be stored as
    answers to others."""
    with FileDigests(file) as digests:
        if content_digest(samples, digests.of(samples)) == content:
            return
    names = list(samples.names)
    root = os.path.abspath(samples.root)  # noqa: PTH100 - as the digests have it: links stay
    changed = [os.path.relpath(path, root) for path in digests.changed]
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    raise DataError(
        "images changed while they were evaluated",
        found=", ".join(changed[:3]) + more if changed else f"other bytes in one of {names[0]} to {names[-1]}",
        wanted="the images as they were when the command began",
        fix="give the command again: it evaluates those anew, and keeps all that is finished",
    )


def _keep(store: ShardStore, part: Part, logits: Array, unreadable: Ints, labels: Ints | None) -> None:
    if part.original is None:
        store.keep_answers(part.by, logits, unreadable, labels)
        return
    original = store.answered_at(part.original)
    if original is None:
        raise StorageError(
            "the original's answers to some images are not in the store",
            found="what was stored there before has gone, or is of another machine",
            wanted="one store for the whole evaluation",
            fix="give the command again; with several machines, set VITDEPLOY_SHARED_STORE on all of them",
        )
    store.keep_tally(part.by, tally(logits, original.logits(), labels))
