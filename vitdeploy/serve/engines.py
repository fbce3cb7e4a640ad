"""Load a bundle's engine for single images, batches and parallel batches, and keep the variants that are faster."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from vitdeploy.bundle.checked import CheckedFiles, open_checked, retry_if_replaced
from vitdeploy.errors import InputError, TargetError
from vitdeploy.runtime import Predictor, choice, golden, load, masks, predictors
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import default_threads, usable_cores
from vitdeploy.runtime.load import images_of
from vitdeploy.runtime.monitor import Monitor, canary_of, watch
from vitdeploy.runtime.runner import Array
from vitdeploy.serve import batcher, protocol
from vitdeploy.spec import EngineSpec, TensorSpec

# Seconds that each variant is measured at start, alternately.
TRIAL_SECONDS = 0.6
# With more streams than this, Python is the bottleneck.
MOST_STREAMS = 8
# How much slower streams may be in this idle measurement: in operation, reading and writing requests takes CPU time,
# for which all threads of a single run wait, but streams do not.
UNDISTURBED = 1.05


class Engines:
    """The variants of the engine that a server runs: `predictor` for single images; `large` for batches of `max_batch`;
    `streams` for several batches in parallel. `large` and `streams` are kept only if measured to be faster at start.

    `predictor` and `large` use all threads; streams share them without waiting for each other. A partial batch is
    padded and costs as much as a full one; from `threshold` images on it is faster than single images. Use as a context
    manager, or call `close`.

    `predictor` decodes, prepares and answers.
    """

    def __init__(
        self,
        predictor: Predictor,
        name: str,
        max_batch: int,
        large: Predictor | None = None,
        streams: Predictor | None = None,
    ) -> None:
        self.predictor = predictor
        spec = predictor.runner
        self.model = protocol.ServedModel(name, f"vitdeploy_{predictor.target}", spec.inputs, spec.outputs, max_batch)
        # An image without a prompt has an embedding, but no answer.
        self._alone = predictor.encode if isinstance(predictor, predictors.PromptedPredictor) else predictor.run
        times = _times_as_long(predictor, large, streams, max_batch)
        self._large = _kept(large, "large" in times and times["large"] <= max_batch)
        self._streams = _kept(
            streams, self._large is not None and times.get("streams", math.inf) < UNDISTURBED * times["large"]
        )
        # The least number of images for which a padded batch is faster than single runs.
        self.threshold = math.ceil(times["large"]) if self._large is not None else max_batch + 1

    @property
    def workers(self) -> int:
        """The number of runs that may be active at once."""
        return 1 if self._streams is None else self._streams.runner.at_once

    def plan(self, waiting: int, running: int) -> batcher.ExecutionPlan | None:
        """Return how the next images run, given the numbers of waiting images and of active runs."""
        limit = self.model.max_batch
        # The first stream starts when there is work for all streams; further ones need a full batch.
        if self._streams is not None and waiting >= limit * (1 if running else self.workers):
            return batcher.ExecutionPlan(self._streams.run, limit, alone=False)
        if running:
            return None
        if self._large is not None and waiting >= self.threshold:
            return batcher.ExecutionPlan(self._large.run, limit)
        own = self.model.inputs[0].shape[0]
        return batcher.ExecutionPlan(self._alone, own if isinstance(own, int) else 1)

    def watch(self, files: CheckedFiles, options: Monitor) -> None:
        """Monitor all variants from now on, together; each runs its own golden inputs."""
        engine = _spec(files, self.predictor)
        monitor, self.predictor.canary = watch(files, engine, self.predictor.runner, options)
        self.predictor.monitor = monitor
        for other in (self._large, self._streams):
            if other is not None:
                other.monitor, other.canary = monitor, canary_of(files, engine, other.runner)

    def describe(self) -> str:
        """Return a description of the batches that run."""
        limit = self.model.max_batch
        if isinstance(self.predictor, predictors.PromptedPredictor):
            return "each image is embedded once, without batching; prompts run only the decoder"
        if self._large is not None:
            more = f" ({self.workers} in parallel from {self.workers * limit})" if self.workers > 1 else ""
            return f"batches of {limit} from {self.threshold} waiting images{more}, otherwise one by one; faster here"
        own = self.model.inputs[0].shape[0]
        if isinstance(own, int) and own > 1:
            return f"batches of {own} (fixed in the engine); smaller batches are padded"
        return "one by one" if limit == 1 else f"one by one: batches of {limit} are not faster here"

    def close(self) -> None:
        for each in (self.predictor, self._large, self._streams):
            if each is not None:
                each.close()

    def __enter__(self) -> Engines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_engines(
    bundle: Path,
    target: str = choice.AUTO,
    *,
    max_batch: int = 8,
    threads: int = 0,
    trust: Path | None = None,
    expect_digest: str | None = None,
    monitor: Monitor | None = None,
) -> Engines:
    """Load, check and measure the engine of an image bundle, and monitor it if `monitor` is given. `expect_digest`: see
    `runtime.load`. A bundle that is replaced during loading is read again, as there.

    Raises:
        MissingFileError, ManifestError, DigestError, SignatureError, TargetError, HostError: see `runtime.load`.
    """

    def read() -> Engines:
        files = open_checked(bundle, expect_digest=expect_digest)
        # Everything is loaded with this manifest, which `trust` also verifies.
        how: dict[str, Any] = {"threads": threads, "trust": trust, "expect_digest": files.digest}
        with contextlib.ExitStack() as opened:
            engines = _engines(files, target, max_batch, how, opened)
            if monitor is not None:
                engines.watch(files, monitor)
            opened.pop_all()
        return engines

    return retry_if_replaced(bundle, read)


def _engines(
    files: CheckedFiles, target: str, max_batch: int, how: Mapping[str, Any], opened: contextlib.ExitStack
) -> Engines:
    """Load the variants and enter them into `opened`. `how`: further arguments of `load`."""
    bundle, manifest = files.folder, files.manifest
    predictor = opened.enter_context(load(bundle, target, **how))
    engine = _spec(files, predictor)
    _require_known(predictor.runner.inputs + predictor.runner.outputs, manifest.name)
    large: Predictor | None = None
    streams: Predictor | None = None
    if not engine.dynamic_batch:
        max_batch = engine.batch
    else:
        if engine.batch != 1:
            predictor.close()
            predictor = opened.enter_context(_again(bundle, engine, 1, predictor.why, how))
        if max_batch > 1 and not isinstance(predictor, predictors.PromptedPredictor):
            large = opened.enter_context(_again(bundle, engine, max_batch, predictor.why, how))
            streams = _in_streams(files, engine, max_batch, how["threads"])
            if streams is not None:
                opened.enter_context(streams)
    _load_decoders(predictor)
    return Engines(predictor, manifest.name, max_batch, large, streams)


def _spec(files: CheckedFiles, predictor: Predictor) -> EngineSpec:
    return next(engine for engine in files.manifest.engines if engine.artifact == predictor.target)


def _again(bundle: Path, engine: EngineSpec, batch: int, why: str, how: Mapping[str, Any]) -> Predictor:
    """Load the same engine at another batch size; `how`: further arguments of `load`."""
    predictor = load(bundle, engine.target, batch=batch, **how)
    if predictor.target != engine.artifact:
        predictor.close()
        raise TargetError(f"{engine.artifact} cannot run at batch {batch}", found=predictor.target, fix="--max-batch 1")
    predictor.why = why
    return predictor


def _require_known(tensors: tuple[TensorSpec, ...], name: str) -> None:
    if unknown := [str(tensor) for tensor in tensors if tensor.dtype not in protocol.DATATYPES]:
        raise InputError(f"{name} cannot be served", found=", ".join(unknown), expected=", ".join(protocol.DATATYPES))


def _load_decoders(predictor: Predictor) -> None:
    """Decode a file, so that Pillow's plugins are loaded before the first request."""
    from PIL import Image

    predictor.prepare(masks.png_bytes(Image.new("L", (8, 8))))


def _in_streams(files: CheckedFiles, engine: EngineSpec, batch: int, threads: int) -> Predictor | None:
    """Load the same engine with one stream per thread; None if streams are not supported, or with one thread."""
    count = min(threads or default_threads() or usable_cores(), MOST_STREAMS)
    runner = make_runner(files.folder, engine, batch=batch, threads=threads, streams=count)
    if runner.at_once == 1:
        return None
    manifest = files.manifest
    files.require(engine.files)
    with contextlib.ExitStack() as stack:
        stack.enter_context(runner)
        files.require_unchanged(engine.files)
        golden.require_golden_answers(files.folder, manifest, engine, runner, threads=threads, files=files)
        stack.pop_all()
    return Predictor(runner, images_of(manifest))


def _kept(predictor: Predictor | None, expected: bool) -> Predictor | None:
    """Return the predictor if it is needed; otherwise close it."""
    if predictor is not None and not expected:
        predictor.close()
        return None
    return predictor


def _times_as_long(
    alone: Predictor, large: Predictor | None, streams: Predictor | None, batch: int
) -> dict[str, float]:
    """Return the time of a batch relative to a single image, for "large" and "streams" if loaded: the median of
    alternating runs, so that a change of the machine's speed affects all of them. For streams, the time per batch of
    parallel runs."""
    if large is None:
        return {}
    together, one = _blank(large, batch), _blank(alone, 1)
    with ThreadPoolExecutor(MOST_STREAMS) as pool:
        plans: dict[str, Callable[[], float]] = {"large": lambda: _seconds(large, together)}
        if streams is not None:
            plans["streams"] = lambda: _seconds_side_by_side(streams, together, pool)
        for predictor, images in ((alone, one), (large, together)):
            predictor.run(images, _brought(predictor, images))
        ratios: dict[str, list[float]] = {name: [] for name in plans}
        started = time.perf_counter()
        while not ratios["large"] or time.perf_counter() - started < TRIAL_SECONDS * len(plans):
            each = statistics.fmean(_seconds(alone, one) for _ in range(max(1, batch // 2)))
            for name, seconds in plans.items():
                ratios[name].append(seconds() / each)
    return {name: statistics.median(values) for name, values in ratios.items()}


def _blank(predictor: Predictor, batch: int) -> Array:
    return _zeros(predictor.runner.inputs[0], batch)


def _zeros(tensor: TensorSpec, batch: int) -> Array:
    return np.zeros((batch, *(size if isinstance(size, int) else 1 for size in tensor.shape[1:])), tensor.dtype)


def _brought(predictor: Predictor, images: Array) -> dict[str, Array]:
    """Return the further inputs of images, for a model that takes them."""
    return {tensor.name: _zeros(tensor, len(images)) for tensor in predictor.inputs}


def _seconds(predictor: Predictor, images: Array) -> float:
    further, start = _brought(predictor, images), time.perf_counter()
    predictor.run(images, further)
    return time.perf_counter() - start


def _seconds_side_by_side(predictor: Predictor, images: Array, pool: ThreadPoolExecutor) -> float:
    """Return the seconds per run, with two runs in every stream."""
    runs = 2 * predictor.runner.at_once
    start = time.perf_counter()
    further = _brought(predictor, images)
    list(pool.map(lambda _: predictor.run(images, further), range(runs)))
    return (time.perf_counter() - start) / runs
