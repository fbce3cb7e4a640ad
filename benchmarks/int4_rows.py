"""INT4 weights beside INT8 and FP32, by the number of rows that are multiplied: MLPs whose weights no cache holds.

python benchmarks/int4_rows.py [--width 768] [--layers 12] [--rows 1,5,32,197] [--rounds 2] [--seconds 0.15]

A chain of MLPs (width, four times the width, with residual sums) with seeded weights is placed in each precision as
`vitdeploy quantize` does, for OpenVINO and ONNX Runtime, two threads. One process an artifact and round; shown is the
median of each, in ms, over the rounds, its ratio to INT8's, the file's size and what loading it adds to the memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

TARGETS = {"openvino-cpu": "OpenVINO", "onnxruntime-cpu": "ONNX Runtime"}
PRECISIONS = ("fp32", "int8", "int4")


def chain(width: int, layers: int, file: Path) -> None:
    """The float graph: [batch, width], where each image of the batch is a row."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator, nodes, constants, x = np.random.default_rng(0), [], [], "x"
    for i in range(layers):
        y = x
        for name, inside, outside in ((f"mlp.{i}.fc1", width, 4 * width), (f"mlp.{i}.fc2", 4 * width, width)):
            weight = generator.standard_normal((inside, outside), dtype=np.float32) * np.float32(inside**-0.5)
            constants += [numpy_helper.from_array(weight, f"{name}.w")]
            constants += [numpy_helper.from_array(np.full(outside, 0.01, np.float32), f"{name}.b")]
            nodes += [helper.make_node("MatMul", [y, f"{name}.w"], [f"{name}.p"], name=f"{name}/MatMul")]
            nodes += [helper.make_node("Add", [f"{name}.p", f"{name}.b"], [f"{name}.y"], name=f"{name}/Add")]
            y = f"{name}.y"
            if outside > inside:
                nodes += [helper.make_node("Relu", [y], [f"{name}.r"], name=f"{name}/Relu")]
                y = f"{name}.r"
        nodes += [helper.make_node("Add", [x, y], [f"mlp.{i}"], name=f"mlp.{i}/Add")]
        x = f"mlp.{i}"
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name in ("x", x)]
    graph = helper.make_graph(nodes, "chain", sides[:1], sides[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(onnx.shape_inference.infer_shapes(model), file)


def placed(file: Path, target: str, precision: str, out: Path, width: int) -> None:
    """The graph of one target in one precision, by the ranges of 64 seeded rows."""
    from vitdeploy.graph.analysis.rows import find_linears
    from vitdeploy.graph.edit import drop_unused
    from vitdeploy.graph.io.files import load_graph, save_graph
    from vitdeploy.quantization.four_bits import place_four_bits
    from vitdeploy.quantization.placement import choose, place
    from vitdeploy.quantization.prepare import prepare
    from vitdeploy.quantization.ranges import Statistics

    model, known = load_graph(file), {}
    x = hidden = np.random.default_rng(1).standard_normal((64, width), dtype=np.float32)
    for linear in find_linears(model):
        rows = x if linear.name.endswith("fc1") else hidden
        known[str(linear.input.name)] = Statistics(
            *(getattr(rows, what)(axis=0).astype(np.float64) for what in ("min", "max", "mean", "var")), rows=len(rows)
        )
        y = rows @ linear.weight + linear.bias
        if linear.name.endswith("fc1"):
            hidden = np.maximum(y, 0)
        else:
            x = x + y
    if precision == "int8":
        prepared = prepare(model, known, choose(model, target))
        place(model, prepared.ranges, target, weights=prepared.weights)
    elif precision == "int4":
        place_four_bits(model, known, target)
    drop_unused(model)
    save_graph(model, out)


def child(file: Path, target: str, rows: list[int], seconds: float) -> dict[str, Any]:
    """Medians by the number of rows, and what the memory grew by until the first answer, in MB."""
    from vitdeploy.runtime.openvino import OpenVinoRunner
    from vitdeploy.runtime.ort import OnnxRuntimeRunner

    kind, times, before, grown = (
        OpenVinoRunner if target == "openvino-cpu" else OnnxRuntimeRunner,
        dict[int, float](),
        resident(),
        0.0,
    )
    for count in rows:
        with kind(file, name="chain", batch=count, threads=2) as runner:
            name, width = runner.inputs[0].name, int(runner.inputs[0].shape[1])
            feeds = {name: np.random.default_rng(2).standard_normal((count, width), dtype=np.float32)}
            runner.infer(feeds)
            grown = grown or resident() - before
            found, end = [], time.perf_counter() + seconds
            while time.perf_counter() < end:
                start = time.perf_counter()
                runner.infer(feeds)
                found.append(time.perf_counter() - start)
            times[count] = 1e3 * statistics.median(found)
    return {"ms": times, "memory": grown}


def resident() -> float:
    """The memory of this process in MB (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind, default in (
        ("--width", int, 768),
        ("--layers", int, 12),
        ("--rows", str, "1,5,32,197"),
        ("--rounds", int, 2),
        ("--seconds", float, 0.15),
        ("--work", Path, None),
        ("--child", str, None),
        ("--target", str, ""),
    ):
        parser.add_argument(name, type=kind, default=default)
    asked = parser.parse_args()
    rows = [int(count) for count in asked.rows.split(",")]
    if asked.child:
        print(json.dumps(child(Path(asked.child), asked.target, rows, asked.seconds)))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = asked.work or Path(folder)
        work.mkdir(exist_ok=True)
        artifacts = [(target, precision) for target in TARGETS for precision in PRECISIONS]
        for target, precision in artifacts:
            if not (file := work / f"{target}-{precision}.onnx").exists():
                if not (source := work / "float.onnx").exists():
                    chain(asked.width, asked.layers, source)
                placed(source, target, precision, file, asked.width)
        measure(work, artifacts, rows, asked)


def measure(work: Path, artifacts: list[tuple[str, str]], rows: list[int], asked: argparse.Namespace) -> None:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in artifacts}
    for _ in range(asked.rounds):
        for target, precision in artifacts:
            file = work / f"{target}-{precision}.onnx"
            command = [sys.executable, __file__, "--child", str(file), "--target", target, "--rows", asked.rows]
            done = subprocess.run(
                [*command, "--seconds", str(asked.seconds)], check=True, capture_output=True, text=True
            )
            found[target, precision].append(json.loads(done.stdout))
    print("| | " + " | ".join(f"{count} row{'s' * (count > 1)}" for count in rows) + " | file | memory |")
    print("|---" * (len(rows) + 3) + "|")
    times = {
        pair: {count: statistics.median(each["ms"][str(count)] for each in found[pair]) for count in rows}
        for pair in artifacts
    }
    for target, precision in artifacts:
        own, int8 = times[target, precision], times[target, "int8"]
        cells = [f"{own[count]:.2f} ms, {own[count] / int8[count]:.2f}" for count in rows]
        size = (work / f"{target}-{precision}.onnx").stat().st_size / 1e6
        memory = statistics.median(each["memory"] for each in found[target, precision])
        print(f"| {TARGETS[target]} {precision.upper()} | {' | '.join(cells)} | {size:.0f} MB | {memory:.0f} MB |")


if __name__ == "__main__":
    main()
