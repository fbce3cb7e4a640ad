"""The engine of a bundle at two batch sizes: one image, and the largest batch where that is faster than one by one."""

from __future__ import annotations

import io
import math
import statistics
import time
from pathlib import Path
from types import TracebackType

import numpy as np

from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import InputError, TargetError
from vitdeploy.runtime import Predictor, load
from vitdeploy.runtime.choice import AUTO
from vitdeploy.runtime.runner import Array
from vitdeploy.serve.protocol import Model
from vitdeploy.serve.tensors import DATATYPES
from vitdeploy.spec import EngineSpec, TensorSpec

# How long both sizes are tried in turns at the start.
TRIAL_SECONDS = 0.6


class Engines:
    """The engine that a server runs. Engines have a fixed batch when they are loaded, so a smaller one is padded, which
    costs as much as a full one: from `threshold` images on that is faster than one by one, as measured at the start.
    Use as a context manager, or call `close`.

    `predictor` decodes, prepares and answers. Not for several threads.
    """

    def __init__(self, predictor: Predictor, large: Predictor | None, name: str, max_batch: int) -> None:
        self.predictor = predictor
        self._large = large
        spec = predictor.runner
        self.model = Model(name, f"vitdeploy_{predictor.target}", spec.inputs, spec.outputs, max_batch)
        # From how many images on a padded run of the large one takes less time than runs of one.
        self.threshold = max_batch + 1 if large is None else math.ceil(_times_as_long(large, max_batch, predictor))
        if self._large is not None and self.threshold > max_batch:  # larger runs bring nothing here
            self._large.close()
            self._large = None

    def together(self, waiting: int) -> int:
        """How many images run together when so many wait: no more than the engine runs at once."""
        if self._large is not None:
            return self.model.max_batch if waiting >= self.threshold else 1
        own = self.model.inputs[0].shape[0]
        return own if isinstance(own, int) else 1

    def run(self, tensor: Array) -> dict[str, Array]:
        """Every output [n, ...] for [n, ...] preprocessed images, n at most the model's `max_batch`."""
        if self._large is not None and len(tensor) >= self.threshold:
            return self._large.run(tensor)
        return self.predictor.run(tensor)

    def describe(self) -> str:
        """Which batches run, in words."""
        limit = self.model.max_batch
        if self._large is not None:
            return f"batches of {limit} from {self.threshold} waiting images on, which is faster here; else one by one"
        own = self.model.inputs[0].shape[0]
        if isinstance(own, int) and own > 1:
            return f"batches of {own}, the engine's own; fewer images are padded"
        return "one by one" if limit == 1 else f"one by one: batches of {limit} are not faster here"

    def close(self) -> None:
        self.predictor.close()
        if self._large is not None:
            self._large.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_engines(
    bundle: Path, target: str = AUTO, *, max_batch: int = 8, threads: int = 0, trust: Path | None = None
) -> Engines:
    """The engine of a bundle of images, loaded, tried and measured.

    Raises:
        MissingFileError, ManifestError, DigestError, SignatureError, TargetError, HostError: see `runtime.load`.
    """
    manifest = read_bundle(bundle)
    predictor = load(bundle, target, threads=threads, trust=trust)
    engine = next(engine for engine in manifest.engines if engine.artifact == predictor.target)
    try:
        _require_known(predictor.runner.inputs + predictor.runner.outputs, manifest.name)
        large: Predictor | None = None
        if not engine.dynamic_batch:
            max_batch = engine.batch
        else:
            if engine.batch != 1:
                predictor.close()
                predictor = _again(bundle, engine, 1, threads, trust, predictor.why)
            if max_batch > 1:
                large = _again(bundle, engine, max_batch, threads, trust, predictor.why)
        _load_decoders(predictor)
        return Engines(predictor, large, manifest.name, max_batch)
    except BaseException:
        predictor.close()
        raise


def _again(bundle: Path, engine: EngineSpec, batch: int, threads: int, trust: Path | None, why: str) -> Predictor:
    """The same engine at another batch."""
    predictor = load(bundle, engine.target, batch=batch, threads=threads, trust=trust)
    if predictor.target != engine.artifact:
        predictor.close()
        raise TargetError(
            f"{engine.artifact} does not run at batch {batch}", found=predictor.target, fix="--max-batch 1"
        )
    predictor.why = why
    return predictor


def _require_known(tensors: tuple[TensorSpec, ...], name: str) -> None:
    if unknown := [str(tensor) for tensor in tensors if tensor.dtype not in DATATYPES]:
        raise InputError(f"{name} cannot be served", found=", ".join(unknown), wanted=", ".join(DATATYPES))


def _load_decoders(predictor: Predictor) -> None:
    """Decode a file: Pillow is loaded by the first, which would take a client's time."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new("L", (8, 8)).save(stream, "PNG")
    predictor.prepare(stream.getvalue())


def _times_as_long(large: Predictor, batch: int, single: Predictor) -> float:
    """How many times as long a run of `batch` images takes as a run of one: the median of runs in turns, so that a
    machine that changes its speed meanwhile changes both."""
    together, alone = _blank(large, batch), _blank(single, 1)
    large.run(together)
    single.run(alone)
    ratios: list[float] = []
    started = time.perf_counter()
    while not ratios or time.perf_counter() - started < TRIAL_SECONDS:
        each = statistics.fmean(_seconds(single, alone) for _ in range(max(1, batch // 2)))
        ratios.append(_seconds(large, together) / each)
    return statistics.median(ratios)


def _blank(predictor: Predictor, batch: int) -> Array:
    tensor = predictor.runner.inputs[0]
    return np.zeros((batch, *(size if isinstance(size, int) else 1 for size in tensor.shape[1:])), tensor.dtype)


def _seconds(predictor: Predictor, images: Array) -> float:
    start = time.perf_counter()
    predictor.run(images)
    return time.perf_counter() - start
