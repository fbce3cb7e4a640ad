"""The float export on OpenVINO's execution provider of ONNX Runtime: nothing to make."""

from __future__ import annotations

from pathlib import Path

import onnxruntime_ep_openvino  # noqa: F401  (not installed: said here)
from child import Payload, package_versions, peak_mb, serve


def work(payload: Payload) -> Payload:
    run = {
        "kind": "openvino-ep",
        "environment": "openvino-ep",
        "file": str(Path(payload["data_folder"]) / "model.onnx"),
        "shape": [*payload["preprocess"]["crop"], 3],
        "dtype": "uint8",
    }
    versions = package_versions(("onnxruntime", "onnxruntime-ep-openvino"))
    return {"seconds": None, "peak_mb": peak_mb(), "versions": versions, "run": run}


if __name__ == "__main__":
    serve(work)
