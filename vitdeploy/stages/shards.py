"""What is stored of one shard of an evaluation: the original's answers, and the counts of an engine against them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vitdeploy.data import decoding, file_digests
from vitdeploy.data.annotations import InFile
from vitdeploy.data.folder import Ints, Samples
from vitdeploy.errors import DataError, ImageError, StorageError
from vitdeploy.extensions import extension_versions
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.spec import encode
from vitdeploy.stages.answers import ANSWERS_FILE, read_answers
from vitdeploy.stages.step import Facts, package_versions, read_json, write_json
from vitdeploy.store.key import Identity, canonical_json, code_version
from vitdeploy.store.store import Artifact, Store
from vitdeploy.tasks.adapter import Data
from vitdeploy.tasks.counted import CountedAdapter, Truth
from vitdeploy.verification import agreement, changes, records

SUMMARY_FILE, TALLY_FILE, RECORDS_FILE = "summary.json", "tally.json", "records.npz"
# Of what is stored of a shard: the original's answers, or the counts of an engine against them.
ShardKind = Literal["shard-answers", "shard-tally"]


def shard_identity(
    kind: ShardKind, by: Identity, adapter: CountedAdapter, answering: CountedAdapter, **digests: str
) -> Identity:
    """What an artifact, which `by` is the identity of, leaves of images with these digests: prepared and counted as the
    `adapter` says, and kept as that of the `answering` side does."""
    how = {"images": encode(adapter.setting.images), **adapter.reading, "kept": answering.reading}
    tools = {**by.tools, **_shard_tools(adapter.setting.task)}
    return Identity(kind, {"artifact": by.config, **how, **digests}, by.inputs, tools)


@functools.cache
def _shard_tools(task: str) -> dict[str, str]:
    packages = package_versions(("pillow", "numpy", "scipy", "pycocotools"))
    return {**packages, **extension_versions(task), "shards": code_version(), "task": task}


def digests_of(samples: Samples, truth: Truth | None, files: file_digests.FileDigests) -> list[str]:
    """Of each image the digest of its bytes, and of what is known of it beside them."""
    images = files.of(samples)
    if truth is None:
        return images
    known = [truth[sample.path] for sample in samples]
    told = [hashlib.sha256(each.facts() if isinstance(each, InFile) else each.content()).hexdigest() for each in known]
    read = iter(files.of([each.file for each in known if isinstance(each, InFile)]))
    labels = [next(read) if isinstance(each, InFile) else "" for each in known]
    return [" ".join(parts) for parts in zip(images, told, labels, strict=True)]


def shard_digest(samples: Samples, digests: Sequence[str]) -> str:
    """SHA-256 over the names, labels and digests (`digests_of`) of the images of a shard, in order."""
    labels = [None] * len(samples) if samples.labels is None else samples.labels.tolist()
    rows = list(zip(samples.names, labels, digests, strict=True))
    return hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def content_digest(samples: Samples, digests: Sequence[str]) -> str:
    """The same, and equal where the same images cannot be read."""
    return shard_digest(
        samples, [file_digests.UNREAD if digest.startswith(file_digests.UNREAD) else digest for digest in digests]
    )


@dataclass(frozen=True)
class Answered:
    """The original's answers to a shard. `unreadable`: int64, which of its images have none; `count`: how many have
    one. `facts`: as of `CountedAdapter.facts`, {} without any answer."""

    artifact: Artifact
    unreadable: Ints
    count: int
    facts: Facts

    @property
    def digest(self) -> str:
        """Of the answers, however they were made."""
        return self.artifact.digest

    def answers(self) -> records.Answers:
        """What was kept of them."""
        return read_answers(self.artifact.path)

    def itself(self) -> changes.Counts:
        """The original compared with itself, of a shard with answers."""
        return _read_counts(self.artifact.path)


def find_answers(store: Store, by: Identity) -> Answered | None:
    """The original's answers to a shard, if they are there."""
    return answers_at(store, by.key)


def answers_at(store: Store, key: str) -> Answered | None:
    """The same by the key of the artifact."""
    found = store.find(key)
    return None if found is None else _answered(found)


def keep_answers(
    store: Store, by: Identity, answers: records.Answers, unreadable: Ints, adapter: CountedAdapter, data: Data
) -> Answered:
    """Store the original's answers to the readable images, which `data` has to evaluate on."""

    def write(out: Path) -> None:
        answers.save(out / ANSWERS_FILE)
        count = len(answers)
        if count:
            _write_counts(out, adapter.count_all(answers, answers, data))
        facts = adapter.facts(answers) if count else {}
        write_json(out / SUMMARY_FILE, {"unreadable": unreadable.tolist(), "count": count, "facts": facts})

    return _answered(store.make(by, write))


def find_counts(store: Store, by: Identity) -> changes.Counts | None:
    """The counts of an engine, if they are there."""
    found = store.find(by.key)
    return None if found is None else _read_counts(found.path)


def keep_counts(store: Store, by: Identity, counts: changes.Counts) -> changes.Counts:
    """Store an engine's counts."""
    return _read_counts(store.make(by, lambda out: _write_counts(out, counts)).path)


def holds(store: Store, part: Part, skip_bad: bool) -> bool:
    """Whether what a shard leaves is there already, and is of use to this evaluation."""
    if part.original is not None:
        return store.find(part.by.key) is not None
    found = find_answers(store, part.by)
    return found is not None and (skip_bad or not len(found.unreadable))


def _answered(artifact: Artifact) -> Answered:
    found = read_json(artifact.path / SUMMARY_FILE)
    return Answered(artifact, np.array(found["unreadable"], np.int64), found["count"], found["facts"])


def _write_counts(folder: Path, counts: changes.Counts) -> None:
    if isinstance(counts, agreement.Tally):
        write_json(folder / TALLY_FILE, counts.to_dict())
    else:
        counts.save(folder / RECORDS_FILE)


def _read_counts(folder: Path) -> changes.Counts:
    file = folder / TALLY_FILE
    return agreement.Tally.from_dict(read_json(file)) if file.exists() else records.Records.load(folder / RECORDS_FILE)


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
    truth: Truth | None,
    parts: Sequence[Part],
    adapter: CountedAdapter,
    kept: records.Keep,
    store: Store,
    *,
    skip_bad: bool,
    progress: Callable[[int], None] = lambda images: None,
    processes: int | None = None,
    turn: records.Turn = contextlib.nullcontext,
) -> None:
    """Answer some shards, and store what each leaves as soon as it is there. Images of later shards are decoded while
    the predictor computes.

    Args:
        truth: as of `Data`, of these samples. kept: what the side that answers keeps of an image's outputs.
        processes: as of `decode_each`. turn: as of `gather`.

    Raises:
        ImageError: an unreadable image, and `skip_bad` is False; or one that could be read for the original.
        DataError: images or labels changed since the evaluation began; a label cannot be used.
        EngineError: an output is NaN or infinite.
        StorageError: the original's answers are not in the store.
    """
    readable = samples.pick(np.concatenate([part.readable for part in parts]))
    loaded = decoding.decode_each(readable, adapter.setting.images, processes)
    with contextlib.closing(loaded):
        for part in parts:
            unreadable: list[int] = []
            skips = skip_bad and part.original is None
            images = _readable(loaded, len(part.readable), unreadable if skips else None)
            answers = records.gather(
                predictor,
                images,
                kept,
                progress,
                fill=True,
                turn=turn,
            )
            progress(len(unreadable))
            _require_unchanged(samples.pick(part.images), truth, part.content, store)
            answered = samples.pick(np.delete(part.readable, unreadable))
            data = Data(samples.root, (), answered, truth=truth)
            if part.original is None:
                keep_answers(store, part.by, answers, np.array(unreadable, np.int64), adapter, data)
            else:
                reference = _original(store, part.original).answers()
                keep_counts(store, part.by, adapter.count_all(answers, reference, data))


def _readable(
    loaded: Iterator[decoding.Loaded | ImageError], count: int, unreadable: list[int] | None
) -> Iterator[decoding.Loaded]:
    """The next `count` images; of those that cannot be read, the index goes to `unreadable` (None: an error)."""
    for index in range(count):
        found = next(loaded)
        if not isinstance(found, ImageError):
            yield found
        elif unreadable is None:
            raise decoding.skippable(found)
        else:
            unreadable.append(index)


def _require_unchanged(samples: Samples, truth: Truth | None, content: str, store: Store) -> None:
    """Raise DataError if these images and labels are not those whose digests are in the keys: the answers would be
    stored as answers to others."""
    with file_digests.FileDigests(store.root / file_digests.DIGESTS_FILE) as digests:
        if content_digest(samples, digests_of(samples, truth, digests)) == content:
            return
    names = list(samples.names)
    root = os.path.abspath(samples.root)  # noqa: PTH100 - as the digests have it: links stay
    changed = [os.path.relpath(path, root) for path in digests.changed]
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    raise DataError(
        f"images {'' if truth is None else 'or labels '}changed while they were evaluated",
        found=", ".join(changed[:3]) + more if changed else f"other bytes in one of {names[0]} to {names[-1]}",
        expected="the data as they were when the command began",
        fix="give the command again: it evaluates those anew, and keeps all that is finished",
    )


def _original(store: Store, key: str) -> Answered:
    original = answers_at(store, key)
    if original is None:
        raise StorageError(
            "the original's answers to some images are not in the store",
            found="what was stored there before has gone, or is of another machine",
            expected="one store for the whole evaluation",
            fix="give the command again; with several machines, set VITDEPLOY_SHARED_STORE on all of them",
        )
    return original
