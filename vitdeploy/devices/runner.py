"""A runner whose engine is on a device: `verify` drives it as it drives any other.

The placement is sent once and compiled there; then each call sends its feeds and receives the outputs. After a lost
connection it reconnects, compiles the engine again and repeats the call: calls change nothing there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.devices.agent.arrays import read_array
from vitdeploy.devices.agent.documents import MAX_JOB_BYTES, Placed
from vitdeploy.devices.agent.stream import BrokenOff, message
from vitdeploy.devices.call import Call
from vitdeploy.devices.client import Client
from vitdeploy.devices.results import check_engine, parse, refuse
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, FileEntry, TensorSpec, encode

MAX_OUTPUT_BYTES = 4 << 30
# The types that engines return; no graph of ours has another output.
DTYPES = {"float32", "float16", "int64", "int32", "uint8", "bool"}


@dataclass(frozen=True)
class _Loaded:
    """The first answer of a session; `waits_for` alone, as often as it changes, before that."""

    engine: EngineSpec | None = None
    host: dict[str, str] | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    provider: str = ""
    waits_for: str = ""


@dataclass(frozen=True)
class _Outputs:
    outputs: tuple[TensorSpec, ...]


class RemoteRunner(Runner):
    """`placed` and its files, compiled and run on the device of `client`. `engine` and `host` are known once loaded."""

    def __init__(
        self, client: Client, placed: Placed, files: Mapping[FileEntry, Path], tell: Any, *, name: str
    ) -> None:
        super().__init__(name)
        self._client, self._placed, self._files, self._tell = client, placed, files, tell
        self._open: contextlib.ExitStack | None = None
        self._call: Call | None = None
        self.engine: EngineSpec | None = None
        self.host: dict[str, str] = {}

    def _load(self) -> None:
        self._connect()  # a device that was never reached is told at once

    def _connect(self) -> None:
        self._close()
        device = self._client.device.name
        request = {"placed": encode(self._placed), "files": encode(list(self._files)), "options": {}}
        with contextlib.ExitStack() as stack:
            call = stack.enter_context(self._client.started("serve", timeout=None))
            call.send(self._client.unless_cancelled(message(request, self._files.values())))
            while True:
                loaded = parse(device, self._client.line(call, MAX_JOB_BYTES), _Loaded)
                if not loaded.waits_for:
                    break
                self._tell(f"{device}: waits for {loaded.waits_for}", 0, 1)
            if loaded.engine is None or not (loaded.inputs and loaded.outputs):
                raise refuse(device, "an engine without inputs or outputs")
            self.engine = check_engine(device, loaded.engine, self._placed)
            self.inputs, self.outputs, self.provider = loaded.inputs, loaded.outputs, loaded.provider
            self.host = loaded.host or {}
            self._call, self._open = call, stack.pop_all()

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self._client.patiently(lambda: self._ask(feeds), self._tell)

    def _ask(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._call is None:
            self._connect()
        assert self._call is not None
        call, self._call = self._call, None  # of no use any more, unless all of this goes well
        call.send(self._client.unless_cancelled(_request(feeds)))
        line = self._client.line(call, MAX_JOB_BYTES)
        found = parse(self._client.device.name, line, _Outputs).outputs
        self._check(found, next(iter(feeds.values())).shape[0])
        try:
            outputs = {tensor.name: read_array(call.output, tensor) for tensor in found}
        except BrokenOff as error:
            raise self._client.ended(call, str(error)) from None
        self._call = call
        return outputs

    def _check(self, found: tuple[TensorSpec, ...], batch: int) -> None:
        """Check that the outputs are those of the engine, with possible sizes."""
        device = self._client.device.name
        wanted = {tensor.name: tensor for tensor in self.outputs}
        if [tensor.name for tensor in found] != list(wanted):
            raise refuse(device, "outputs of another engine", [tensor.name for tensor in found], list(wanted))
        total = 0
        for tensor in found:
            expected = wanted[tensor.name]
            sizes = [size for size in tensor.shape if isinstance(size, int) and size >= 0]
            fits = len(sizes) == len(tensor.shape) == len(expected.shape) and sizes[:1] == [batch]
            fits = fits and all(isinstance(b, str) or a == b for a, b in zip(sizes, expected.shape, strict=True))
            if not fits or tensor.dtype != expected.dtype or tensor.dtype not in DTYPES:
                raise refuse(device, "an output that does not fit", tensor, expected)
            total += math.prod(sizes) * np.dtype(tensor.dtype).itemsize
        if total > MAX_OUTPUT_BYTES:
            raise refuse(device, "outputs that are too large", f"{total:,} bytes")

    def _close(self) -> None:
        self._call = None
        if self._open is not None:
            self._open.close()
            self._open = None


def _request(feeds: Mapping[str, Array]) -> Iterable[bytes]:
    specs = [encode(TensorSpec(name, array.dtype.name, array.shape)) for name, array in feeds.items()]
    yield from message({"feeds": specs})
    for array in feeds.values():
        yield array.tobytes()
