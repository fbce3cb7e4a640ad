"""What is stored of one shard of an evaluation: the original's answers, and the counts of an engine against them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.data.decoding import Loaded, decode_each
from vitdeploy.data.folder import Ints, Samples
from vitdeploy.data.pixels import skippable
from vitdeploy.errors import ImageError
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec, encode
from vitdeploy.stages.answers import ANSWERS_FILE, read_answers
from vitdeploy.stages.files import read_json, write_json
from vitdeploy.stages.tools import package_versions
from vitdeploy.store.key import artifact_key, canonical_json
from vitdeploy.store.sources import source_digest
from vitdeploy.store.store import Artifact, Store
from vitdeploy.verification.agreement import Tally, tally
from vitdeploy.verification.collect import Answers, gather

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
        found = self._store.find(_key("shard-answers", by))
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

    def _make(self, kind: str, by: Identity, write: Callable[[Path], None]) -> Artifact:
        return self._store.make(_key(kind, by), kind, by.config, by.inputs, by.tools, write)


def _key(kind: str, by: Identity) -> str:
    return artifact_key(kind, by.config, by.inputs, by.tools)


def _answered(artifact: Artifact) -> Answered:
    facts = read_json(artifact.path / SUMMARY_FILE)
    unreadable, best = (np.array(facts[name], np.int64) for name in ("unreadable", "best"))
    itself = None if facts["itself"] is None else Tally.from_dict(facts["itself"])
    return Answered(artifact, unreadable, best, facts["classes"], itself)


def run_shards(
    runner: Runner,
    samples: Samples,
    parts: Sequence[Ints],
    preprocess: PreprocessSpec,
    *,
    skip_bad: bool,
    progress: Callable[[int], None],
    busy: Callable[[float, float], None],
) -> Iterator[tuple[Array, Ints]]:
    """The answers to each part of the samples (int64 indices), float32 [n, classes], and which of its images cannot be
    read. Images of later parts are decoded while the runner computes.

    Args:
        busy: is given the seconds for which the runner computed, and those that all took.

    Raises:
        ImageError: an unreadable image, and `skip_bad` is False. EngineError: an output is NaN or infinite.
    """
    begun = time.perf_counter()
    loaded = decode_each(samples.pick(np.concatenate(parts)), preprocess)
    with contextlib.closing(loaded), Predictor(runner, preprocess) as predictor:
        for part in parts:
            unreadable: list[int] = []
            images = _readable(loaded, len(part), unreadable if skip_bad else None)
            answers = gather(predictor, images, lambda outputs, size: {LOGITS: outputs[LOGITS]}, progress, fill=True)
            logits = answers.stacked(LOGITS) if len(answers) else np.zeros((0, 0), np.float32)
            progress(len(unreadable))
            yield logits, np.array(unreadable, np.int64)
        found, seconds = predictor.timings, time.perf_counter() - begun
    busy(found.images * found.infer / 1e3, seconds)


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
