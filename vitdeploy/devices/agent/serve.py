"""Run one engine over the connection: receive a placement, then feeds, and send back outputs.

    {"placed": {...}, "files": [...]} + files                    {"begun": true}
                                                                 {"engine": {...}, "host": {...}}
    {"feeds": [{"name", "dtype", "shape"}, ...]} + arrays        [{"name", "dtype", "shape"}, ...] + arrays

While another user has the device, {"waits_for": "..."} lines are sent first; beats (stream.py) come between any two
lines. An error is answered as {"failure": {...}}. The session ends with the connection, also while it waits or builds:
an undeliverable beat ends it. Its files are deleted.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitdeploy.devices.agent import documents, state, tasks
from vitdeploy.devices.agent.stream import BLOCK, Beats, BrokenOff, message, read_file, read_json, read_line
from vitdeploy.progress import silent
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.flow import FlowRunner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import FileEntry, TensorSpec, decode, encode

Say = Callable[..., None]


def serve(requests: BinaryIO, answers: BinaryIO, beats: Beats) -> None:
    """Answer requests until the connection ends."""

    def say(document: Any, arrays: tuple[Array, ...] = ()) -> None:
        with beats.paused():
            for block in message(document):
                answers.write(block)
            for array in arrays:
                answers.write(array.data)
            answers.flush()

    with state.scratch() as folder:
        # Read everything before waiting for the turn: the host does not listen while it sends.
        request = read_json(read_line(requests, documents.MAX_JOB_BYTES))
        for entry in (decode(FileEntry, each) for each in request["files"]):
            (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
            read_file(requests, entry, folder / entry.path)
        with state.turn("verify", lambda other: say({"waits_for": other})):
            say({"begun": True})
            _answer(folder, request, requests, say)


def _answer(folder: Path, request: Any, requests: BinaryIO, say: Say) -> None:
    placed = decode(documents.PlacedArtifact, request["placed"])
    engine, where = tasks.make_engine(placed, folder, folder / "engine", None, silent)
    with make_runner(where, engine) as runner:
        if isinstance(runner, FlowRunner):
            runner.linked.keep = True  # prompts for one image, and images to compare with texts, come one by one
        tensors = {"inputs": encode(runner.inputs), "outputs": encode(runner.outputs), "provider": runner.provider}
        say({"engine": encode(engine), "host": describe_host(), **tensors})
        while line := read_line(requests, documents.MAX_JOB_BYTES):
            _infer(runner, [decode(TensorSpec, each) for each in read_json(line)["feeds"]], requests, say)


def _infer(runner: Runner, feeds: list[TensorSpec], requests: BinaryIO, say: Say) -> None:
    outputs = runner.infer({feed.name: read_array(requests, feed) for feed in feeds})
    found = {name: np.ascontiguousarray(array) for name, array in outputs.items()}
    specs = [encode(TensorSpec(name, array.dtype.name, array.shape)) for name, array in found.items()]
    say(specs, tuple(found.values()))


# --- Arrays that follow the line that lists them ----------------------------------------------------------------------


def read_array(stream: BinaryIO, tensor: TensorSpec) -> Array:
    """Read the next array of a stream: little-endian bytes in C order.

    Raises:
        BrokenOff: the stream ends early.
    """
    shape = tuple(size for size in tensor.shape if isinstance(size, int))
    dtype = np.dtype(tensor.dtype)
    data = bytearray(math.prod(shape) * dtype.itemsize)
    view, done = memoryview(data), 0
    while done < len(data):
        count = stream.readinto(view[done : done + BLOCK])  # type: ignore[attr-defined]
        if not count:
            raise BrokenOff(f"the stream ended in {tensor.name}")
        done += count
    return np.frombuffer(data, dtype).reshape(shape)
