"""ONNX Runtime's own quantizers on the float export, as its guide recommends for x86 with VNNI.

https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from child import Payload, package_versions, peak_mb, serve
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quant_pre_process,
    quantize_dynamic,
    quantize_static,
)


class Images(CalibrationDataReader):
    """The calibration images one by one."""

    def __init__(self, file: Path, name: str) -> None:
        self.feeds: Iterator[dict[str, np.ndarray]] = iter(
            {name: image[None]} for image in np.load(file, mmap_mode="r")
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def work(payload: Payload) -> Payload:
    data, folder = Path(payload["data_folder"]), Path(payload["folder"])
    graph, out, prepared = data / "model.onnx", folder / "model.onnx", folder / "prepared.onnx"
    start = time.perf_counter()
    if payload["method"] == "dynamic":
        quantize_dynamic(graph, out, per_channel=True, weight_type=QuantType.QInt8)
    else:
        quant_pre_process(str(graph), str(prepared))
        quantize_static(
            prepared,
            out,
            Images(data / "calibration.npy", payload["input"]),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=payload.get("operators"),
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        prepared.unlink()
    return {
        "seconds": time.perf_counter() - start,
        "peak_mb": peak_mb(),
        "versions": package_versions(("onnxruntime", "onnx")),
        "run": {"kind": "onnxruntime", "file": str(out)},
    }


if __name__ == "__main__":
    serve(work)
