"""The float export on OpenVINO in BF16: nothing to make, but only CPUs that have BF16 can run it."""

from __future__ import annotations

from pathlib import Path

from child import Payload, peak_mb, serve

from vitdeploy.runtime.openvino import PRECISION_HINTS, require


def work(payload: Payload) -> Payload:
    available = require().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if "BF16" not in available:
        return {"error": f"not available: OpenVINO has no BF16 on this CPU (it has {', '.join(available)})"}
    options = {"INFERENCE_PRECISION_HINT": PRECISION_HINTS["bf16"]}
    file = Path(payload["data_folder"]) / "model.onnx"
    return {"seconds": None, "peak_mb": peak_mb(), "run": {"kind": "openvino", "file": str(file), "options": options}}


if __name__ == "__main__":
    serve(work)
