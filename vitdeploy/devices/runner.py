"""A runner with its engine on a device, for `verify`.

The placement is sent once and compiled there; then each call sends its feeds and receives the outputs. After a lost
connection it reconnects, compiles the engine again and repeats the call, since calls have no side effects.
"""

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.compilation.engine import joined
from vitdeploy.devices.agent import documents, serve, stream
from vitdeploy.devices.call import Call, Unresponsive, printable, spelled
from vitdeploy.devices.client import Client
from vitdeploy.devices.results import check_engine, check_named, check_tensors, clean, parse, refuse
from vitdeploy.errors import DeviceError
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, FileEntry, GraphSpec, TensorSpec, encode

MAX_OUTPUT_BYTES = 4 << 30
# The largest plausible leading axis of an input, besides the batch size that the engine was compiled for.
MOST_ROWS = 4096
# The output types of engines.
DTYPES = {"float32", "float16", "int64", "int32", "uint8", "bool"}


@dataclass(frozen=True)
class _Loaded:
    """The first answer of a session. Answers with only `waits_for`, then one with only `begun`, may precede it."""

    engine: EngineSpec | None = None
    host: dict[str, str] | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    provider: str = ""
    waits_for: str = ""
    begun: bool = False


class RemoteRunner(Runner):
    """Compiles and runs `placed` and its files on the device of `client`. `engine` and `host` are known once loaded.

    `graphs`: by part, the tensors of the sent graphs, which the engine must have."""

    def __init__(
        self,
        client: Client,
        placed: documents.PlacedArtifact,
        files: Mapping[FileEntry, Path],
        *,
        name: str,
        graphs: Mapping[str, GraphSpec] | None = None,
    ) -> None:
        super().__init__(name)
        self._client, self._placed, self._files, self._graphs = client, placed, files, graphs or {}
        self._open: contextlib.ExitStack | None = None
        self._call: Call | None = None
        self.engine: EngineSpec | None = None
        self.host: dict[str, str] = {}

    def _load(self) -> None:
        self._connect()  # fail at once if the device was never reachable

    def _connect(self) -> None:
        self._close()
        device = self._client.device.name
        request = {"placed": encode(self._placed), "files": encode(list(self._files))}
        with contextlib.ExitStack() as stack:
            call = stack.enter_context(self._client.started("serve"))
            call.send(stream.message(request, self._files.values()))
            loaded = self._first_answer(call)
            if loaded.engine is None or not (loaded.inputs and loaded.outputs):
                raise refuse(device, "an engine without inputs or outputs")
            self.engine = clean(check_engine(device, loaded.engine, self._placed))
            self._check_tensors(loaded, self.engine)
            if self.inputs and (self.inputs, self.outputs) != (loaded.inputs, loaded.outputs):
                raise refuse(device, "the engine changed after the connection was lost", loaded.inputs, self.inputs)
            self.inputs, self.outputs, self.provider = loaded.inputs, loaded.outputs, printable(loaded.provider)
            self.host = clean(loaded.host or {})
            self._call, self._open = call, stack.pop_all()

    def _check_tensors(self, loaded: _Loaded, engine: EngineSpec) -> None:
        """Raise DeviceResultError unless the session's inputs and outputs match those of the graphs that were sent."""
        device, parts = self._client.device.name, engine.parts or (engine,)
        check_tensors(device, (*loaded.inputs, *loaded.outputs))
        if self._graphs:
            for part in parts:
                check_named(device, part.inputs, self._graphs[part.part].inputs)
                check_named(device, part.outputs, self._graphs[part.part].outputs)
            whole = joined(parts, self._placed.sequence) if engine.parts else engine
            check_named(device, loaded.inputs, whole.inputs)
            check_named(device, loaded.outputs, whole.outputs)
        rows, most = [tensor.shape[:1] for tensor in loaded.inputs], max(self._placed.batch, MOST_ROWS)
        if not rows[0] or any(isinstance(size, int) and not 1 <= size <= most for each in rows for size in each):
            raise refuse(device, "an engine with an implausible batch size", rows, f"1 to {most}")

    def _first_answer(self, call: Call) -> _Loaded:
        """Wait for the session's turn and for the engine; return the first answer.

        Raises:
            DeviceError: a time limit was exceeded.
        """
        client, device, waits_for = self._client, self._client.device.name, ""
        limits = {True: client.patience.queue, False: client.patience.work}
        since: dict[bool, float] = {}
        while True:
            queued, now = bool(waits_for), time.monotonic()
            left = limits[queued] - (now - since.setdefault(queued, now))
            if left <= 0:
                raise DeviceError(
                    f"{device}: no answer for {spelled(limits[queued])}",
                    found=f"it is waiting for {waits_for}" if queued else "the engine is not built yet",
                    expected="its turn" if queued else "an engine",
                    fix="run the command again when it is free; `vitdeploy devices doctor` shows its jobs",
                )
            try:
                loaded = parse(device, client.line(call, documents.MAX_JOB_BYTES, within=left, talk=True), _Loaded)
            except Unresponsive:
                if time.monotonic() - since[queued] < limits[queued]:
                    raise
                continue
            waits_for = printable(loaded.waits_for)
            if waits_for:
                client.tell(f"{device}: waiting for {waits_for} (at most {spelled(limits[True])})", 0, 1)
            elif not loaded.begun:
                return loaded

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self._client.patiently(lambda: self._ask(feeds))

    def _ask(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._call is None:
            self._connect()
        assert self._call is not None
        call, self._call = self._call, None  # restored below if the call succeeds
        call.send(_request(feeds))
        line = self._client.line(call, documents.MAX_JOB_BYTES, within=self._client.patience.work)
        found = parse(self._client.device.name, line, tuple[TensorSpec, ...])
        self._check(found, next(iter(feeds.values())).shape[0])
        try:
            outputs = {}
            for tensor in found:
                call.begin()
                outputs[tensor.name] = serve.read_array(call.output, tensor)
        except stream.BrokenOff as error:
            raise self._client.ended(call, str(error)) from None
        self._call = call
        return outputs

    def _check(self, found: tuple[TensorSpec, ...], batch: int) -> None:
        """Check that the outputs match the engine, with plausible sizes."""
        device = self._client.device.name
        expected = {tensor.name: tensor for tensor in self.outputs}
        if [tensor.name for tensor in found] != list(expected):
            raise refuse(device, "outputs of another engine", [tensor.name for tensor in found], list(expected))
        total = 0
        for tensor in found:
            own = expected[tensor.name]
            sizes = [size for size in tensor.shape if isinstance(size, int) and size >= 0]
            fits = len(sizes) == len(tensor.shape) == len(own.shape) and sizes[:1] == [batch]
            fits = fits and all(isinstance(b, str) or a == b for a, b in zip(sizes, own.shape, strict=True))
            if not fits or tensor.dtype != own.dtype or tensor.dtype not in DTYPES:
                raise refuse(device, "an output with the wrong shape or type", tensor, own)
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
    yield from stream.message({"feeds": specs})
    for array in feeds.values():
        yield array.tobytes()
