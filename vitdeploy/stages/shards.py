"""Stored results of one shard of an evaluation: the original's answers, and an engine's counts against them."""

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
# The original's answers to a shard, or the counts of an engine against them.
ShardKind = Literal["shard-answers", "shard-tally"]


def shard_identity(
    kind: ShardKind, by: Identity, adapter: CountedAdapter, answering: CountedAdapter, **digests: str
) -> Identity:
    """The identity of the results of an artifact with the identity `by` on images with these digests. `adapter` defines
    preprocessing and counts, the adapter of the `answering` side what is kept."""
    how = {"images": encode(adapter.setting.images), **adapter.reading, "kept": answering.reading}
    tools = {**by.tools, **_shard_tools(adapter.setting.task)}
    return Identity(kind, {"artifact": by.config, **how, **digests}, by.inputs, tools)


@functools.cache
def _shard_tools(task: str) -> dict[str, str]:
    packages = package_versions(("pillow", "numpy", "scipy", "pycocotools"))
    return {**packages, **extension_versions(task), "shards": code_version(), "task": task}


def digests_of(samples: Samples, truth: Truth | None, files: file_digests.FileDigests) -> list[str]:
    """For each image, the digest of its bytes and of its annotations."""
    images = files.of(samples)
    if truth is None:
        return images
    known = [truth[sample.path] for sample in samples]
    facts = [hashlib.sha256(each.facts() if isinstance(each, InFile) else each.content()).hexdigest() for each in known]
    read = iter(files.of([each.file for each in known if isinstance(each, InFile)]))
    labels = [next(read) if isinstance(each, InFile) else "" for each in known]
    return [" ".join(parts) for parts in zip(images, facts, labels, strict=True)]


def shard_digest(samples: Samples, digests: Sequence[str]) -> str:
    """SHA-256 over the names, labels and digests (`digests_of`) of the images of a shard, in order."""
    labels = [None] * len(samples) if samples.labels is None else samples.labels.tolist()
    rows = list(zip(samples.names, labels, digests, strict=True))
    return hashlib.sha256(canonical_json(rows).encode()).hexdigest()


def content_digest(samples: Samples, digests: Sequence[str]) -> str:
    """As `shard_digest`, but independent of why an image cannot be read."""
    return shard_digest(
        samples, [file_digests.UNREAD if digest.startswith(file_digests.UNREAD) else digest for digest in digests]
    )


@dataclass(frozen=True)
class Answered:
    """The original's answers to a shard. `unreadable`: int64, the indices of images without an answer; `count`: the
    number of answers. `facts`: from `CountedAdapter.facts`, {} without any answer."""

    artifact: Artifact
    unreadable: Ints
    count: int
    facts: Facts

    @property
    def digest(self) -> str:
        """The digest of the answers."""
        return self.artifact.digest

    def answers(self) -> records.Answers:
        """The stored answers."""
        return read_answers(self.artifact.path)

    def itself(self) -> changes.Counts:
        """The counts of the original compared with itself, for a shard with answers."""
        return _read_counts(self.artifact.path)


def find_answers(store: Store, by: Identity) -> Answered | None:
    """The original's answers to a shard, if they are stored."""
    return answers_at(store, by.key)


def answers_at(store: Store, key: str) -> Answered | None:
    """The original's answers by the key of their artifact, if they are stored."""
    found = store.find(key)
    return None if found is None else _answered(found)


def keep_answers(
    store: Store, by: Identity, answers: records.Answers, unreadable: Ints, adapter: CountedAdapter, data: Data
) -> Answered:
    """Store the original's answers to the readable images, which are the evaluation samples of `data`."""

    def write(out: Path) -> None:
        answers.save(out / ANSWERS_FILE)
        count = len(answers)
        if count:
            _write_counts(out, adapter.count_all(answers, answers, data))
        facts = adapter.facts(answers) if count else {}
        write_json(out / SUMMARY_FILE, {"unreadable": unreadable.tolist(), "count": count, "facts": facts})

    return _answered(store.make(by, write))


def find_counts(store: Store, by: Identity) -> changes.Counts | None:
    """The counts of an engine, if they are stored."""
    found = store.find(by.key)
    return None if found is None else _read_counts(found.path)


def keep_counts(store: Store, by: Identity, counts: changes.Counts) -> changes.Counts:
    """Store an engine's counts."""
    return _read_counts(store.make(by, lambda out: _write_counts(out, counts)).path)


def holds(store: Store, part: Part, skip_bad: bool) -> bool:
    """Whether the results of a shard are stored, and usable for this evaluation."""
    if part.original is not None:
        return store.find(part.by.key) is not None
    answered = find_answers(store, part.by)
    return answered is not None and (skip_bad or not len(answered.unreadable))


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

    images: int64, the indices of its samples; unreadable: int64, the known unreadable ones among these. content: the
    `content_digest` of all of them when the evaluation began. by: the identity of the stored result. original: the key
    of the original's answers, which an engine's are compared with; None for the original itself.
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
    """Answer some shards, and store the result of each when it is finished. Images of later shards are decoded while
    the predictor computes.

    Args:
        truth: the annotations of these samples, as in `Data`. kept: what to keep of an image's outputs.
        processes: as for `decode_each`. turn: as for `gather`.

    Raises:
        ImageError: an image is unreadable and `skip_bad` is False, or it was readable for the original.
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
    """The next `count` images; the indices of unreadable ones are appended to `unreadable` (None: an error)."""
    for index in range(count):
        found = next(loaded)
        if not isinstance(found, ImageError):
            yield found
        elif unreadable is None:
            raise decoding.skippable(found)
        else:
            unreadable.append(index)


def _require_unchanged(samples: Samples, truth: Truth | None, content: str, store: Store) -> None:
    """Raise DataError if these images and labels differ from the digests in the keys: the answers would be stored under
    the keys of other data."""
    with file_digests.FileDigests(store.root / file_digests.DIGESTS_FILE) as digests:
        if content_digest(samples, digests_of(samples, truth, digests)) == content:
            return
    names = list(samples.names)
    root = os.path.abspath(samples.root)  # noqa: PTH100 - as the digests have it: links stay
    changed = [os.path.relpath(path, root) for path in digests.changed]
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    raise DataError(
        f"images {'' if truth is None else 'or labels '}changed during the evaluation",
        found=", ".join(changed[:3]) + more if changed else f"a different digest of one of {names[0]} to {names[-1]}",
        expected="the same data as at the start of the command",
        fix="run the command again: it evaluates the changed files and reuses all finished results",
    )


def _original(store: Store, key: str) -> Answered:
    original = answers_at(store, key)
    if original is None:
        raise StorageError(
            "the original's answers to some images are not in the store",
            found="a store from which they were removed, or that of another machine",
            expected="one store for the whole evaluation",
            fix="run the command again; with several machines, set VITDEPLOY_SHARED_STORE on all of them",
        )
    return original
