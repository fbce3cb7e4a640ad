"""What a latency is held against: rates of the machine in a runtime, memory, layers; and what is left out, and why."""

import dataclasses
import sys

import numpy as np
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.benchmark import gemm, survey
from vitdeploy.benchmark.context import Context, Memory
from vitdeploy.benchmark.gemm import best_rate, copy_rate, last_level_cache
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate
from vitdeploy.benchmark.survey import plan, precisions_of, surveyed
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.openvino import require
from vitdeploy.spec import EngineSpec, decode, encode

IMAGE = ()
FP32 = EngineSpec("onnxruntime-cpu", "fp32", "graph.onnx", ("graph.onnx",), 1, True, "CPU", IMAGE, IMAGE, {"fp32": 9})
INT8 = dataclasses.replace(FP32, precision="int8", kernels={"int8": 8, "fp32": 1})
HALF = EngineSpec(
    *("openvino-cpu", "bf16", "graph.onnx", ("model.xml",), 1, True, "CPU", IMAGE, IMAGE, {"bf16": 9}),
    options={"INFERENCE_PRECISION_HINT": "bf16"},
)
ORIGINAL = BenchCandidate("original", "original", "fp32", (), {"source": {}})
KERNELS = {"onnxruntime-cpu": {"int8": "QLinearMatMul", "fp32": "MatMul"}, "openvino-cpu": {}}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(gemm, "SHAPES", ((16, 64), (32, 64)))


class Clock:
    """A clock in the place of `time`, which moves on by as much at each look."""

    def __init__(self, step):
        self.step, self.now = step, 0.0

    def perf_counter(self):
        self.now += self.step
        return self.now


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_rate_is_of_kernels_of_its_precision(small, target, precision):
    pytest.importorskip(CPU_TARGETS[target].package)
    rate = best_rate(target, precision, 1, 0.0)
    assert (rate.target, rate.precision) == (target, precision)
    assert (rate.rows, rate.width) in gemm.SHAPES
    assert rate.kernel.endswith({"fp32": "f32", "int8": "i8"}[precision] if target == "openvino-cpu" else "MatMul")
    assert ("QLinear" in rate.kernel) == (target == "onnxruntime-cpu" and precision == "int8")


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_rate_counts_two_operations_for_each_product_of_three_layers(small, monkeypatch, target):
    """The fastest shape is the largest one, where every query takes 2 ms."""
    pytest.importorskip(CPU_TARGETS[target].package)
    monkeypatch.setattr(gemm, "time", Clock(2e-3))
    rate = best_rate(target, "fp32", 1, 0.0)
    assert (rate.rows, rate.width) == (32, 64)
    x, weights = np.ones((32, 64)), [np.ones((64, 64))] * 3
    products = 0
    for weight in weights:
        products += x.shape[0] * weight.size
        x = x @ weight
    assert rate.flops_per_second == pytest.approx(2 * products / 2e-3)


def test_a_rate_that_would_be_another_precisions_is_none(small):
    """OpenVINO takes a hint for a type that the CPU lacks."""
    here = require().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    for precision in ("bf16", "fp16"):
        if precision.upper() in here:
            assert best_rate("openvino-cpu", precision, 1, 0.0).precision == precision
        else:
            with pytest.raises(CapabilityError, match=f"has no {precision}"):
                best_rate("openvino-cpu", precision, 1, 0.0)


def test_a_rate_that_no_probe_measures_is_refused():
    with pytest.raises(CapabilityError, match="no rate probe for tensorrt"):
        best_rate("tensorrt", "fp16", 0, 0.0)
    with pytest.raises(CapabilityError, match="no fp16 probe for ONNX Runtime on a CPU"):
        best_rate("onnxruntime-cpu", "fp16", 0, 0.0)


def plant(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def test_memory_is_copied_beyond_the_last_level_of_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm, "LEAST_BYTES", 1 << 20)
    caches = "sys/devices/system/cpu/cpu0/cache"
    plant(tmp_path, {f"{caches}/index0/size": "48K\n", f"{caches}/index3/size": "2M\n", f"{caches}/index4/size": "?\n"})
    assert last_level_cache(tmp_path) == 2 << 20
    monkeypatch.setattr(gemm, "time", Clock(2e-3))  # every copy takes 2 ms, and reads and writes each byte
    assert copy_rate(2, 0.0, tmp_path) == Memory(pytest.approx(2 * (8 << 20) / 2e-3), 8 << 20, 2 << 20, 2)
    assert copy_rate(3, 0.0, tmp_path / "nothing") == Memory(pytest.approx(2 * (1 << 20) / 2e-3), 1 << 20, None, 3)
    plant(tmp_path, {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:  20480 kB\n"})
    with pytest.raises(CapabilityError, match="too little free memory"):
        copy_rate(1, 0.0, tmp_path)


def test_every_byte_is_copied(monkeypatch):
    """By threads whose parts do not divide the array evenly."""
    monkeypatch.setattr(gemm, "LEAST_BYTES", 1_000_003)
    monkeypatch.setattr(gemm, "last_level_cache", lambda root: None)
    copied = []
    monkeypatch.setattr(gemm.np, "copyto", lambda target, source: copied.append((target.size, np.shares_memory)))
    copy_rate(7, 0.0)
    assert sum(size for size, _ in copied) % 1_000_003 == 0
    assert len(copied) % 7 == 0


def candidates(folder):
    return [ORIGINAL, *(engine_candidate(each, folder) for each in (FP32, INT8, HALF))]


def test_rates_are_asked_for_that_the_engines_need(tmp_path):
    asks = plan(candidates(tmp_path), Protocol(("offline", "single"), (2, 8), duration=5.0, threads=3))
    assert [[str(what) for what, _ in group] for group in asks] == [
        ["memory"],
        ["rate of onnxruntime-cpu fp32", "rate of onnxruntime-cpu int8"],
        ["rate of openvino-cpu bf16"],
        ["profile of onnxruntime-cpu-fp32"],
        ["profile of onnxruntime-cpu-int8"],
        ["profile of openvino-cpu-bf16"],
    ]
    every = [command for group in asks for _, command in group]
    assert {(each["threads"], each["seconds"]) for each in every} == {(3, 0.5)}
    assert {each["batch"] for each in every if each["do"] == "profile"} == {2}
    assert precisions_of(INT8) == {"int8", "fp32"}
    assert plan([ORIGINAL], Protocol()) == []


def test_of_engines_on_a_gpu_nothing_is_measured(tmp_path):
    engines = [dataclasses.replace(HALF, target=target) for target in ("tensorrt", "tensorrt", "onnxruntime-cuda")]
    asked = [engine_candidate(each, tmp_path, str(i)) for i, each in enumerate(engines)]
    assert plan(asked, Protocol()) == []
    context = surveyed(BenchRun(Protocol(), (), None, 2), asked, lambda *told: None).context
    assert [(each.name, each.why) for each in context.left_out] == [
        ("tensorrt", "not measured on a GPU"),
        ("onnxruntime-cuda", "not measured on a GPU"),
    ]


def test_a_short_bench_has_no_context(tmp_path):
    bench_run = BenchRun(Protocol(duration=0.5), (), None, 2)
    assert surveyed(bench_run, candidates(tmp_path), lambda *told: None) is bench_run


def test_what_cannot_be_measured_is_left_out_with_the_reason(tmp_path, monkeypatch):
    """A worker that dies at its first question, and one that is not there at all."""
    told = []
    bench_run = BenchRun(Protocol(duration=1.0), (), None, 2)
    for argv, why in (((sys.executable, "-c", "input()"), "died"), ((str(tmp_path / "none"),), "cannot start")):
        monkeypatch.setattr(survey, "SURVEY_WORKER", argv)
        context = surveyed(bench_run, candidates(tmp_path)[:3], lambda *each: told.append(each)).context
        assert (context.rates, context.memory, context.profiles) == ((), None, ())
        assert [each.what for each in context.left_out] == ["memory", "rate", "rate", "profile", "profile"]
        assert why in context.left_out[0].why
        assert decode(Context, encode(context)) == context
    assert told[0] == ("measure peak rates and profiles: memory", 0, 5)
