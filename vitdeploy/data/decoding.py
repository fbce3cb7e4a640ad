"""Decodes images, in worker processes if that is worthwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.uris import load_held
from vitdeploy.data.folder import Sample
from vitdeploy.errors import DataError, ImageError, StorageError, WorkerError, error_with_code
from vitdeploy.publish import storage_errors
from vitdeploy.runtime.host import usable_cores
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec, encode

# --- Preprocessed images, one batch in memory at once; unreadable ones are an error or counted ------------------------


@dataclass
class Skipped:
    """The unreadable files that a run skips."""

    paths: list[str]


def skippable(error: ImageError) -> ImageError:
    """Add to an unreadable image's error that --skip-bad skips such files."""
    error.fix = "; ".join(filter(None, (error.fix, "--skip-bad skips and counts such files")))
    return error


def batches(
    samples: Sequence[Sample], spec: PreprocessSpec, size: int, skipped: Skipped | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield uint8 [n, height, width, channels] with n = `size`, fewer in the last, decoded in this process; errors as
    `decode_images`."""
    held: list[Pixels] = []
    for _, pixels, _ in decode_images(samples, spec, skipped, processes=0):
        held.append(pixels)
        if len(held) == size:
            yield np.stack(held)
            held = []
    if held:
        yield np.stack(held)


# --- Decodes image files to pixels, in order: in this process if they are few, otherwise in child processes -----------


Size = tuple[int, int]
Loaded = tuple[Pixels, Size]

WORKER = "vitdeploy.data.decode_worker"
# Images decoded in this process to estimate the time, and the estimate in seconds above which worker processes are
# started.
FIRST_IMAGES, WORTH_SECONDS = 16, 2.0
MAX_WORKERS = 8
# Number of paths sent ahead, whose answers wait in a pipe of this size; no more are ever in memory.
AHEAD, PIPE_BYTES = 4, 1 << 20
EXIT_SECONDS = 3.0


def decode_images(
    samples: Sequence[Sample], spec: PreprocessSpec, skipped: Skipped | None = None, processes: int | None = None
) -> Iterator[tuple[Sample, Pixels, Size]]:
    """Yield each sample with its pixels, uint8 [height, width, channels], and (width, height) of the upright original.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        ImageError: an unreadable image and `skipped` is None.
        DataError: no image could be read.
        WorkerError: no process can be started.
    """
    count = 0
    loaded = decode_each(samples, spec, processes)
    with contextlib.closing(loaded):
        for sample, found in zip(samples, loaded, strict=True):
            if isinstance(found, ImageError):
                if skipped is None:
                    raise skippable(found)
                skipped.paths.append(sample.shown)
                continue
            count += 1
            yield sample, *found
    if not count:
        raise DataError("no image could be read", found=f"{len(samples)} unreadable files")


def decode_each(
    samples: Sequence[Sample], spec: PreprocessSpec, processes: int | None = None
) -> Generator[Loaded | ImageError, None, None]:
    """Yield the pixels and size of each sample, or its error. Close the generator to end the processes.

    Args:
        processes: the maximum number; None: one per core if there are several. They are started if the first images
            show that the rest takes long enough.

    Raises:
        WorkerError: no process can be started. Errors of `load_sample` that do not concern one image propagate.
    """
    seconds, cores = 0.0, usable_cores()
    workers = (min(cores, MAX_WORKERS) if cores > 1 else 0) if processes is None else processes
    for index, sample in enumerate(samples):
        left = len(samples) - index
        if workers and index >= FIRST_IMAGES and seconds / index * left > WORTH_SECONDS:
            yield from _by_processes(samples[index:], spec, min(workers, left))
            return
        begun = time.perf_counter()
        try:
            found: Loaded | ImageError = load_sample(sample, spec)
        except ImageError as error:
            found = error
        seconds += time.perf_counter() - begun
        yield found


def load_sample(sample: Sample, spec: PreprocessSpec) -> Loaded:
    """Return the pixels of one sample and the size of its original; errors as `load_image` and `HeldImage.read`."""
    return load_held(sample.path, sample.held, spec, sample.box, sample.shown)


def _by_processes(samples: Sequence[Sample], spec: PreprocessSpec, count: int) -> Iterator[Loaded | ImageError]:
    """Yield the results from several processes. Sample i goes to process i modulo `count`; each answers in order, so
    the next one to read is always known."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_Worker(spec)) for _ in range(count)]
        for index, sample in enumerate(samples[: AHEAD * count]):
            workers[index % count].ask(sample)
        for index in range(len(samples)):
            yield workers[index % count].answer()
            following = index + AHEAD * count
            if following < len(samples):
                workers[index % count].ask(samples[following])


class _Worker:
    """One worker process, restarted if a file crashes it. It runs in its own session: Ctrl-C goes to its parent, which
    then ends it."""

    def __init__(self, spec: PreprocessSpec) -> None:
        self._spec = spec
        self._waiting: deque[Sample] = deque()
        self._start()

    def _start(self) -> None:
        own_group: dict[str, Any] = {"start_new_session": True} if os.name == "posix" else {"creationflags": 0x200}
        try:
            self._process = subprocess.Popen(
                module_argv(WORKER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pipesize=PIPE_BYTES if sys.platform == "linux" else -1,
                **own_group,
            )
        except OSError as error:
            raise WorkerError("cannot start an image decoder process", found=str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        self._send(encode(self._spec))
        if not self._out.readline():
            raise WorkerError(
                "an image decoder process exited before its first image",
                found=f"exit status {self._process.wait()}",
                fix="free memory: too little memory is the usual cause",
            )

    def _send(self, document: Any) -> None:
        with contextlib.suppress(OSError):  # a dead process is detected when its answer is missing
            self._in.write(json.dumps(document).encode() + b"\n")
            self._in.flush()

    def ask(self, sample: Sample) -> None:
        self._waiting.append(sample)
        self._send(_question(sample))

    def answer(self) -> Loaded | ImageError:
        """Return the result of the oldest unanswered sample; errors that do not concern one image are raised."""
        sample = self._waiting.popleft()
        line = self._out.readline()
        head = json.loads(line) if line.endswith(b"\n") else {}
        if "error" in head:
            facts = head["error"]
            texts = {key: facts[key] for key in ("found", "expected", "fix")}
            error = error_with_code(facts["code"], facts["message"], **texts)
            if not isinstance(error, ImageError):
                raise error
            return error
        height, width = self._spec.crop
        data = self._out.read(height * width * self._spec.channels) if head else b""
        if len(data) < height * width * self._spec.channels:
            return self._ended_by(sample)
        pixels = np.frombuffer(data, np.uint8).reshape(height, width, self._spec.channels)
        return pixels, (head["size"][0], head["size"][1])

    def _ended_by(self, sample: Sample) -> ImageError:
        """Return the error for the image that crashed the process, and send the images after it to a new process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._end()
        status = self._process.returncode
        self._start()
        for each in self._waiting:
            self._send(_question(each))
        return ImageError(
            f"{sample.shown} crashed the image decoder",
            found=f"exit status {status}",
            expected="a decodable image",
            fix="replace it, or remove it from the folder",
        )

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._in.close()
        self._process.kill()
        self._out.close()
        self._process.wait()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()


def _question(sample: Sample) -> list[Any]:
    """Return the request for a sample."""
    held = None if sample.held is None else sample.held.written()
    return [str(sample.path), sample.box, held, sample.shown]


# --- Images that are decoded and resized once, for all their readers --------------------------------------------------
# Their pixels are in an unnamed file, which disappears with this process however it ends; one image is in memory.


# Share of the free disk space that pixels may use. If they need more, every reader decodes the files again.
DISK_SHARE = 0.5


class DecodedImages(Sequence[Loaded]):
    """The pixels of some images, uint8 [height, width, channels], each with the (width, height) of its original.

    May be read from several threads. `kept`: they are in the file, and no image is decoded again.
    """

    def __init__(self, samples: Sequence[Sample], spec: PreprocessSpec, folder: Path) -> None:
        """`samples`: those added by `fill`; `folder`: where the file is."""
        self._samples, self._spec, self._folder = list(samples), spec, folder
        self._sizes: list[Size] = []
        # The index in the file of each image's pixels.
        self._slots: list[int] = []
        self._shape = (*spec.crop, spec.channels)
        self._bytes = int(np.prod(self._shape))
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        with storage_errors(folder):
            if len(samples) * self._bytes <= DISK_SHARE * shutil.disk_usage(folder).free:
                self._file = tempfile.TemporaryFile(prefix=".vitdeploy-pixels-", dir=folder)  # noqa: SIM115 - kept open

    @property
    def kept(self) -> bool:
        return self._file is not None

    def fill(self, skipped: Skipped | None, count: Callable[[int], None]) -> tuple[Sample, ...]:
        """Decode all images, keep the readable ones and return these.

        Raises:
            ImageError, DataError, WorkerError: as `decode_images`.
            StorageError: the disk is full.
        """
        order = reading_order(self._samples)
        left, good = iter(order), list[tuple[int, int, Size]]()
        for sample, pixels, size in decode_images([self._samples[i] for i in order], self._spec, skipped):
            if self._file is not None:
                with storage_errors(self._folder):
                    self._file.write(np.ascontiguousarray(pixels).data)
            index = next(i for i in left if self._samples[i] is sample)  # those before it were skipped
            good.append((index, len(good), size))
            count(1)
        good.sort()
        self._samples = [self._samples[index] for index, _, _ in good]
        self._slots, self._sizes = [slot for _, slot, _ in good], [size for _, _, size in good]
        return tuple(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Loaded:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._read(index) if self.kept else load_sample(self._samples[index], self._spec)

    def __iter__(self) -> Iterator[Loaded]:
        if self.kept:
            return (self._read(index) for index in range(len(self)))
        return ((pixels, size) for _, pixels, size in decode_images(self._samples, self._spec))

    def some(self, places: range) -> Iterator[Loaded]:
        """Return the images at consecutive places."""
        if self.kept:
            return (self._read(index) for index in places)
        samples = self._samples[places.start : places.stop]
        return ((pixels, size) for _, pixels, size in decode_images(samples, self._spec))

    def _read(self, index: int) -> tuple[Pixels, Size]:
        pixels = np.empty(self._shape, np.uint8)
        assert self._file is not None
        with self._lock, storage_errors(self._folder):
            self._file.seek(self._slots[index] * self._bytes)
            count = self._file.readinto(pixels.data)  # type: ignore[attr-defined]
        if count != self._bytes:
            raise StorageError(
                f"the decoded images in {self._folder} are incomplete",
                found=f"{count:,} bytes of image {index}",
                expected=f"{self._bytes:,} bytes",
                fix="run the command again; VITDEPLOY_STORE sets another folder",
            )
        return pixels, self._sizes[index]


class DecodedSet:
    """The same images in all requested geometries: specs that differ only in mean and deviation share one."""

    def __init__(self, samples: Sequence[Sample], folder: Path) -> None:
        self._samples, self._folder = samples, folder
        self._by_geometry: dict[PreprocessSpec, DecodedImages] = {}
        self._lock = threading.Lock()

    def check(self, spec: PreprocessSpec, skipped: Skipped | None, count: Callable[[int], None]) -> tuple[Sample, ...]:
        """Decode all images, and keep the readable ones; errors as `DecodedImages.fill`."""
        decoded = DecodedImages(self._samples, spec, self._folder)
        self._samples = decoded.fill(skipped, count)
        self._by_geometry[_geometry(spec)] = decoded
        return tuple(self._samples)

    def of(self, spec: PreprocessSpec) -> DecodedImages:
        """The images as `spec` resizes and crops them; decoded when first requested."""
        with self._lock:
            found = self._by_geometry.get(_geometry(spec))
            if found is None:
                found = DecodedImages(self._samples, spec, self._folder)
                found.fill(None, lambda images: None)
                self._by_geometry[_geometry(spec)] = found
            return found


def reading_order(samples: Sequence[Sample]) -> list[int]:
    """Return the indices of samples in the best reading order: rows of a table group by group, all others unchanged. A
    row group is always read as a whole."""
    keys = [("", 0) if sample.held is None else sample.held.beside for sample in samples]
    return sorted(range(len(samples)), key=lambda i: keys[i])


def _geometry(spec: PreprocessSpec) -> PreprocessSpec:
    return dataclasses.replace(spec, mean=(0.0,) * spec.channels, std=(1.0,) * spec.channels)
