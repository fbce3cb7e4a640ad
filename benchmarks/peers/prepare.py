"""What all artifacts of one model share: the float export, and the images as pixels. Run as a child process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from child import Payload, serve
from kernels import float_macs

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.pipeline.job import Job, export_config_of
from vitdeploy.pipeline.job import prepare as prepare_job
from vitdeploy.progress import silent
from vitdeploy.recipe.load import validate
from vitdeploy.spec import encode
from vitdeploy.stages.export import export
from vitdeploy.stages.step import MODEL_FILE
from vitdeploy.tasks.images import labels_in


def job_of(
    model: Payload,
    *,
    evaluation: int | str,
    target: str = "onnxruntime-cpu",
    precision: str = "fp32",
    optimize: Payload | None = None,
    budget: Payload | None = None,
    **further: Any,
) -> Job:
    """The project's own job for the model of the payload ("name", "checkpoint", "data", "images").

    Args:
        optimize, budget: the recipe's sections of these names.
        further: other values of the recipe.
    """
    source = {"model": model["name"]} | ({"checkpoint": model["checkpoint"]} if model["checkpoint"] else {})
    values: dict[str, Any] = {
        "vitdeploy": 1,
        "name": "peers",
        "source": source,
        "data": {
            "path": model["data"],
            "labels": labels_in(Path(model["data"])),
            "calibration": {"images": model["images"]},
            "evaluation": {"images": evaluation},
            "seed": 0,
        },
        "optimize": optimize or {},
        "budget": budget or {},
        "precision": precision,
        "targets": [target],
        "bench": {"batch": [1, 8]},
        **further,
    }
    return prepare_job(validate(values, "int8_peers"), skip_bad=False, progress=silent)[0]


def sha256(file: Path) -> str:
    """The digest of a graph as peers see it: without the metadata, in which this project keeps its own facts."""
    model = onnx.load(str(file))
    del model.metadata_props[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def work(payload: Payload) -> Payload:
    out = Path(payload["folder"])
    out.mkdir(parents=True, exist_ok=True)
    accuracy = bool(payload["model"]["checkpoint"])
    job = job_of(payload["model"], evaluation="all" if accuracy else 1)
    export(job.reference_model, export_config_of(job.recipe), out)
    _save(out / "calibration", job.data.calibration, job)
    if accuracy:
        _save(out / "evaluation", job.data.evaluation, job)
    return {
        "preprocess": encode(job.reference_model.images),
        "parameters": job.reference_model.parameters,
        "calibration_images": len(job.data.calibration),
        "evaluation_images": len(job.data.evaluation) if accuracy else 0,
        "export_sha256": sha256(out / MODEL_FILE),
        "macs_executed": float_macs(out / MODEL_FILE),
        "input": onnx.load(str(out / MODEL_FILE), load_external_data=False).graph.input[0].name,
    }


def _save(stem: Path, samples: list[Sample], job: Job) -> None:
    """<stem>.npy, uint8 [n, height, width, channels]; and <stem>_labels.npy, int64 [n], where there are labels."""
    np.save(stem.with_suffix(".npy"), np.concatenate(list(batches(samples, job.reference_model.images, 64))))
    if all(sample.label is not None for sample in samples):
        np.save(stem.with_name(f"{stem.name}_labels.npy"), np.array([sample.label for sample in samples], np.int64))


if __name__ == "__main__":
    serve(work)
