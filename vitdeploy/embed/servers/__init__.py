"""Model repositories for inference servers: the engine, settings from the benchmark, a client with golden answers.

Sources: Triton's model repository and model configuration, `model_config.proto` of triton-inference-server/common, and
the README of triton-inference-server/openvino_backend; OpenVINO Model Server, "Model Server Parameters"
(model_config_list, base_path relative to the file, nireq, plugin_config); KServe's API, `serving.kserve.io/v1beta1`
InferenceService (predictor.model: modelFormat, runtime, protocolVersion, storageUri, resources) and `v1alpha1`
ServingRuntime, with its own runtime `kserve-tritonserver`.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy import __version__
from vitdeploy.embed.source import Embedded, find_embedded, render
from vitdeploy.errors import ManifestError
from vitdeploy.runtime.openvino import PRECISION_HINTS
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask
from vitdeploy.spec import TensorSpec

TEMPLATES = Path(__file__).parent
REPORT_FILE = "report.json"
MANIFEST = "inference-service.yaml"
VERSION = "1"  # the server's version number of the model
PORT = 8000
TYPES = {
    **{"bool": "TYPE_BOOL", "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64"},
    **{f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
}
NO_BATCHES = "This server does not batch requests; a client may send several images in one request."


def of_one_graph(task: DeviceTask) -> bool:
    """Whether a model has one graph: servers map tensors to tensors, and do not run models of several graphs."""
    return task.flow is None


@dataclass(frozen=True)
class Serving:
    """The settings of a server for an engine, with the reasons.

    `max_batch`: 0 for a graph with a fixed batch. `delay_us`: how long a request may wait for others, in microseconds.
    `cores`, `memory_bytes`: used by the benchmark; None without one. `measured`: text on the benchmark's result;
    `batching`: text on the resulting settings of a server that batches requests.
    """

    max_batch: int
    delay_us: int
    cores: int | None
    memory_bytes: int | None
    measured: tuple[str, ...]
    batching: str


def find_serving(found: Embedded) -> Serving:
    """Return the settings of a server, from this engine's benchmark in the bundle's report.

    Raises:
        ManifestError: the report is invalid.
    """
    bench = _measured(found)
    try:
        offline, single = bench["scenarios"]["offline"], bench["scenarios"]["single"]
        gain = offline["throughput"] / single["throughput"]
        cores, memory = len(bench["machine"]["affinity"]), int(bench["peak_memory_bytes"])
        batch, each_us = int(offline["batch"]), round(1000 * float(bench["latency_ms"]["p50"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        none = f"{found.engine.artifact} was not benchmarked in the single and offline scenarios."
        return Serving(
            int(found.engine.dynamic_batch), 0, None, None, (none,), "Batches were not measured, so batching is off."
        )
    measured = (
        f"{REPORT_FILE}: {found.engine.artifact} processed {single['throughput']:.1f} images/s one by one and "
        f"{offline['throughput']:.1f} in batches of {batch}.",
        f"It used {cores} cores and {memory / 1e6:.0f} MB.",
    )
    if not found.engine.dynamic_batch:
        return Serving(0, 0, cores, memory, measured, f"The graph has a fixed batch of {found.engine.batch}.")
    if gain <= 1:
        return Serving(1, 0, cores, memory, measured, "Batches are not faster, so batching is off.")
    wait = f"A request waits for others at most {each_us} microseconds, the time of one image (p50)."
    return Serving(batch, each_us, cores, memory, measured, wait)


def _measured(found: Embedded) -> dict[str, Any]:
    """Return the benchmark of the embedded engine; empty without one. The file's digest was checked before."""
    if REPORT_FILE not in {entry.path for entry in found.manifest.files}:
        return {}
    path = found.folder / REPORT_FILE
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["bench"]["results"]
        return next((dict(result) for result in results if result["artifact"] == found.engine.artifact), {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path} is not a vitdeploy report", found=repr(error)[:200]) from None


def server_name(found: Embedded) -> str:
    """Return the bundle's name in a form that all servers, Kubernetes and paths accept: a-z, 0-9 and hyphens, starting
    with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", found.manifest.name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".strip("-")


def copy_engine(found: Embedded, folder: Path) -> None:
    """Copy the engine's files: the first as `model.onnx` or `model.xml`, weights under the names used in the graph."""
    folder.mkdir(parents=True)
    first, *others = found.engine.files
    shutil.copyfile(found.folder / first, folder / f"model{Path(first).suffix}")
    home = Path(first).parent
    weights = (
        [path.name for path in sorted((found.folder / home).glob("*.onnx.data"))] if first.endswith(".onnx") else []
    )
    for file in (*others, *(str(home / name) for name in weights)):
        shutil.copyfile(found.folder / file, folder / Path(file).name)


def _write_client(found: Embedded, serving: Serving, out: Path, **facts: object) -> None:
    """Write `client.py`, its inputs and expected outputs, and `README.md`.

    The only text from the bundle is its name, sanitised by `server_name`: a bundle is untrusted.
    """
    (out / "golden").mkdir()
    (tensor,), spec = found.engine.inputs, found.preprocess
    np.savez(out / "golden/inputs.npz", **{tensor.name: to_input(found.pixels, found.preprocess, tensor)})  # type: ignore[arg-type]
    np.savez(out / "golden/outputs.npz", **found.outputs)  # type: ignore[arg-type]
    np.savez(out / "golden/original.npz", **found.original)  # type: ignore[arg-type]
    common: dict[str, object] = {
        "model": server_name(found),
        "artifact": found.engine.artifact,
        "digest": found.digest,
        "version": __version__,
        "tolerance": found.tolerance,
        "least_same": found.least_same,
        "first": isinstance(found.form, forms.RankingForm),
        "images": len(found.pixels),
        "dtype": tensor.dtype,
        "shape": ["batch", *tensor.shape[1:]],
        "batch": serving.max_batch or found.engine.batch,
        "crop": found.preprocess.crop,
        "form": spec.normalisation if tensor.dtype != "uint8" else "RGB" if spec.channels == 3 else "grey",
        "manifest": None,  # of Kubernetes
    }
    for name, template in (("client.py", "client.py.jinja"), ("README.md", "README.md.jinja")):
        (out / name).write_text(render(TEMPLATES, template, {**common, **facts}), encoding="utf-8")


# --- The servers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelServer:
    """A server that reads a model repository. `called`: its name in errors; `name`: in the README; `backends`: its
    names for supported targets; `settings`: the settings files; `start`: the command that runs it on ./models.
    """

    called: str
    name: str
    backends: dict[str, str]
    settings: str
    start: str
    write_repository: Callable[[Embedded, Serving, Path], None]
    makes_batches: bool

    def write(self, folder: Path, out: Path) -> list[str]:
        """Fill the empty folder `out` with a model repository; return the commands to serve and test it.

        Raises errors as `source.find_embedded` and `find_serving`.
        """
        embedded = find_embedded(folder, tuple(self.backends), self.called, of_one_graph)
        serving = find_serving(embedded)
        self.write_repository(embedded, serving, out / "models")
        facts = {"server": self.name, "start": self.start, "port": PORT, "settings": self.settings}
        _write_client(embedded, serving, out, why=self.why(serving), **facts)
        return [self.start, f"python client.py --url localhost:{PORT}"]

    def why(self, serving: Serving) -> tuple[str, ...]:
        return (*serving.measured, serving.batching if self.makes_batches else NO_BATCHES)


def _triton_repository(found: Embedded, serving: Serving, models: Path) -> None:
    """Write `models/<name>/config.pbtxt`, and the engine in `models/<name>/1/`."""
    name = server_name(found)
    copy_engine(found, models / name / VERSION)
    facts: dict[str, object] = {
        "name": name,
        "backend": TRITON.backends[found.engine.target],
        "serving": serving,
        "inputs": [_tensor(tensor, serving) for tensor in found.engine.inputs],
        "outputs": [_tensor(tensor, serving) for tensor in found.engine.outputs],
    }
    (models / name / "config.pbtxt").write_text(render(TEMPLATES, "config.pbtxt.jinja", facts), encoding="utf-8")


def _tensor(spec: TensorSpec, serving: Serving) -> dict[str, object]:
    """Return a tensor's entry. The dimensions exclude the batch if Triton batches requests; -1 is any length."""
    shape = spec.shape[1:] if serving.max_batch else spec.shape
    return {"name": spec.name, "type": TYPES[spec.dtype], "dims": [d if isinstance(d, int) else -1 for d in shape]}


def _ovms_repository(found: Embedded, serving: Serving, models: Path) -> None:
    """Write `models/config.json`, and the engine in `models/<name>/1/`."""
    name = server_name(found)
    copy_engine(found, models / name / VERSION)
    plugin = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": PRECISION_HINTS[found.engine.precision]}
    plugin.update(found.engine.options)
    config = {"name": name, "base_path": name, "target_device": "CPU", "nireq": 1, "plugin_config": plugin}
    document = {"model_config_list": [{"config": config}]}
    (models / "config.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


RUN = f'docker run --rm -d -p {PORT}:8000 -v "$PWD/models:/models"'
TRITON = ModelServer(
    "Triton",
    "NVIDIA's Triton Inference Server",
    {"onnxruntime-cpu": "onnxruntime", "openvino-cpu": "openvino"},
    "models/*/config.pbtxt",
    f"{RUN} nvcr.io/nvidia/tritonserver:YY.MM-py3 tritonserver --model-repository=/models",
    _triton_repository,
    True,
)
OVMS = ModelServer(
    "OpenVINO Model Server",
    "Intel's OpenVINO Model Server",
    {"openvino-cpu": "openvino_ir"},
    "models/config.json",
    f"{RUN} openvino/model_server:latest --config_path /models/config.json --rest_port 8000",
    _ovms_repository,
    False,
)
write_triton, write_ovms = TRITON.write, OVMS.write


def write_kserve(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a model repository for Triton or OpenVINO Model Server, and its
    `InferenceService`; return the commands to deploy it.

    Raises errors as `source.find_embedded` and `find_serving`.
    """
    embedded = find_embedded(folder, tuple(TRITON.backends), "KServe", of_one_graph)
    serving, name = find_serving(embedded), server_name(embedded)
    server = OVMS if embedded.engine.target in OVMS.backends else TRITON
    server.write_repository(embedded, serving, out / "models")
    facts: dict[str, object] = {"name": name, "with_ovms": server is OVMS, "serving": serving}
    (out / MANIFEST).write_text(render(TEMPLATES, "inference_service.yaml.jinja", facts), encoding="utf-8")
    apply = f"kubectl apply -f {MANIFEST}"
    _write_client(
        embedded,
        serving,
        out,
        server="KServe, with " + ("OpenVINO Model Server" if server is OVMS else "Triton"),
        start=f"{apply}\nkubectl port-forward service/{name}-predictor 8080:80 &",
        port=8080,
        why=server.why(serving),
        settings=f"{MANIFEST} and models/",
        manifest=MANIFEST,
    )
    return [apply]
