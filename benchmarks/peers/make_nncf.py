"""NNCF's INT8 of the float export, as OpenVINO's guide for transformers has it. Needs nncf and openvino only.

https://docs.openvino.ai/2026/openvino-workflow/model-optimization-guide/quantizing-models-post-training.html
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
from child import Payload, package_versions, peak_mb, serve


def work(payload: Payload) -> Payload:
    data, folder = Path(payload["data_folder"]), Path(payload["folder"])
    pixels = np.load(data / "calibration.npy", mmap_mode="r")
    dataset = nncf.Dataset(range(len(pixels)), lambda i: np.ascontiguousarray(pixels[i : i + 1]))
    model = openvino.Core().read_model(str(data / "model.onnx"))
    options = {"model_type": nncf.ModelType.TRANSFORMER, "subset_size": len(pixels)}
    start = time.perf_counter()
    if payload["accuracy_control"]:
        labels = np.load(data / "calibration_labels.npy")
        validation = nncf.Dataset([(pixels[i : i + 1], labels[i]) for i in range(len(labels))])
        quantized = nncf.quantize_with_accuracy_control(model, dataset, validation, _top1, **options)
    else:
        quantized = nncf.quantize(model, dataset, **options)
    seconds = time.perf_counter() - start
    peak = peak_mb()
    openvino.save_model(quantized, str(folder / "model.xml"), compress_to_fp16=False)
    return {
        "seconds": seconds,
        "peak_mb": peak,
        "versions": package_versions(("nncf", "openvino")),
        "run": {"kind": "openvino", "file": str(folder / "model.xml"), "options": {}},
    }


def _top1(model: Any, items: Any) -> tuple[float, None]:
    """The share of right answers. Accuracy control compiles the model; it may also hand over a plain one."""
    right = [int(model(np.ascontiguousarray(image))[0].argmax()) == label for image, label in items]
    return float(np.mean(right)), None


if __name__ == "__main__":
    serve(work)
