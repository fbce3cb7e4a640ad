"""NVIDIA's Triton: `<model>/config.pbtxt` and `<model>/1/`, for its ONNX Runtime or its OpenVINO backend.

Source: Triton's model repository and model configuration, `model_config.proto` of triton-inference-server/common; the
README of triton-inference-server/openvino_backend for its parameters.
"""

from __future__ import annotations

from pathlib import Path

from vitdeploy.embed.servers.layout import (
    TASKS,
    TEMPLATES,
    VERSION,
    Serving,
    copy_engine,
    find_serving,
    server_name,
    write_client,
)
from vitdeploy.embed.source import Embedded, find_embedded, render
from vitdeploy.spec import TensorSpec

BACKENDS = {"onnxruntime-cpu": "onnxruntime", "openvino-cpu": "openvino"}
TYPES = {
    **{"bool": "TYPE_BOOL", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64"},
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
}
SERVER = "NVIDIA's Triton Inference Server"
PORT = 8000
START = (
    f'docker run --rm -d -p {PORT}:8000 -v "$PWD/models:/models" nvcr.io/nvidia/tritonserver:YY.MM-py3'
    " tritonserver --model-repository=/models"
)


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a model repository; gives the commands that serve and test it.

    Raises as `source.find_embedded` and `layout.find_serving`.
    """
    found = find_embedded(folder, tuple(BACKENDS), TASKS, "Triton")
    serving = find_serving(found)
    write_repository(found, serving, out / "models")
    why = (*serving.measured, serving.batching)
    write_client(found, serving, out, server=SERVER, start=START, port=PORT, why=why, settings="models/*/config.pbtxt")
    return [START, f"python client.py --url localhost:{PORT}"]


def write_repository(found: Embedded, serving: Serving, models: Path) -> None:
    """`models/<name>/config.pbtxt`, and the engine in `models/<name>/1/`."""
    name = server_name(found)
    copy_engine(found, models / name / VERSION)
    facts: dict[str, object] = {
        "name": name,
        "backend": BACKENDS[found.engine.target],
        "serving": serving,
        "inputs": [_tensor(each, serving) for each in found.engine.inputs],
        "outputs": [_tensor(each, serving) for each in found.engine.outputs],
    }
    (models / name / "config.pbtxt").write_text(render(TEMPLATES, "config.pbtxt.jinja", facts), encoding="utf-8")


def _tensor(spec: TensorSpec, serving: Serving) -> dict[str, object]:
    """A tensor's entry. The dimensions exclude the batch if Triton makes the batches; -1 is any length."""
    shape = spec.shape[1:] if serving.max_batch else spec.shape
    return {"name": spec.name, "type": TYPES[spec.dtype], "dims": [d if isinstance(d, int) else -1 for d in shape]}
