"""Decodes image files to pixels, in order: in this process if they are few, otherwise in child processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import IO, Any

import numpy as np

from vitdeploy.data.containers.reading import load_held
from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import Skipped, skippable
from vitdeploy.errors import DataError, ImageError, VitdeployError, WorkerError, error_with_code
from vitdeploy.runtime.host import usable_cores
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec, encode

Size = tuple[int, int]
Loaded = tuple[Pixels, Size]

WORKER = "vitdeploy.data.decode_worker"
# What is decoded here before it is known how long the others take, and from which time on processes are worth starting.
FIRST_IMAGES, WORTH_SECONDS = 16, 2.0
MAX_WORKERS = 8
# So many paths are sent ahead of the answers, which then wait in a pipe of this size; more are never in memory.
AHEAD, PIPE_BYTES = 4, 1 << 20
EXIT_SECONDS = 3.0


def decode_images(
    samples: Sequence[Sample], spec: PreprocessSpec, skipped: Skipped | None = None
) -> Iterator[tuple[Sample, Pixels, Size]]:
    """Each sample with its pixels, uint8 [height, width, channels], and (width, height) of the upright original.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        ImageError: an unreadable image and `skipped` is None.
        DataError: not one image could be read.
        WorkerError: no process can be started.
    """
    count = 0
    loaded = decode_each(samples, spec)
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
        raise DataError("not one image could be read", found=f"{len(samples)} unreadable files")


def decode_each(
    samples: Sequence[Sample], spec: PreprocessSpec, processes: int | None = None
) -> Generator[Loaded | ImageError, None, None]:
    """The pixels and the size of each sample, or its error; to be closed, which ends the processes.

    Args:
        processes: how many there are at most; None: one for each core, where there are several.

    Raises:
        WorkerError: no process can be started.
    """
    with contextlib.closing(_load(samples, spec, processes)) as loaded:
        for found in loaded:
            if isinstance(found, VitdeployError) and not isinstance(found, ImageError):
                raise found
            yield found


def _load(
    samples: Sequence[Sample], spec: PreprocessSpec, processes: int | None
) -> Generator[Loaded | VitdeployError, None, None]:
    """The result of each sample. Processes are started if the first images show that the others take long enough."""
    seconds, cores = 0.0, usable_cores()
    workers = processes or (min(cores, MAX_WORKERS) if cores > 1 else 0)
    for index, sample in enumerate(samples):
        left = len(samples) - index
        if workers and index >= FIRST_IMAGES and seconds / index * left > WORTH_SECONDS:
            yield from _by_processes(samples[index:], spec, min(workers, left))
            return
        begun = time.perf_counter()
        try:
            found: Loaded | VitdeployError = load_sample(sample, spec)
        except VitdeployError as error:
            found = error
        seconds += time.perf_counter() - begun
        yield found


def load_sample(sample: Sample, spec: PreprocessSpec) -> Loaded:
    """The pixels of one sample, and the size of its original; errors as `load_image` and `Held.read`."""
    return load_held(sample.path, sample.held, spec, sample.box, sample.shown)


def _by_processes(samples: Sequence[Sample], spec: PreprocessSpec, count: int) -> Iterator[Loaded | VitdeployError]:
    """The results from several processes. Sample i goes to process i modulo `count`; each answers in order, so the next
    one to read is always known."""
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
    """One process, restarted if a file has ended it. It runs in a session of its own: Ctrl-C goes to its parent, which
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
            raise WorkerError("a process that decodes images cannot be started", found=str(error)) from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        self._send(encode(self._spec))
        if not self._out.readline():
            raise WorkerError(
                "a process that decodes images ended before its first image",
                found=f"exit status {self._process.wait()}",
                fix="often too little memory: free some",
            )

    def _send(self, document: Any) -> None:
        with contextlib.suppress(OSError):  # a process that is gone gives no answer, which says so
            self._in.write(json.dumps(document).encode() + b"\n")
            self._in.flush()

    def ask(self, sample: Sample) -> None:
        self._waiting.append(sample)
        self._send(_question(sample))

    def answer(self) -> Loaded | VitdeployError:
        """The result of the first sample without an answer."""
        sample = self._waiting.popleft()
        line = self._out.readline()
        head = json.loads(line) if line.endswith(b"\n") else {}
        if "error" in head:
            facts = head["error"]
            texts = {key: facts[key] for key in ("found", "wanted", "fix")}
            return error_with_code(facts["code"], facts["message"], **texts)
        height, width = self._spec.crop
        data = self._out.read(height * width * self._spec.channels) if head else b""
        if len(data) < height * width * self._spec.channels:
            return self._ended_by(sample)
        pixels = np.frombuffer(data, np.uint8).reshape(height, width, self._spec.channels)
        return pixels, (head["size"][0], head["size"][1])

    def _ended_by(self, sample: Sample) -> ImageError:
        """The error of the image on which the process ended. Those after it go to a new process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        self._end()
        status = self._process.returncode
        self._start()
        for each in self._waiting:
            self._send(_question(each))
        return ImageError(
            f"{sample.shown} ends the process that decodes it",
            found=f"exit status {status}",
            wanted="an image that can be decoded",
            fix="replace it, or take it out of the folder",
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
    """What the process is asked of a sample."""
    held = None if sample.held is None else sample.held.written()
    return [str(sample.path), sample.box, held, sample.shown]
