"""Where the time between an image and its answer goes: the Predictor's path, stage by stage, and as a whole."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import Pixels, decode, load_image, to_input
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import POSTPROCESS, PreprocessSpec
from vitdeploy.spec import decode as decode_spec

# A typical size of web photos and camera frames.
WIDTH, HEIGHT = 640, 480
SEED = 0
STAGES = ("decode", "preprocess", "infer", "postprocess", "end_to_end")

T = TypeVar("T")


class ImageStages:
    """A photo of 640x480 pixels through a loaded runner.

    `request` has "task", "preprocess", "postprocess" and "labels" as a manifest has them.
    """

    def __init__(self, runner: Runner, request: Mapping[str, Any]) -> None:
        self._spec = decode_spec(PreprocessSpec, request["preprocess"])
        post = None
        if request["postprocess"]:
            post = decode_spec(POSTPROCESS[request["task"]], request["postprocess"])
        self._predictor = Predictor(runner, self._spec, request["labels"], request["task"], post)
        self._file = example_photo(self._spec.channels)
        self._image: Pixels = np.asarray(decode(self._file, self._spec.channels))

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
            return {tensor.name: to_input([pixels] * count, spec, tensor)}, size

        feed, size = _timed(found["preprocess"], prepare)
        outputs = _timed(found["infer"], lambda: runner.infer(feed))
        for stage, milliseconds in (runner.stages(feed) or {}).items():
            found.setdefault(stage, []).append(round(milliseconds * 1e6))
        first = {name: output[0] for name, output in outputs.items()}
        _timed(found["postprocess"], lambda: self._predictor.answer(first, size))
        _timed(found["end_to_end"], lambda: self._predictor.predict(self._image))


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
