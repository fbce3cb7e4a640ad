"""Calibration of many images in shards, on any number of workers. The result has the same bytes as without shards.

The images are cut into shards in the order of their names (`folder.cut`), whatever the number of workers. The result
of each shard is stored by the digests of its images: a killed calibration resumes, and after images are added only
their shards are observed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.decoding import batches
from vitdeploy.data.file_digests import DIGESTS_FILE, FileDigests
from vitdeploy.data.folder import Sample, cut
from vitdeploy.errors import DataError, MissingFileError, VitdeployError
from vitdeploy.paths import is_file
from vitdeploy.quantization import observer, observers, placement_reader, ranges
from vitdeploy.quantization.probe import Probe
from vitdeploy.runtime.trust import open_atomic
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.step import package_versions
from vitdeploy.stages.workers import Workers
from vitdeploy.store.key import Identity, canonical_json, code_version
from vitdeploy.store.store import Store, shared_store, store_folder
from vitdeploy.zip_members import DAMAGED

# Shards have more than WINDOW images, 2 * WINDOW + 1 on average, and MOST at most.
WINDOW, MOST = 64, 512
# Tensors with this many rows per image have enough rows after 128 images.
HEAD_ROWS = 32
# The split of a product over threads may change its last bits, so every run has this many threads on any machine.
# Concurrent runs use all cores.
THREADS = 1
KIND, ARRAYS_FILE = "calibration-shard", "shard.npz"


@dataclass(frozen=True)
class GraphFile:
    """A graph that another process can find: in its file, otherwise in a store by the `key` of its artifact. `digest`:
    SHA-256 of its bytes and of the weights beside it."""

    path: Path
    digest: str
    key: str | None = None

    @classmethod
    def of(cls, path: Path, key: str | None) -> GraphFile:
        return cls(path.absolute(), _graph_digest(path), key)

    def find(self) -> Path:
        """The file on this node.

        Raises:
            MissingFileError: the file is missing. DataError: it is another graph.
        """
        path = self.path
        if not is_file(path) and self.key is not None:
            found = Store(store_folder(), shared_store()).find(self.key)
            path = path if found is None else found.path / path.name
        if not is_file(path):
            raise MissingFileError(
                f"a calibration worker finds no graph at {self.path}",
                fix="use a path that exists on every node, or set the same VITDEPLOY_SHARED_STORE on all nodes",
            )
        if _graph_digest(path) != self.digest:
            raise DataError(
                f"a calibration worker finds a different graph at {path}",
                found="a file with a different SHA-256 from the one on the node of the command",
                fix="put the same file there on every node, and do not change it during the calibration",
            )
        return path


def _graph_digest(path: Path) -> str:
    files = [path, path.with_name(f"{path.name}.data")]
    return hashlib.sha256("".join(file_sha256(file) for file in files if is_file(file)).encode()).hexdigest()


@dataclass(frozen=True)
class Batch:
    """Images of one run of the graph, with the digests of their files and the tensors whose values are kept."""

    samples: tuple[Sample, ...]
    digests: tuple[str, ...]
    kept: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(map(sample_name, self.samples))

    @property
    def place(self) -> tuple[str, tuple[str, ...], str]:
        """The sort key of batches; it does not depend on the other images."""
        return self.name, self.digests, str([sample.box for sample in self.samples])

    def pixels(self, preprocess: PreprocessSpec) -> observers.Pixels:
        """uint8 [n, height, width, channels].

        Raises:
            ImageError: an image cannot be read. DataError: an image changed since the calibration began.
        """
        for sample, digest in zip(self.samples, self.digests, strict=True):
            found = digest
            with contextlib.suppress(OSError):  # reading the image gives a better error
                found = _digest(sample)
            if found != digest:
                raise DataError(
                    f"{sample.shown} changed since the calibration began",
                    found="a different SHA-256",
                    expected="unchanged images; on several nodes, the same files at the same paths",
                    fix="run the command again",
                )
        [pixels] = batches(self.samples, preprocess, len(self.samples))
        return pixels


@dataclass(frozen=True)
class _CalibrationShard:
    """The task of observing one shard."""

    graph: GraphFile
    batches: tuple[Batch, ...]

    @property
    def identity(self) -> Identity:
        """The identity of the shard; images count by their bytes alone, not by their names."""
        rows = [[batch.digests, [sample.box for sample in batch.samples], batch.kept] for batch in self.batches]
        config = {"batches": hashlib.sha256(canonical_json(rows).encode()).hexdigest()}
        return Identity(KIND, config, {"graph": self.graph.digest}, _tools())


def sample_name(sample: Sample) -> str:
    """The name of an image in messages and sort keys; it does not depend on the location of the image folder."""
    return f"{sample.path.parent.name}/{sample.path.name}"


def observe_piece(piece: _CalibrationShard) -> observer.Arrays:
    """The arrays of a `Shard`, computed by a worker. Errors of the graph and the images propagate."""
    return _observe(_opened(piece.graph), piece).to_arrays()


@functools.lru_cache(maxsize=1)
def _opened(graph: GraphFile) -> Probe:
    """The probe of a graph, kept until another graph is requested: a worker observes many shards of one graph."""
    model, metadata = placement_reader.load_float_graph(graph.find())
    ranges.separate_scores(model)
    probe = Probe(model, metadata.images, threads=THREADS)
    probe.runner.load()
    return probe


def _observe(probe: Probe, piece: _CalibrationShard) -> observers.Shard:
    assert probe.preprocess is not None
    pixels: list[Callable[[], observers.Pixels]] = [
        functools.partial(batch.pixels, probe.preprocess) for batch in piece.batches
    ]
    names = [each.name for each in piece.batches]
    return observers.observe_shard(probe, pixels, names, [each.kept for each in piece.batches])


class Shards:
    """The shards of some images of a graph, and the observation of all."""

    def __init__(
        self, observation: observers.Observation, graph: GraphFile, samples: Sequence[Sample], size: int
    ) -> None:
        """`size`: the number of images per run; a divisor of the number of samples."""
        self._observation, self._graph, self._size = observation, graph, size
        self._samples = samples
        self._count = len(samples) // size

    def observe(self, workers: Workers, store: Store | None, count: Callable[[int], None]) -> None:
        """Add all batches to the observation. `count` gets the number of images per shard that it had not yet seen.

        The shards include the images that it had already seen, so they do not depend on which images came first.

        Args:
            store: where shards are read and written.

        Raises:
            DataError, ImageError: an image is unusable. WorkerError: a process died. Errors of the executor propagate.
        """
        pieces, places = self._cut(store)
        first = self._observation.batches

        def counted() -> Iterator[tuple[observers.Shard, observers.Ints]]:
            for index, shard in self._each(pieces, workers, store):
                yield shard, places[index]
                count(int((places[index] >= first).sum()) * self._size)

        self._observation.join(counted(), self._size)

    def _cut(self, store: Store | None) -> tuple[list[_CalibrationShard], list[observers.Ints]]:
        """The shards, and the batch numbers of each."""
        until = self._observation.keeps_until(self._count)
        digests = _digests(self._samples, store)
        all_batches = []
        for number in range(self._count):
            images = slice(number * self._size, (number + 1) * self._size)
            kept = tuple(sorted(name for name, end in until.items() if number < end))
            all_batches.append(Batch(tuple(self._samples[images]), tuple(digests[images]), kept))
        order = sorted(range(len(all_batches)), key=lambda i: all_batches[i].place)
        window = max(1, WINDOW // self._size)
        shards = cut((all_batches[i].name for i in order), window, MOST // WINDOW * window)
        parts = [order[shard.start : shard.stop] for shard in shards]
        pieces = [_CalibrationShard(self._graph, tuple(all_batches[i] for i in part)) for part in parts]
        return pieces, [np.array(part, np.int64) for part in parts]

    def _each(
        self, pieces: Sequence[_CalibrationShard], workers: Workers, store: Store | None
    ) -> Iterator[tuple[int, observers.Shard]]:
        """The index and the result of each shard, in the order of completion."""
        preprocess = self._observation.preprocess
        assert preprocess is not None
        missing = []
        for index, piece in enumerate(pieces):
            arrays = _stored(store, piece.identity.key, resume=workers.resume)
            if arrays is None:
                missing.append(index)
            else:
                yield index, observers.Shard.from_arrays(arrays, preprocess)
        for index, arrays in self._made([pieces[index] for index in missing], workers):
            if store is not None:
                store.make(pieces[missing[index]].identity, functools.partial(_write, arrays))
            yield missing[index], observers.Shard.from_arrays(arrays, preprocess)

    def _made(self, pieces: Sequence[_CalibrationShard], workers: Workers) -> Iterator[tuple[int, observer.Arrays]]:
        if workers.executor is None or len(pieces) < 2:
            for index, piece in enumerate(pieces):
                yield index, _observe(self._observation, piece).to_arrays()
            return
        for index, found in workers.executor.map(observe_piece, pieces):
            if isinstance(found, VitdeployError):
                raise found
            yield index, found


def observe_head(
    observation: observers.Observation, samples: Sequence[Sample], size: int, count: Callable[[int], None]
) -> None:
    """Observe the first images, in order: those that all moments come from, except for tensors with few rows per
    image."""
    _show(observation, samples, observer.MOMENT_IMAGES * observer.SPREAD, size, count)
    _show(observation, samples, observation.images_for(HEAD_ROWS), size, count)


def _show(
    observation: observers.Observation, samples: Sequence[Sample], until: int, size: int, count: Callable[[int], None]
) -> None:
    """Observe the images before number `until` that it has not yet seen, in as many concurrent runs as it allows."""
    assert observation.preprocess is not None
    preprocess, end = observation.preprocess, min(-(-until // size) * size, len(samples))
    parts = [samples[start : start + size] for start in range(observation.images, end, size)]

    def run(images: Sequence[Sample]) -> tuple[observers.Pixels, dict[str, np.ndarray], observer.Arrays]:
        [pixels] = batches(images, preprocess, size)
        feeds = dict(observation.feeds(pixels))
        return pixels, feeds, observation.run(feeds)

    for part, (pixels, feeds, outputs) in zip(parts, observers.in_order(run, parts, observation.at_once), strict=True):
        observation.take(pixels, feeds, outputs, [sample_name(sample) for sample in part])
        count(size)


def _digest(sample: Sample) -> str:
    """The SHA-256 of an image's bytes, in a file or in memory."""
    return file_sha256(sample.path) if sample.held is None else hashlib.sha256(sample.content()).hexdigest()


def _digests(samples: Sequence[Sample], store: Store | None) -> list[str]:
    # Images that are not in files are read: for a URI, the digest list may hold the service's tag instead of a digest.
    if store is None or any(sample.held is not None for sample in samples):
        return [_digest(sample) for sample in samples]
    with FileDigests(store.root / DIGESTS_FILE) as digests:
        return digests.of(sample.path for sample in samples)


@functools.cache
def _tools() -> dict[str, str]:
    return {**package_versions(("onnxruntime", "pillow", "numpy")), "code": code_version()}


def _stored(store: Store | None, key: str, *, resume: bool) -> observer.Arrays | None:
    if store is not None and not resume:
        store.remove(key)
    found = None if store is None else store.find(key)
    return None if found is None else load_arrays(found.path / ARRAYS_FILE)


def _write(arrays: observer.Arrays, out: Path) -> None:
    save_arrays(out / ARRAYS_FILE, arrays)


# --- Arrays in one file, and the state of an interrupted calibration --------------------------------------------------


STATE = "state.npz"


def save_state(folder: Path, arrays: observer.Arrays) -> None:
    """Replace the state in `folder` atomically, creating the folder if needed. OSError if the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    # Another run may have finished the stage and removed the folder.
    with contextlib.suppress(FileNotFoundError), open_atomic(folder / STATE) as file:
        save_arrays(file, arrays)


def load_state(folder: Path) -> observer.Arrays | None:
    """The state last saved there; None if it is missing or unreadable."""
    return load_arrays(folder / STATE)


def save_arrays(file: Path | IO[bytes], arrays: observer.Arrays) -> None:
    """Write arrays in the format that `load_arrays` reads."""
    np.savez(file, **arrays)  # type: ignore[arg-type]


def load_arrays(file: Path) -> observer.Arrays | None:
    """The arrays in a file; None if it is missing or unreadable."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except DAMAGED:
        return None
