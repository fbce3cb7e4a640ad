"""Reads ONNX Runtime's profile of a session: which kernels ran, in which precision, for how long."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.errors import EngineError
from vitdeploy.publish import native_writes
from vitdeploy.runtime.ort import first_line

INT8_KERNELS = {
    "MatMulIntegerToFloat",
    "QLinearMatMul",
    "QLinearConv",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "ConvInteger",
}
FLOAT_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
# Ours are of 4 bits, and no graph with operators that others quantized is taken.
INT4_KERNELS = {"MatMulNBits"}
FLOAT_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcFusedConv"}
# Types of a profile by the precision that they are.
TYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "int8", "int8": "int8"}
SUFFIX = "_kernel_time"

Event = dict[str, Any]


def run_profiled(session: Any, feeds: Mapping[str, Any]) -> list[Event]:
    """The kernel events of one run of a session that was opened with a profile; its file goes.

    Raises:
        EngineError: the run fails.
    """
    try:
        session.run(None, dict(feeds))
    except Exception as error:
        end_profile(session)
        raise EngineError("ONNX Runtime fails on the graph", found=first_line(error)) from None
    return end_profile(session)


def end_profile(session: Any) -> list[Event]:
    """The kernel events of all runs of such a session, in the order of time; its file goes.

    Raises:
        StorageError: the disk had no room for it.
    """
    path = Path(session.end_profiling())
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    with native_writes(path.parent, len(text)):  # a full disk cuts it off
        events = json.loads(text)
    return [e for e in events if e.get("cat") == "Node" and e["name"].endswith(SUFFIX)]


def precision_of(event: Event) -> str:
    """The precision that a kernel ran in: INT8 or INT4 of those that multiply such weights, else that of its first
    input."""
    if event["args"]["op_name"] in INT8_KERNELS:
        return "int8"
    if event["args"]["op_name"] in INT4_KERNELS:
        return "int4"
    first = next((name for entry in event["args"].get("input_type_shape", []) for name in entry), "float")
    return TYPES.get(first, first)
