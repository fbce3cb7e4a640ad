"""The table of `benchmarks/int8_peers.py`: what it says of measurements, of failures, and of real engines."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
MODULES = ("catalog", "kernels", "measure", "table")
ROWS, WIDTH, HIDDEN = 16, 64, 128


@pytest.fixture(scope="module")
def peers() -> Any:
    """The benchmark's modules, which are scripts: they find each other beside themselves."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(FOLDER))


def session(latencies: dict[str, list[float]]) -> dict[str, Any]:
    """A benchmark run as `measure.run` keeps it: a round for each latency (ms), of one query."""
    entries = {
        name: {
            "provider": "CPU",
            "load_seconds": 1.0,
            "first_inference_ms": 9.0,
            "rounds": [{"latencies_ms": [value], "seconds": value / 1e3} for value in values],
        }
        for name, values in latencies.items()
    }
    return {"load_average": 0.0, "cpus": 2, "rounds": len(next(iter(latencies.values()))), "entries": entries}


def artifact(**accuracy: Any) -> dict[str, Any]:
    return {"seconds": 30.0, "peak_mb": 500.0, "macs": {"int8": 95, "fp32": 5}, "accuracy": accuracy or None}


def test_rounds_of_several_sessions_are_one_measurement(peers: Any) -> None:
    first, second = session({"a": [1.0, 2.0], "b": [2.0, 4.0], "c": [1.0, 1.0]}), session({"a": [3.0], "b": [6.0]})
    found = peers.measure.summary(peers.measure.SCENARIOS["single"], [first, second, session({"d": [1.0]})], threads=2)
    assert found["rounds"] == {"a": 3, "b": 3, "c": 2, "d": 1}
    assert found["rows"]["a"]["latency_ms"]["p50"] == 2.0
    ratios = {(each["a"], each["b"]): each for each in found["ratios"]}
    assert ratios["a", "b"]["ratio"] == pytest.approx(0.5)
    assert ratios["a", "b"]["ci95"] == pytest.approx([0.5, 0.5])
    assert ratios["a", "c"]["ratio"] == pytest.approx(2**0.5)  # of the first session's rounds: 1 / 1 and 2 / 1
    assert not any("d" in pair for pair in ratios)  # it met nobody


def test_throughput_is_compared_as_images_per_second(peers: Any) -> None:
    found = peers.measure.summary(peers.measure.SCENARIOS["offline"], [session({"a": [10.0] * 3, "b": [20.0] * 3})], 2)
    assert found["rows"]["a"]["throughput"] == pytest.approx(800)
    assert found["ratios"][0]["ratio"] == pytest.approx(2)


def test_every_artifact_has_a_row_and_a_failed_one_says_why(peers: Any) -> None:
    names = [entry.name for entry in peers.catalog.CATALOG]
    ours, nncf, dynamic = peers.catalog.OURS, peers.catalog.NNCF, peers.catalog.DYNAMIC
    judged = {"top1": 83.0, "drop": 0.05, "drop_ci95": (-0.5, 0.6), "agreement": 98.0, "agreement_ci95": (97.0, 98.7)}
    artifacts = {name: artifact(**judged, kl=0.01) for name in names} | {dynamic: {"error": "onnx is not installed"}}
    latencies = {name: [2.0 if name == ours else 4.0] * 3 for name in names if name != dynamic}
    model = {
        "checkpoint": True,
        "calibration_images": 128,
        "evaluation_images": 872,
        "artifacts": artifacts,
        "measured": {"single": peers.measure.summary(peers.measure.SCENARIOS["single"], [session(latencies)], 2)},
        "rate": None,
    }
    goals = peers.table.goals({"tiny": model})
    verdicts = {goal["goal"]: goal["verdict"] for goal in goals}
    assert verdicts[f"{ours}: agreement with FP32"] == "miss"
    assert verdicts[f"{ours}: top-1 drop"] == "pass"
    assert verdicts[f"latency, batch 1: {ours} / {nncf}"] == "pass"
    assert verdicts[f"images/s, batch 8: {peers.catalog.OURS_8} / {nncf}"] == "not measured"
    speed = {goal["goal"]: goal["verdict"] for goal in peers.table.goals({"base": {**model, "checkpoint": False}})}
    assert speed[f"latency, batch 1: {peers.catalog.OURS_ORT} / {dynamic}"] == "not measured"
    results = {"command": "c", "host": {"cpu": "x", "isa": "y"}, "threads": 2, "versions": {"onnx": "1"}}
    lines = peers.table.markdown({**results, "models": {"tiny": model}, "goals": goals}).splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines}
    assert set(names) <= set(rows)
    assert "onnx is not installed" in rows[dynamic]
    for text in ("98.00 [97.00, 98.70]", "2.00", "0.50 [0.50, 0.50]", "95.0 %"):
        assert text in rows[ours]
    assert len({line.count("|") for line in rows.values() if line.startswith("| ") and "artifact" not in line}) <= 2


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two linears and a product of activations, the first linear in INT8; and the same in float."""
    folder = tmp_path_factory.mktemp("graphs")
    generator = np.random.default_rng(0)
    first = generator.standard_normal((WIDTH, HIDDEN)).astype(np.float32)
    second = generator.standard_normal((HIDDEN, WIDTH)).astype(np.float32)
    constants = {
        "w8": np.clip(first * 30, -127, 127).astype(np.int8),
        "w2": second,
        "s": np.float32(0.03),
        "z": np.uint8(128),
        "zw": np.int8(0),
        "w1": first,
    }
    tail = [
        helper.make_node("MatMul", ["h", "w2"], ["y"]),
        helper.make_node("Transpose", ["y"], ["t"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["y", "t"], ["out"]),
    ]
    placed = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("DequantizeLinear", ["w8", "s", "zw"], ["w"]),
        helper.make_node("MatMul", ["d", "w"], ["h"]),
    ]
    paths = {}
    for name, head in (("int8", placed), ("float", [helper.make_node("MatMul", ["x", "w1"], ["h"])])):
        used = {value for node in (*head, *tail) for value in node.input}
        graph = helper.make_graph(
            [*head, *tail],
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", ROWS, WIDTH])],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["batch", ROWS, ROWS])],
            [numpy_helper.from_array(np.asarray(value), key) for key, value in constants.items() if key in used],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        paths[name] = folder / f"{name}.onnx"
        onnx.save(model, paths[name])
    return paths


def test_int8_is_counted_from_the_engine(peers: Any, graphs: dict[str, Path]) -> None:
    each = ROWS * WIDTH * HIDDEN
    # OpenVINO takes BF16 for the rest where the CPU has it, unless told otherwise.
    for kind, options in ((OpenVinoRunner, {"options": {"INFERENCE_PRECISION_HINT": "f32"}}), (OnnxRuntimeRunner, {})):
        with kind(graphs["int8"], name="tiny", batch=1, **options) as runner:
            assert peers.kernels._totals(peers.kernels._layers(runner)) == {"int8": each, "fp32": each}, kind


def test_executed_multiplications_include_products_of_activations(peers: Any, graphs: dict[str, Path]) -> None:
    assert peers.kernels.float_macs(graphs["float"]) == 2 * ROWS * WIDTH * HIDDEN + ROWS * WIDTH * ROWS
