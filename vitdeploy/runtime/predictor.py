"""The predictor of image tasks: image in, answer out."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from vitdeploy.errors import ClosedError, InputError, TensorError
from vitdeploy.runtime import geometry, topdown, values
from vitdeploy.runtime.inputs import Further, Inputs, further_inputs, read_further, stacked
from vitdeploy.runtime.preprocess import ACCEPTED, ImageSource, Pixels, decode, in_rgb, resize_and_crop, to_input
from vitdeploy.runtime.runner import AFTER_FORK, Array, Reloaded, Runner, require_array, type_name
from vitdeploy.runtime.tasks.registry import reader_of
from vitdeploy.runtime.tasks.task import OutputReading, Result
from vitdeploy.spec import ChannelOrder, Postprocess, PreprocessSpec, Task

if TYPE_CHECKING:
    from PIL import Image

    from vitdeploy.bundle.checked import CheckedFiles
    from vitdeploy.runtime.monitor import Canary, Monitoring

# Images per run of an engine with a dynamic batch.
DYNAMIC_CHUNK = 8


@dataclass(frozen=True)
class OpenedBundle:
    """The arguments of a predictor: the files of a bundle, the runner of the chosen engine and the reason for the
    choice; the preprocessing, and labels and tokenizer bytes, None without."""

    files: CheckedFiles
    runner: Runner
    why: str
    preprocess: PreprocessSpec
    labels: Sequence[str] | None
    tokenizer: bytes | None


class Predictor(Reloaded):
    """Predicts images with one engine of a bundle. Use as a context manager, or call `close`.

    All methods may be called from several threads: images are decoded and prepared in parallel, and the engine runs as
    many at once as it has streams, one by default. `why` is the reason for the choice of engine. With `reduced`, large
    JPEG files are decoded at reduced size (`runtime.geometry`). `monitor` reports whether images and answers are as
    usual, if `load` was called with `monitor`. A predictor of `load` can be pickled and copied, which loads the bundle
    again. `inputs` are the extra inputs of each image besides its pixels; most models have none.

    >>> predictor = load("out/digits")            # doctest: +SKIP
    >>> predictor.predict("seven.png").label      # doctest: +SKIP
    '7'
    """

    def __init__(
        self,
        runner: Runner,
        preprocess: PreprocessSpec,
        labels: Sequence[str] | None = None,
        task: Task = "classification",
        postprocess: Postprocess | None = None,
        why: str = "",
    ) -> None:
        self.runner = runner.load()
        self.preprocess = preprocess
        self.labels = labels
        self.task = task
        self.postprocess = postprocess
        self.why = why
        self._answer_of = reader_of(task)
        self.reduced = False
        self.monitor: Monitoring | None = None
        self.canary: Canary | None = None
        self._input = runner.inputs[0]
        self.inputs = further_inputs(task, runner.inputs)
        size = self._input.shape[0]
        self._batch = size if isinstance(size, int) else DYNAMIC_CHUNK
        self._stopwatch = values.Stopwatch()

    @classmethod
    def of_bundle(cls, opened: OpenedBundle) -> Predictor:
        """For `load`: the predictor of an opened bundle."""
        manifest = opened.files.manifest
        labels = opened.labels
        return cls(opened.runner, opened.preprocess, labels, manifest.task, manifest.postprocess, opened.why)

    @property
    def target(self) -> str:
        """The name of its engine in the bundle."""
        return self.runner.name

    @property
    def timings(self) -> values.Timings:
        """The time spent in each phase, over all images so far."""
        return self._stopwatch.read()

    def predict(self, image: ImageSource, top: int = 5, *, channels: ChannelOrder = "rgb") -> Result:
        """Return the answer for one image: a path, file bytes, a PIL image or a uint8 array [height, width, channels].

        An array is RGB; with `channels="bgr"` it is BGR, as from `cv2.imread` and `cv2.VideoCapture`.

        The answer's type depends on the task: Classification (with the `top` best classes), Labels, Decision,
        Regression, Features, Embedding, Heads, Detections, Panoptic, Segmentation, Instances, Depth, Foreground,
        Anomaly, Keypoints, Picture, ZeroShot, Text or Tensors.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        return self.predict_batch([image], top, channels=channels)[0]

    def predict_with(
        self, image: ImageSource, inputs: Inputs, top: int = 5, *, channels: ChannelOrder = "rgb"
    ) -> Result:
        """Return the answer for one image and its extra inputs. `inputs`: for each of `self.inputs`, by name, an array
        without a batch axis, or the path of a .npy or .png (`runtime.inputs.read_input`).

        Raises:
            InputError: `inputs` do not match the model's.
            ImageError, MissingFileError, TensorError: the image, or an input, cannot be used.
        """
        require_top(top)
        further = read_further(inputs, self.inputs)
        return self._answer_loaded([self._load(in_rgb(image, channels))], top, [further])[0]

    def predict_batch(
        self, images: Sequence[ImageSource], top: int = 5, *, channels: ChannelOrder = "rgb"
    ) -> list[Result]:
        """Return the answers for images. They run in batches of the engine's size, the last one padded. `channels`: as
        for `predict`.

        Raises:
            ImageError, MissingFileError, TensorError: an image cannot be used, or `images` is a single image.
        """
        require_several(images)
        require_top(top)
        return self._answer_loaded([self._load(in_rgb(image, channels)) for image in images], top)

    def predict_boxes(
        self, image: ImageSource, boxes: Sequence[topdown.Box], *, channels: ChannelOrder = "rgb"
    ) -> list[Result]:
        """Return the answer of a top-down model for each box of an image, such as the persons found by a detector.

        Args:
            boxes: (left, top, right, bottom) each, in pixels of the image, like `Detection.box`.
            channels: as for `predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
            InputError: an invalid box, or the model takes whole images.
        """
        decoded = self._decode(in_rgb(image, channels))
        pixels = [self._prepared(decoded, box) for box in boxes]
        if not pixels:
            return []
        outputs = self.outputs(pixels)
        return [
            self.answer({name: output[i] for name, output in outputs.items()}, decoded.size, box=box)
            for i, box in enumerate(boxes)
        ]

    def predict_tensor(
        self, tensor: Array, sizes: Sequence[tuple[int, int]] | None = None, top: int = 5
    ) -> list[Result]:
        """Return the answers for n preprocessed images.

        Args:
            tensor: [n, ...] with the dtype and layout of the engine's input, such as uint8 [n, height, width,
                channels], RGB.
            sizes: (width, height) of each original image, to which boxes and masks refer; default: the size of the
            crop.

        Raises:
            TensorError: wrong dtype or shape, or not one size per image.
        """
        require_array(tensor, self._input, "the tensor")
        require_top(top)
        if tensor.ndim == 0 or len(tensor) == 0:
            raise TensorError("the tensor has no images", found=str(list(tensor.shape)), expected=str(self._input))
        sizes = sizes if sizes is not None else [self.preprocess.crop[::-1]] * len(tensor)
        if len(sizes) != len(tensor):
            raise TensorError(
                "sizes must have one entry per image", found=f"{len(sizes)} sizes", expected=str(len(tensor))
            )
        return self._answers(self.run(tensor), sizes, top)

    @overload
    def stream(
        self,
        images: Iterable[ImageSource],
        top: int = 5,
        in_flight: int = 4,
        *,
        return_exceptions: Literal[False] = False,
        channels: ChannelOrder = "rgb",
    ) -> Iterator[Result]: ...

    @overload
    def stream(
        self,
        images: Iterable[ImageSource],
        top: int = 5,
        in_flight: int = 4,
        *,
        return_exceptions: Literal[True],
        channels: ChannelOrder = "rgb",
    ) -> Iterator[Result | InputError]: ...

    def stream(
        self,
        images: Iterable[ImageSource],
        top: int = 5,
        in_flight: int = 4,
        *,
        return_exceptions: bool = False,
        channels: ChannelOrder = "rgb",
    ) -> Iterator[Result | InputError]:
        """Yield the answers in the order of the images, which may be endless; the next images are decoded while the
        engine runs.

        At most `in_flight` batches are read ahead of the answers; reading stops while no answers are consumed. An
        answer is yielded only once `in_flight` batches have been read: use 1 for a camera whose frames must be answered
        before the next one arrives.

        An unusable image raises its error in its turn and ends the stream; with `return_exceptions` the error is
        yielded instead of the answer, and the stream continues. `channels`: as for `predict`.
        """
        require_several(images)
        require_top(top)
        if in_flight < 1:
            raise ValueError(f"in_flight {in_flight}: expected at least 1")
        answers: Callable[..., Sequence[Result | InputError]]
        answers = self._answers_or_errors if return_exceptions else self.predict_batch
        if channels != "rgb":
            answers = partial(answers, channels=channels)
        size = self._batch if isinstance(self._input.shape[0], int) else 1
        source, waiting = iter(images), deque[Future[Sequence[Result | InputError]]]()
        process = os.getpid()

        def first() -> Sequence[Result | InputError]:
            if os.getpid() != process:  # a forked child lacks the pool's threads
                raise ClosedError(
                    "the stream was started before this process was forked",
                    found="a stream of another process",
                    expected="a stream started in this process",
                    fix=f"call predictor.stream(...) again in the child; better: {AFTER_FORK}",
                )
            return waiting.popleft().result()

        with ThreadPoolExecutor(in_flight, thread_name_prefix="vitdeploy-stream") as pool:
            try:
                while chunk := list(islice(source, size)):
                    waiting.append(pool.submit(answers, chunk, top))
                    if len(waiting) == in_flight:
                        yield from first()
                while waiting:
                    yield from first()
            finally:
                pool.shutdown(cancel_futures=True)

    def answer(
        self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5, box: topdown.Box | None = None
    ) -> Result:
        """Return the answer for the outputs of one image; `size` is the original image's (width, height), `box` the
        part of it that a top-down model saw, None for all of it."""
        return self._answer_of(outputs, OutputReading(size, self.preprocess, self.postprocess, self.labels, top, box))

    def prepare(self, image: ImageSource, *, channels: ChannelOrder = "rgb") -> tuple[Array, tuple[int, int]]:
        """Return the engine's input [1, ...] for an image, for `run`, and the image's (width, height), for `answer`.
        `channels`: as for `predict`.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        pixels, size = self._load(in_rgb(image, channels))
        return self._input_of([pixels]), size

    def run(self, tensor: Array, further: Further | None = None) -> dict[str, Array]:
        """Return every output, [n, ...], for n >= 1 preprocessed images [n, ...], in batches of the engine's size.
        `further`: their extra inputs, [n, ...] by name.

        Raises:
            TensorError: wrong dtype or shape.
        """
        brought = further or {}
        if brought and any(len(array) != len(tensor) for array in brought.values()):
            counts = ", ".join(f"{name} {len(array)}" for name, array in brought.items())
            raise TensorError(
                "extra inputs must have one row per image", found=counts, expected=f"{len(tensor)} of each"
            )
        if len(tensor) != self._batch:
            parts = [slice(start, start + self._batch) for start in range(0, len(tensor), self._batch)]
            return self._run((tensor[part], {name: array[part] for name, array in brought.items()}) for part in parts)
        outputs = self._infer({self._input.name: tensor, **brought} if brought else {self._input.name: tensor})
        self._stopwatch.count(self._batch)
        return outputs

    def outputs(self, pixels: Sequence[Pixels], further: Sequence[Further] = ()) -> dict[str, Array]:
        """Return every output, [n, ...], for n preprocessed images, each uint8 [height, width, channels]. `further`:
        the extra inputs of each, by name, without a batch axis."""
        if further and len(further) != len(pixels):  # a single one would be used for all images
            raise InputError(
                "extra inputs must be given for each image",
                found=f"{len(pixels)} images, inputs for {len(further)}",
                expected=", ".join(map(str, self.inputs)),
                fix="use predict_with(image, inputs)",
            )
        size = self._batch
        parts = (slice(start, start + size) for start in range(0, len(pixels), size))
        return self._run((self._input_of(pixels[part]), stacked(further[part])) for part in parts)

    def _load(self, image: ImageSource) -> tuple[Pixels, tuple[int, int]]:
        """The preprocessed pixels, and (width, height) of the image."""
        if self.reduced and (found := self._load_reduced(image)) is not None:
            return found
        decoded = self._decode(image)
        return self._prepared(decoded), decoded.size

    def _load_reduced(self, image: ImageSource) -> tuple[Pixels, tuple[int, int]] | None:
        start = perf_counter_ns()
        decoded = geometry.decode_reduced(image, self.preprocess)
        if decoded is None:
            return None
        self._stopwatch.add("decode", start)
        start = perf_counter_ns()
        pixels = geometry.resize_reduced(decoded, self.preprocess)
        self._stopwatch.add("preprocess", start)
        return pixels, decoded.size

    def _decode(self, image: ImageSource) -> Image.Image:
        start = perf_counter_ns()
        decoded = decode(image, self.preprocess.channels)
        self._stopwatch.add("decode", start)
        return decoded

    def _prepared(self, image: Image.Image, box: topdown.Box | None = None) -> Pixels:
        start = perf_counter_ns()
        pixels = resize_and_crop(image, self.preprocess, box)
        self._stopwatch.add("preprocess", start)
        return pixels

    def _answer_loaded(
        self, loaded: Sequence[tuple[Pixels, tuple[int, int]]], top: int, further: Sequence[Further] = ()
    ) -> list[Result]:
        if not loaded:
            return []
        outputs = self.outputs([pixels for pixels, _ in loaded], further)
        return self._answers(outputs, [size for _, size in loaded], top)

    def _answers_or_errors(
        self, images: Sequence[ImageSource], top: int, channels: ChannelOrder = "rgb"
    ) -> list[Result | InputError]:
        """As `predict_batch`, but with the error of an unusable image instead of its answer."""
        loaded: list[tuple[Pixels, tuple[int, int]] | InputError] = []
        for image in images:
            try:
                loaded.append(self._load(in_rgb(image, channels)))
            except InputError as error:
                loaded.append(error)
        answers = iter(self._answer_loaded([each for each in loaded if not isinstance(each, InputError)], top))
        return [each if isinstance(each, InputError) else next(answers) for each in loaded]

    def _input_of(self, pixels: Sequence[Pixels]) -> Array:
        start = perf_counter_ns()
        tensor = to_input(pixels, self.preprocess, self._input)
        self._stopwatch.add("preprocess", start)
        return tensor

    def _run(self, chunks: Iterable[tuple[Array, Further]]) -> dict[str, Array]:
        """Every output of all chunks of images with their extra inputs; no chunk is larger than the engine's batch."""
        feeds = ({self._input.name: images, **further} for images, further in chunks)
        outputs = values.run_batches(feeds, self._batch if isinstance(self._input.shape[0], int) else None, self._infer)
        self._stopwatch.count(len(next(iter(outputs.values()))))
        return outputs

    def _infer(self, feeds: Further) -> dict[str, Array]:
        if self.inputs and len(feeds) == 1:
            read_further(None, self.inputs)  # raises an error that names the missing inputs
        start = perf_counter_ns()
        outputs = self.runner.infer(feeds)
        self._ran(feeds[self._input.name], outputs, start)
        return outputs

    def _ran(self, feed: Array, outputs: Mapping[str, Array], start: int) -> None:
        """Record a finished run of the engine on images [n, ...], started at `start`."""
        elapsed = self._stopwatch.add("infer", start)
        if self.monitor is not None:
            self.monitor.saw(feed, outputs, elapsed, self.canary)

    def _answers(self, outputs: Mapping[str, Array], sizes: Sequence[tuple[int, int]], top: int) -> list[Result]:
        start = perf_counter_ns()
        answers = [
            self.answer({name: output[i] for name, output in outputs.items()}, size, top)
            for i, size in enumerate(sizes)
        ]
        self._stopwatch.add("postprocess", start)
        return answers

    def close(self) -> None:
        self.runner.close()


def require_several(images: object) -> None:
    """Raise TensorError for a single image: the rows of its array would be treated as images."""
    array = isinstance(images, np.ndarray) and images.ndim != 4
    if array or isinstance(images, str | bytes | bytearray | memoryview | Path) or not isinstance(images, Iterable):
        raise TensorError(
            "expected several images, not one",
            found=type_name(images),
            expected=f"a list, or uint8 [n, height, width, channels]; each image is {ACCEPTED}",
            fix="for one image, use predict(image)",
        )


def require_top(top: object) -> None:
    if not isinstance(top, int) or top < 1:
        raise InputError("top must be a positive integer", found=repr(top), expected="an integer >= 1")
