"""A bundle that is made in no time, and its engine behind a real socket."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec

for package in ("starlette", "uvicorn", "prometheus_client", "python_multipart", "httptools"):
    pytest.importorskip(package, reason="pip install 'vitdeploy[serve]'")

FORM = {"Content-Type": "multipart/form-data; boundary=end"}
SIDE, CLASSES = 8, 4
LABELS = ["north", "east", "south", "west"]


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory) -> Path:
    """8x8 grey images; four classes, each the sum of a quarter of the pixels. For ONNX Runtime, at any batch."""
    return make_bundle(tmp_path_factory.mktemp("served"), "batch")


@pytest.fixture(scope="session")
def static_bundle(tmp_path_factory) -> Path:
    """The same for three images at once, no more and no fewer."""
    return make_bundle(tmp_path_factory.mktemp("static"), 3)


@pytest.fixture(scope="session")
def openvino_bundle(tmp_path_factory) -> Path:
    """The same at any batch, for OpenVINO."""
    pytest.importorskip("openvino", reason="pip install 'vitdeploy[openvino]'")
    return make_bundle(tmp_path_factory.mktemp("openvino"), "batch", "openvino-cpu")


def make_bundle(root: Path, batch: int | str, target: str = "onnxruntime-cpu", **others) -> Path:
    """`others`: further arguments of `write_bundle`."""
    onnx = pytest.importorskip("onnx", reason="pip install 'vitdeploy[export]'")
    from onnx import TensorProto, helper, numpy_helper

    from vitdeploy.bundle.write import write_bundle
    from vitdeploy.compilation.engine import compile_engine

    pixels = SIDE * SIDE
    weights = np.repeat(np.eye(CLASSES, dtype=np.float32), pixels // CLASSES, axis=0) / 255
    nodes = [
        helper.make_node("Cast", ["image"], ["numbers"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["numbers", "flat"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weights"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "quarters",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, [batch, SIDE, SIDE, 1])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, CLASSES])],
        [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(np.array([-1, pixels]), "flat")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), root / "model.onnx")
    (root / "engine").mkdir()
    size = 1 if batch == "batch" else batch
    spec = compile_engine(root / "model.onnx", root / "engine", target=target, precision="fp32", batch=size, placed=0)
    (root / "bundle").mkdir()
    write_bundle(
        root / "bundle",
        name="quarters",
        task="classification",
        graphs={
            "model": (
                root / "model.onnx",
                GraphSpec(
                    "model.onnx",
                    (TensorSpec("image", "uint8", (batch, SIDE, SIDE, 1)),),
                    (TensorSpec("logits", "float32", (batch, CLASSES)),),
                ),
            )
        },
        preprocess=PreprocessSpec(SIDE, (SIDE, SIDE), "bicubic", (0.5,), (0.5,)),
        engines=[(spec, root / "engine")],
        labels=LABELS,
        **others,
    )
    return root / "bundle"


@pytest.fixture(scope="session")
def engines(served_bundle):
    from vitdeploy.serve.engines import load_engines

    with load_engines(served_bundle, max_batch=4) as loaded:
        yield loaded


class Running:
    """A service behind a socket of its own, in a thread; `stop` as a signal would."""

    def __init__(self, engines, **settings):
        from vitdeploy.serve.app import Service
        from vitdeploy.serve.server import HttpServer, bind
        from vitdeploy.serve.settings import ServerSettings

        self.service = Service(engines, ServerSettings(max_batch=4, **settings))
        self.server = HttpServer(self.service)
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.server.stop()
        self.thread.join()
        self.service.close()

    def ask(self, method, path, body=None, headers=None):
        """Status, headers and the JSON body (or its text) of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        kind = answer.getheader("content-type") or ""
        return answer.status, answer.headers, json.loads(data) if kind == "application/json" else data


def form(file=None, **fields):
    """The body of a multipart form, whose headers are `FORM`."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts += [b'name="file"; filename="a.png"\r\n\r\n' + file] if file is not None else []
    return b"".join(b"--end\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--end--\r\n"


@pytest.fixture(scope="session")
def running():
    return Running


@pytest.fixture(scope="module")
def server(engines):
    """With limits that a test can reach, and times that it can wait for."""
    limits = {"max_body": 20_000, "header_time": 0.8, "body_time": 0.4, "linger": 0.3, "deadline": 10.0}
    with Running(engines, **limits) as running:
        yield running
