"""The seven readers of what strangers write, each as a function of bytes that ends, or raises what is documented."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.sandbox import CONTROL, DOCUMENTED
from tests.faults.seeds import FORMATS, Seeds

Read = Callable[[bytes], None]


class Undocumented(Exception):
    """A reader ended in a way that is not documented, without an exception of its own."""


@dataclass(frozen=True)
class Target:
    """`open` gives the reader, which may write into the folder; `seeds` are whole inputs; `modules` what it runs."""

    name: str
    modules: tuple[str, ...]
    open: Callable[[Path, Seeds], Read]
    seeds: Callable[[Seeds], list[bytes]]


def documented(read: Read, data: bytes) -> bool:
    """Whether the input was taken; False for a documented refusal.

    Raises:
        Whatever is no documented refusal.
    """
    from vitdeploy.errors import VitdeployError

    try:
        read(data)
    except VitdeployError as error:
        if error.exit_code not in DOCUMENTED or CONTROL.search(str(error)):
            raise Undocumented(f"{type(error).__name__}: {ascii(str(error))[:300]}") from error
        return False
    return True


def _by_path(name: str, read: Callable[[Path], object]) -> Callable[[Path, Seeds], Read]:
    """A reader of files, given the bytes in one."""

    def opened(work: Path, seeds: Seeds) -> Read:
        path = work / name

        def of_bytes(data: bytes) -> None:
            path.write_bytes(data)
            read(path)

        return of_bytes

    return opened


# --- one reader each --------------------------------------------------------------------------------------------------


def _recipe(path: Path) -> None:
    from vitdeploy.recipe.load import load_recipe

    load_recipe(path)


def _manifest(work: Path, seeds: Seeds) -> Read:
    from vitdeploy.bundle.pack import packed_order
    from vitdeploy.bundle.read import parse_manifest

    def read(data: bytes) -> None:
        packed_order(parse_manifest(data, Path("manifest.json")), Path("manifest.json"))

    return read


def _archive(path: Path) -> None:
    from vitdeploy.bundle.pack import read_packed

    read_packed(path)


def _graph(path: Path) -> None:
    from vitdeploy.graph.io.admit import admit, admit_graph

    admit_graph(path)
    admit(path)


def _weights(path: Path) -> None:
    from vitdeploy.models.checkpoints.read import read_checkpoint

    read_checkpoint(path)


def _image(work: Path, seeds: Seeds) -> Read:
    from vitdeploy.runtime.preprocess import decode, resize_and_crop
    from vitdeploy.spec import PreprocessSpec

    spec = PreprocessSpec(32, (32, 32), "bicubic", (0.5,) * 3, (0.5,) * 3)

    def read(data: bytes) -> None:
        resize_and_crop(decode(data, 3), spec)

    return read


# --- HTTP: a connection without a socket ------------------------------------------------------------------------------


class Memory(asyncio.Transport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
# What the server answers on purpose when it cannot.
ON_PURPOSE = (503, 504)


def _http(work: Path, seeds: Seeds) -> Read:
    """All that the server does with a connection: uvicorn's reader, limits, routes, bodies, the answer."""
    from uvicorn.server import ServerState

    from vitdeploy.serve.app import Service
    from vitdeploy.serve.engines import load_engines
    from vitdeploy.serve.server import HttpConnection, HttpServer
    from vitdeploy.serve.settings import ServerSettings

    for name in ("vitdeploy.serve", "uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    settings = ServerSettings(max_batch=2, max_body=1 << 20, body_time=2.0, linger=0.01, deadline=5.0)
    service = Service(load_engines(seeds.bundle, "onnxruntime-cpu", max_batch=2), settings)
    config = HttpServer(service).config
    config.load()
    loop = asyncio.new_event_loop()

    async def converse(data: bytes) -> bytes:
        state, transport = ServerState(), Memory()
        connection = HttpConnection(settings, config=config, server_state=state, app_state={}, _loop=loop)
        connection.connection_made(transport)
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            if part and not transport.closed:
                connection.data_received(part)
            await asyncio.sleep(0)
        for _ in range(50):  # what is whole is answered within this
            if not state.tasks or connection.cycle.more_body:  # the rest of that never comes
                break
            await asyncio.sleep(0.001)
        connection.connection_lost(None)
        if state.tasks:
            _, left = await asyncio.wait(set(state.tasks), timeout=8)
            if left:
                raise Undocumented("the answer to a connection that is gone has no end")
        return bytes(transport.sent)

    def read(data: bytes) -> None:
        answers = loop.run_until_complete(converse(data))
        bad = [
            int(status) for status in STATUS.findall(answers) if int(status) >= 500 and int(status) not in ON_PURPOSE
        ]
        if bad:
            raise Undocumented(f"status {bad[0]}: {answers[-200:]!r}")
        if service.app.buffered:
            raise Undocumented(f"{service.app.buffered} bytes are held after the connection is gone")

    return read


def _requests(seeds: Seeds) -> list[bytes]:
    """A whole request of each form that the server takes."""
    side, name = 8, b"tiny"
    numbers = [0.5] * (3 * side * side)
    tensor = {"name": "image", "shape": [1, 3, side, side], "datatype": "FP32"}
    binary = {**tensor, "parameters": {"binary_data_size": 4 * len(numbers)}}
    head = json.dumps({"inputs": [binary], "parameters": {"binary_data_output": True}}).encode()
    infer, png = b"/v2/models/" + name + b"/infer", seeds.image("png")
    form = b'--end\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + png + b"\r\n--end--\r\n"
    message = json.dumps({"id": "7", "inputs": [{**tensor, "data": numbers}], "outputs": [{"name": "logits"}]}).encode()
    posts = [
        (infer, message, b"Content-Type: application/json\r\n"),
        (infer, head + bytes(4 * len(numbers)), b"Inference-Header-Content-Length: %d\r\n" % len(head)),
        (b"/predict?top=2", png, b"Content-Type: image/png\r\n"),
        (b"/predict", form, b"Content-Type: multipart/form-data; boundary=end\r\n"),
        (b"/predict", b'{"image": "aGVsbG8="}', b"Content-Type: application/json\r\nX-Request-Id: a\r\n"),
    ]
    found = [
        b"POST %s HTTP/1.1\r\nHost: a\r\n%sContent-Length: %d\r\n\r\n%s" % (path, headers, len(body), body)
        for path, body, headers in posts
    ]
    gets = (b"/v2", b"/v2/health/ready", b"/metrics", b"/v2/models/tiny/versions/1", b"/v2/models/%2e%2e/ready")
    found += [b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n" % path for path in gets]
    chunked = b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(png), png)
    return [*found, b"POST /predict HTTP/1.1\r\nHost: a\r\n" + chunked, found[5] * 3]


# --- seeds ------------------------------------------------------------------------------------------------------------


def _recipes(seeds: Seeds) -> list[bytes]:
    root = Path(__file__).parents[3] / "recipes"
    return [path.read_bytes() for path in sorted(root.glob("*.yaml"))]


def _graphs(seeds: Seeds) -> list[bytes]:
    import onnx
    from onnx import helper

    proto = onnx.load(str(seeds.graph))
    loop = onnx.ModelProto()
    loop.CopyFrom(proto)
    kept = helper.make_graph([], "g", [], [])
    loop.graph.node[0].attribute.append(helper.make_attribute("body", kept))
    outside = onnx.ModelProto()
    outside.CopyFrom(proto)
    tensor = outside.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="graph.onnx")
    return [each.SerializeToString() for each in (proto, loop, outside)]


def _small_weights(seeds: Seeds) -> list[bytes]:
    """A few tensors in each format: what is large is all numbers, and no structure."""
    import io

    import numpy as np
    import torch
    from safetensors.torch import save

    state = {"head.weight": torch.ones(2, 3), "head.bias": torch.zeros(2)}
    packed, old, arrays = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": state, "epoch": 3}, packed)
    torch.save(state, old, _use_new_zipfile_serialization=False)
    np.savez(arrays, **{key: value.numpy() for key, value in state.items()})
    return [save(state), packed.getvalue(), old.getvalue(), arrays.getvalue()]


def _small_archive(seeds: Seeds) -> list[bytes]:
    """A packed bundle that holds next to nothing, beside a real one."""
    import zlib

    from vitdeploy.bundle.layout import PackedMember, directory, local_header

    document = json.loads((seeds.bundle / "manifest.json").read_text(encoding="utf-8"))
    document |= {"graphs": {}, "engines": [], "golden": None, "labels": None, "files": []}
    content = json.dumps(document).encode()
    member = PackedMember("manifest.json", len(content), zlib.crc32(content), 0)
    return [local_header(member) + content + directory([member]), seeds.packed.read_bytes()]


def _images(seeds: Seeds) -> list[bytes]:
    return [seeds.image(kind) for kind in FORMATS]


TARGETS = {
    target.name: target
    for target in (
        Target("recipe", ("vitdeploy.recipe.load",), _by_path("recipe.yaml", _recipe), _recipes),
        Target(
            "manifest",
            ("vitdeploy.bundle.read", "vitdeploy.bundle.pack"),
            _manifest,
            lambda seeds: [(seeds.bundle / "manifest.json").read_bytes()],
        ),
        Target("archive", ("vitdeploy.bundle.pack",), _by_path("bundle.vitb", _archive), _small_archive),
        Target("ONNX admission", ("vitdeploy.graph.io.admit",), _by_path("graph.onnx", _graph), _graphs),
        Target(
            "weights admission",
            ("vitdeploy.models.checkpoints.read",),
            _by_path("weights.pt", _weights),
            _small_weights,
        ),
        Target("image decoding", ("vitdeploy.runtime.preprocess",), _image, _images),
        Target("HTTP requests", ("vitdeploy.serve.app", "vitdeploy.serve.server"), _http, _requests),
    )
}
