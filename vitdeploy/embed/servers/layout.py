"""The common parts of all servers' folders: batching, a client, the golden answers, and text from templates."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy import __version__
from vitdeploy.embed.source import Embedded, render
from vitdeploy.errors import ManifestError
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.runtime.tasks.registry import TASKS as IMAGE_TASKS

TEMPLATES = Path(__file__).parent
REPORT_FILE = "report.json"
VERSION = "1"  # of the model, in the server's sense
# A server gives tensors for tensors, whatever they mean; a model of several graphs is not one of its models.
TASKS = tuple(task for task in IMAGE_TASKS if task not in FLOWS)


@dataclass(frozen=True)
class Serving:
    """How a server is to run an engine, and why.

    `max_batch` 0 means a graph with a fixed batch. `delay_us` is how long a request may wait for others, in
    microseconds; 0 means not at all. `cores` and `memory_bytes` are what the bench used; None if nothing was measured.
    `measured` describes the bench's result, `batching` the consequence for a server that makes batches.
    """

    max_batch: int
    delay_us: int
    cores: int | None
    memory_bytes: int | None
    measured: tuple[str, ...]
    batching: str


def find_serving(found: Embedded) -> Serving:
    """The settings of a server from this engine's bench in the bundle's report.

    Raises:
        ManifestError: the report is not one of ours.
    """
    bench = _measured(found)
    try:
        offline, single = bench["scenarios"]["offline"], bench["scenarios"]["single"]
        gain = offline["throughput"] / single["throughput"]
        cores, memory = len(bench["machine"]["affinity"]), int(bench["peak_memory_bytes"])
        batch, each_us = int(offline["batch"]), round(1000 * float(bench["latency_ms"]["p50"]))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        none = f"No bench of {found.engine.artifact} in single and offline scenarios."
        return Serving(
            int(found.engine.dynamic_batch), 0, None, None, (none,), "Batches were not measured: none are made."
        )
    measured = (
        f"{REPORT_FILE}: {found.engine.artifact} gave {single['throughput']:.1f} images/s one by one and "
        f"{offline['throughput']:.1f} in batches of {batch}.",
        f"It had {cores} cores and took {memory / 1e6:.0f} MB.",
    )
    if not found.engine.dynamic_batch:
        return Serving(0, 0, cores, memory, measured, f"The graph has a fixed batch of {found.engine.batch}.")
    if gain <= 1:
        return Serving(1, 0, cores, memory, measured, "Batches gained nothing: none are made.")
    wait = f"A request waits for others at most as long as one image takes: {each_us} microseconds (p50)."
    return Serving(batch, each_us, cores, memory, measured, wait)


def _measured(found: Embedded) -> dict[str, Any]:
    """The bench of the embedded engine; empty if there is none. The file's digest was checked before."""
    if REPORT_FILE not in {entry.path for entry in found.manifest.files}:
        return {}
    path = found.folder / REPORT_FILE
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["bench"]["results"]
        return next((dict(each) for each in results if each["artifact"] == found.engine.artifact), {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError(f"{path} is no report of vitdeploy", found=repr(error)[:200]) from None


def server_name(found: Embedded) -> str:
    """The bundle's name as all servers, Kubernetes and paths accept it: a-z, 0-9 and hyphens, starting with a
    letter."""
    name = re.sub(r"[^a-z0-9]+", "-", found.manifest.name.lower()).strip("-")[:50].strip("-")
    return name if name[:1].isalpha() else f"model-{name}".strip("-")


def copy_engine(found: Embedded, folder: Path) -> None:
    """The engine's files, the first of which is called `model.onnx` or `model.xml`; weights keep the names by which
    the graph knows them."""
    folder.mkdir(parents=True)
    first, *others = found.engine.files
    shutil.copyfile(found.folder / first, folder / f"model{Path(first).suffix}")
    home = Path(first).parent
    weights = (
        [path.name for path in sorted((found.folder / home).glob("*.onnx.data"))] if first.endswith(".onnx") else []
    )
    for file in (*others, *(str(home / name) for name in weights)):
        shutil.copyfile(found.folder / file, folder / Path(file).name)


def write_client(found: Embedded, serving: Serving, out: Path, **facts: object) -> None:
    """Write `client.py`, what it sends and must receive, and a `README.md`.

    The only text of the bundle in them is its name, by `server_name`: a bundle may come from anywhere.
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
        "first": found.manifest.task == "classification",
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
