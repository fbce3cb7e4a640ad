"""Rates and times of parts of an engine: matrix products, layers, stages of a prediction, memory copies."""

import io
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitdeploy.benchmark import context, machine
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.inputs import random_inputs, stacked
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import Pixels, decode, load_image, to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, PreprocessSpec, postprocess_of
from vitdeploy.spec import decode as decode_spec

# --- The peak rate of a runtime's matrix products on this machine: the reference for a model's own rate ---------------
# It times a few layers in sequence, each a product of [rows, width] and a constant [width, width], so that weights are
# packed and outputs quantized as in a network. The fastest of a few shapes counts: a rate that this machine reaches in
# this runtime, not one from a data sheet.


SEED = 0
LAYERS = 3
# Rows and width. 192 and 384 rows are whole tiles of every kernel; the weights of a layer fit a core's cache.
SHAPES = ((192, 768), (384, 768), (512, 1024))
LEAST_RUNS = 3


def best_rate(target: str, precision: str, threads: int, seconds: float) -> context.RateFacts:
    """The rate of the fastest of `SHAPES`, by its median query, within about `seconds` and the time to load.

    Raises:
        CapabilityError: no probe for this target, or its kernels do not support this precision here.
        MissingPackageError, EngineError: errors of the runtime.
    """
    backend = context.BENCH.find(target)
    if backend is None:
        raise CapabilityError(f"no rate probe for {target}", expected="a target on a CPU")
    found = []
    for rows, width in SHAPES:
        # Sequentially: the threads of an idle session spin, and take cores from the next one.
        query, kernel = backend.products(rows, width, precision, threads)
        flops = 2 * LAYERS * rows * width * width / _median_seconds(query, seconds / len(SHAPES))
        found.append(context.RateFacts(target, precision, flops, rows, width, kernel))
        del query
    return max(found, key=lambda rate: rate.flops_per_second)


def _median_seconds(query: context.Query, seconds: float) -> float:
    query()
    times: list[float] = []
    start = end = time.perf_counter()
    while end - start < seconds or len(times) < LEAST_RUNS:
        begin = time.perf_counter()
        query()
        end = time.perf_counter()
        times.append(end - begin)
    return statistics.median(times)


def seeded_weights(width: int, precision: str) -> list[Array]:
    """Seeded random weights, scaled so that activations neither grow nor vanish from layer to layer."""
    generator = np.random.default_rng(SEED)
    if precision == "int8":
        return [generator.integers(-127, 128, (width, width), dtype=np.int8) for _ in range(LAYERS)]
    return [generator.standard_normal((width, width), dtype=np.float32) / np.float32(width**0.5) for _ in range(LAYERS)]


def weight_scale(width: int) -> float:
    """The scale of INT8 weights that are uniform in -127..127 (standard deviation 73)."""
    return float(1 / (73 * width**0.5))


def check_precision(ran: list[str], precision: str, kernels: list[str]) -> None:
    if ran != [precision] * LAYERS:
        raise CapabilityError(
            f"the rate probe did not run in {precision}",
            found=", ".join(kernels),
            expected=f"{LAYERS} products in {precision}",
        )


# --- The layers of an artifact, timed by the runtime's own profiler ---------------------------------------------------


LEAST_LAYER_RUNS, MOST_RUNS = 5, 50
# Suffixes that runtimes append to the names of nodes that they fuse or whose layout they change.
ADDED = re.compile(r"(/\w+Fusion|_nchwc|/WithoutBiases)+$")


def profile(folder: Path, engine: EngineSpec, name: str, batch: int, threads: int, seconds: float) -> context.Profile:
    """Profile the layers of an engine whose files lie under `folder`, in a few dozen runs within about `seconds`.

    Raises:
        CapabilityError: the engine has no profiler here, or belongs to an encoder-decoder.
        VitdeployError: the runtime's own errors.
    """
    if engine.parts:
        raise CapabilityError("no layer profile for an encoder-decoder: its graphs run many times per query")
    backend = context.BENCH.find(engine.target)
    if backend is None:
        raise CapabilityError(f"no layer profile for {engine.target}", expected="a target on a CPU")
    return backend.profile(context.ProfileRequest(folder / engine.files[0], engine, name, batch, threads, seconds))


def repeat(query: Callable[[], object], seconds: float, after: Callable[[], object] = lambda: None) -> list[float]:
    """Run `query` for about `seconds`, at least LEAST_LAYER_RUNS and at most MOST_RUNS times; returns the milliseconds
    of each run, without those of `after`."""
    begun, found = time.perf_counter(), list[float]()
    while len(found) < LEAST_LAYER_RUNS or (len(found) < MOST_RUNS and time.perf_counter() - begun < seconds):
        start = time.perf_counter()
        query()
        found.append((time.perf_counter() - start) * 1e3)
        after()
    return found


def profiled_layer(
    name: str, kind: str, precision: str, milliseconds: float, product: bool, fuses: Sequence[str] = ()
) -> context.Layer:
    parts = tuple(dict.fromkeys(_short(fuse) for fuse in fuses))[: context.MOST_FUSED]
    return context.Layer(
        _short(name), kind[: context.LONGEST_NAME], precision, milliseconds, product, parts if len(parts) > 1 else ()
    )


def _short(name: str) -> str:
    return ADDED.sub("", name)[: context.LONGEST_NAME]


# --- The stages between an image and its answer, one by one and as a whole --------------------------------------------


# A typical size of web photos and camera frames.
WIDTH, HEIGHT = 640, 480
STAGES = ("decode", "preprocess", "infer", "postprocess", "end_to_end")

T = TypeVar("T")


class ImageStages:
    """A photo of 640x480 pixels through a loaded runner.

    `request` has "task", "preprocess", "postprocess" and "labels", as in a manifest.
    """

    def __init__(self, runner: Runner, request: Mapping[str, Any]) -> None:
        self._spec = decode_spec(PreprocessSpec, request["preprocess"])
        post = None
        kind = postprocess_of(request["task"])
        if kind is not None and request["postprocess"]:
            post = decode_spec(kind, request["postprocess"])
        self._predictor = Predictor(runner, self._spec, request["labels"], request["task"], post)
        self._file = example_photo(self._spec.channels)
        self._image: Pixels = np.asarray(decode(self._file, self._spec.channels))
        drawn = random_inputs(self._predictor.inputs, 1)
        self._brought = {name: np.asarray(array[0]) for name, array in drawn.items()}

    def block(self, seconds: float, least: int) -> dict[str, list[int]]:
        """The times of each stage in ns, from at least `least` images in at least `seconds`.

        decode: JPEG to pixels. preprocess: from the uint8 image [480, 640, channels] to the input tensor. infer: host
        to host, with its parts if the runner distinguishes them (`Runner.stages`). postprocess: outputs to the
        result. end_to_end: `Predictor.predict` on the uint8 image, in one call.
        """
        found: dict[str, list[int]] = {stage: [] for stage in STAGES}
        start = time.perf_counter_ns()
        while time.perf_counter_ns() - start < seconds * 1e9 or len(found["infer"]) < least:
            self._once(found)
        return found

    def _once(self, found: dict[str, list[int]]) -> None:
        runner, spec = self._predictor.runner, self._spec
        tensor = runner.inputs[0]
        _timed(found["decode"], lambda: decode(self._file, spec.channels))

        def prepare() -> tuple[dict[str, Any], tuple[int, int]]:
            pixels, size = load_image(self._image, spec)
            count = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
            return {tensor.name: to_input([pixels] * count, spec, tensor), **stacked([self._brought] * count)}, size

        feed, size = _timed(found["preprocess"], prepare)
        outputs = _timed(found["infer"], lambda: runner.infer(feed))
        for stage, milliseconds in (runner.stages(feed) or {}).items():
            found.setdefault(stage, []).append(round(milliseconds * 1e6))
        first = {name: output[0] for name, output in outputs.items()}
        _timed(found["postprocess"], lambda: self._predictor.answer(first, size))
        predict, brought = self._predictor.predict, self._brought
        if brought:
            _timed(found["end_to_end"], lambda: self._predictor.predict_with(self._image, brought))
        else:
            _timed(found["end_to_end"], lambda: predict(self._image))


def _timed(times: list[int], work: Callable[[], T]) -> T:
    start = time.perf_counter_ns()
    result = work()
    times.append(time.perf_counter_ns() - start)
    return result


def example_photo(channels: int) -> bytes:
    """A JPEG as smooth as a photo: noise of 20x15 pixels, enlarged, with a little fine noise added."""
    from PIL import Image

    generator = np.random.default_rng(SEED)
    coarse = generator.integers(0, 256, (15, 20, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    pixels = np.clip(smooth + generator.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert({1: "L", 3: "RGB"}[channels]).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


# --- The rate of memory copies, with as many threads as a benchmark run uses ------------------------------------------
# It copies between two arrays that are much larger than the last-level cache; each thread copies a part. It counts
# bytes read and written, as STREAM does (McCalpin 1995), without the cache's reads before writes.


# An array is this many times the last-level cache; if that is unknown, it has LEAST_BYTES.
TIMES_CACHE, LEAST_BYTES = 4, 64 << 20
# The share of free memory for both arrays.
MEMORY_SHARE = 0.5
LEAST_COPIES = 5
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def copy_rate(threads: int, seconds: float, root: Path = machine.ROOT) -> context.Memory:
    """Bytes a second of the median copy, within about `seconds`.

    Raises:
        CapabilityError: too little memory is free for arrays beyond the cache.
    """
    cache = last_level_cache(root)
    size = max(LEAST_BYTES, TIMES_CACHE * (cache or 0))
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", machine.read_text(root / "proc/meminfo") or "", re.MULTILINE)
    free = int(match[1]) * 1024 if match else None
    if free is not None and 2 * size > MEMORY_SHARE * free:
        raise CapabilityError(
            "too little free memory to measure the copy rate",
            found=f"{free:,} bytes",
            expected=f"{round(2 * size / MEMORY_SHARE):,} bytes",
        )
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    bounds = [size * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in pairwise(bounds)]
    times: list[float] = []
    with ThreadPoolExecutor(threads) as pool:  # numpy copies without the interpreter's lock
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(times) <= LEAST_COPIES:
            begin = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
            times.append(time.perf_counter() - begin)
    return context.Memory(2 * size / statistics.median(times[1:]), size, cache, threads)


def last_level_cache(root: Path = machine.ROOT) -> int | None:
    """The bytes of the largest cache of the first CPU; None if the kernel does not report it.

    Source: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu (size in kB, as "36608K").
    """
    texts = (machine.read_text(path) or "" for path in root.glob("sys/devices/system/cpu/cpu0/cache/index*/size"))
    found = [re.fullmatch(r"(\d+)([KMG]?)", text.strip()) for text in texts]
    return max((int(match[1]) * UNITS[match[2]] for match in found if match), default=None)
