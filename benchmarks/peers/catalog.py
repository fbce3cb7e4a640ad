"""What is compared: every artifact of one model, in the order of the table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# What goals are about: what `vitdeploy run` makes without an option; and the schedule of merging.
OURS, OURS_ORT = "vitdeploy-openvino-int8", "vitdeploy-onnxruntime-int8"
MERGED = f"{OURS}-tokens-192-128"
OURS_8, OURS_ORT_8 = f"{OURS}-batch-8", f"{OURS_ORT}-batch-8"
NNCF, DYNAMIC, EAGER = "nncf", "ort-dynamic", "pytorch"


@dataclass(frozen=True)
class Entry:
    """One artifact: `script` and `options` make it, `note` says what it is.

    `labelled`: it needs labels of the calibration images, and weights that mean something. `environment`: the virtual
    environment that it is made in; "" for this project's.
    """

    name: str
    precision: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    labelled: bool = False
    environment: str = ""


def _ours(
    target: str, precision: str, suffix: str = "", note: str = "", *, labelled: bool = False, **changes: Any
) -> Entry:
    name = f"vitdeploy-{target.removesuffix('-cpu')}-{precision}{suffix}"
    options = {"target": target, "precision": precision, "batches": [1, 8], "plain": False, "merging": {}, "budget": {}}
    options["runtime"] = ""  # not the target's, for the graph with INT8 in it
    return Entry(name, precision, "make_vitdeploy.py", {**options, **changes}, note or "this project", labelled)


CATALOG = (
    _ours("openvino-cpu", "int8", note="as `vitdeploy run` makes it"),
    _ours("openvino-cpu", "int8", "-batch-8", "as `vitdeploy run` makes it for batch 8", batches=[8]),
    _ours("openvino-cpu", "int8", "-plain", "every layer in plain INT8, the rows together", plain=True),
    *(
        _ours(
            *(f"{runtime}-cpu", "mixed", "", f"as many layers fixed as an agreement of {least} % needs"),
            budget={"min_agreement": least},
            labelled=True,
        )
        for runtime, least in (("openvino", 99.0), ("onnxruntime", 98.5))
    ),
    _ours("openvino-cpu", "int8", "-tokens-192", "tokens merged to 192 in block 1", merging={1: 192}),
    _ours(
        *("openvino-cpu", "int8", "-tokens-192-128", "tokens merged to 192 in block 1 and to 128 in block 6"),
        merging={1: 192, 6: 128},
    ),
    _ours("onnxruntime-cpu", "int8", note="as `vitdeploy run` makes it"),
    _ours("onnxruntime-cpu", "int8", "-batch-8", "as `vitdeploy run` makes it for batch 8", batches=[8]),
    _ours("onnxruntime-cpu", "int8", "-plain", "every layer that has it in plain INT8", plain=True),
    *(
        _ours(
            *(f"{runtime}-cpu", "int8", f"-on-{other}", f"its graph in plain INT8, the file as it is, on {other}"),
            plain=True,
            runtime=other,
        )
        for runtime, other in (("openvino", "onnxruntime"), ("onnxruntime", "openvino"))
    ),
    _ours("openvino-cpu", "fp32"),
    _ours("onnxruntime-cpu", "fp32"),
    Entry(
        NNCF,
        "int8",
        "make_nncf.py",
        {"accuracy_control": False},
        "nncf.quantize, TRANSFORMER, on OpenVINO",
        environment="nncf",
    ),
    Entry(
        "nncf-accuracy",
        "int8",
        "make_nncf.py",
        {"accuracy_control": True},
        "nncf.quantize_with_accuracy_control, top-1 of the calibration images",
        labelled=True,
        environment="nncf",
    ),
    Entry(DYNAMIC, "int8", "make_onnxruntime.py", {"method": "dynamic"}, "quantize_dynamic, per channel"),
    Entry(
        "ort-static",
        "int8",
        "make_onnxruntime.py",
        {"method": "static"},
        "quant_pre_process, quantize_static QDQ U8S8, per channel",
    ),
    Entry(
        "ort-static-linears",
        "int8",
        "make_onnxruntime.py",
        {"method": "static", "operators": ["MatMul", "Gemm"]},
        "the same, MatMul and Gemm only",
    ),
    Entry(
        "pytorch-pt2e",
        "int8",
        "make_pt2e.py",
        {"backend": "pt2e"},
        "X86InductorQuantizer, static, per channel, by torch.compile with freezing",
        environment="pt2e",
    ),
    Entry(
        "executorch",
        "int8",
        "make_pt2e.py",
        {"backend": "executorch"},
        "XNNPACKQuantizer, dynamic, per channel; its runtime holds the GIL, so streams take turns",
        environment="executorch",
    ),
    Entry(
        "ort-openvino",
        "fp32",
        "make_openvino_ep.py",
        {},
        "the float export on ONNX Runtime's OpenVINO provider",
        environment="openvino-ep",
    ),
    Entry("openvino-bf16", "bf16", "make_bf16.py", {}, "the float export on OpenVINO in BF16"),
    Entry(EAGER, "fp32", "make_torch.py", {"mode": "eager"}, "PyTorch eager"),
    Entry("pytorch-compile", "fp32", "make_torch.py", {"mode": "compile"}, "torch.compile"),
    Entry("pytorch-bf16", "bf16", "make_torch.py", {"mode": "bfloat16"}, "PyTorch eager, weights and input bfloat16"),
)
