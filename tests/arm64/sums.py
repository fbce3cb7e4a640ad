"""Do INT8 products saturate on a board? The largest sums there are, of each runtime's own INT8 operators.

Every activation is 0 or 255, every weight 127 or -127: on x86 without VNNI such sums are wrong
(tests/quantization/test_weight_bits.py, where OpenVINO is told to do without), with 7 bits they are right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.graph.builder import Builder

DEPTH, COLUMNS, STEP = 192, 48, 0.5
DOMAIN = "com.microsoft"


def weights() -> np.ndarray:
    """int8 [DEPTH, COLUMNS]: all 127, all -127, both in turns, and both at random."""
    columns = np.random.default_rng(0).choice(np.array([-127, 127], np.int8), (DEPTH, COLUMNS))
    columns[:, 0], columns[:, 1], columns[:, 2] = 127, -127, np.tile([127, -127], DEPTH // 2)
    return columns


def write_graphs(folder: Path) -> None:
    """weights.npy, and `<target>-<zero point>.onnx`: x float32 [1, 8, DEPTH], rounded to uint8 with step 1, times
    `weights` times STEP."""
    writers: dict[str, Callable[[Builder, str, int], str]] = {
        "onnxruntime-cpu": _for_onnxruntime,
        "openvino-cpu": _for_openvino,
    }
    np.save(folder / "weights.npy", weights())
    for target, writer in writers.items():
        for zero_point in (0, 128):
            b = Builder()
            product = writer(b, b.input("x", [1, 8, DEPTH]), zero_point)
            proto = b.model(product, domains=[DOMAIN] if target == "onnxruntime-cpu" else [])
            (folder / f"{target}-{zero_point}.onnx").write_bytes(proto.SerializeToString())


def _for_onnxruntime(b: Builder, x: str, zero_point: int) -> str:
    quantized = b.add("QuantizeLinear", x, np.float32(1), np.uint8(zero_point))
    steps, zeros = np.full(COLUMNS, STEP, np.float32), np.zeros(COLUMNS, np.int8)
    operands = (quantized, weights(), np.float32(1), steps, np.uint8(zero_point), zeros)
    return str(b.add("MatMulIntegerToFloat", *operands, domain=DOMAIN))


def _for_openvino(b: Builder, x: str, zero_point: int) -> str:
    quantized = b.add("QuantizeLinear", x, np.float32(1), np.uint8(zero_point))
    rows = b.add("DequantizeLinear", quantized, np.float32(1), np.uint8(zero_point))
    columns = b.add("DequantizeLinear", weights(), np.full(COLUMNS, STEP, np.float32), axis=1)
    return str(b.add("MatMul", rows, columns))
