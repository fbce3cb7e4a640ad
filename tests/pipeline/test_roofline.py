"""What a latency is held against, of planted rates, layers and work: shares that add up, a line that is true."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import documents
from vitdeploy.api.values import context_lines
from vitdeploy.benchmark.context import Context, Layer, LeftOut, Memory, Profile, RateFacts
from vitdeploy.graph.analysis.work import Work
from vitdeploy.pipeline.measure import context_facts
from vitdeploy.spec import encode

GIGA = 10**9
RATES = tuple(
    RateFacts("openvino-cpu", precision, flops * GIGA, 192, 768, "brgemm")
    for precision, flops in (("int8", 500), ("fp32", 100))
)
MEMORY = Memory(20.0 * GIGA, 128 << 20, 32 << 20, 2)
LAYERS = (
    Layer("fc1", "FullyConnected", "int8", 4.0, True, ("fc1/MatMul", "gelu/Gelu")),
    Layer("attention", "Subgraph of MatMul, Softmax", "fp32", 2.0, True),
    Layer("norm", "MVN", "fp32", 1.5, False),
    Layer("add", "Subgraph of Add", "fp32", 0.5, False),
)


def work(int8=2 * GIGA, fp32=GIGA // 5, weights=6 * 10**6):
    return Work(1, {name: count for name, count in (("int8", int8), ("fp32", fp32)) if count}, weights, 150_528, 4000)


def row(latency=10.0, artifact="a"):
    return documents.row(artifact, latency)


def facts(latency=10.0, counted=None, layers=LAYERS, rates=RATES, memory=MEMORY, waits=False, profiled=None):
    profiles = (Profile("a", 1, 30, layers, profiled or latency),) if layers else ()
    context = Context(rates, memory, profiles, (LeftOut("memory", "memory", "too little"),))
    (found,) = context_facts(context, [row(latency)], {"a": counted or work()}, waits).artifacts
    return found


def test_a_compute_bound_artifact():
    found = facts()
    roof, time = found.roof, found.time
    assert roof.compute_ms == pytest.approx(4 + 2)
    assert roof.compute_share == pytest.approx(0.6)
    assert (roof.memory_ms, roof.fits_in_cache) == (None, True)
    assert time.layers_ms == pytest.approx(8)
    assert time.outside_ms == pytest.approx(2)
    assert time.by_precision_ms == pytest.approx({"int8": 4, "fp32": 4})
    assert found.line == (
        "compute: 60 % of the peak GEMM rates "
        "(GFLOP/s: INT8 500 for 91 % of the operations, FP32 100 for 9 % of the operations); "
        "40 % products in INT8, 20 % products in FP32, 20 % layers without products (MVN, Add), "
        "20 % outside the layers"
    )
    assert [layer.share for layer in found.layers] == pytest.approx([0.5, 0.25, 0.1875, 0.0625])
    assert found.layers[0].fuses == ("fc1/MatMul", "gelu/Gelu")


def test_one_precision_is_held_against_its_own_rate():
    line = facts(counted=work(fp32=0)).line
    assert line.startswith("compute: 40 % of the peak INT8 GEMM rate (200 of 500 GFLOP/s); ")


def test_a_rate_above_the_probes_is_explained_and_not_clipped():
    assert "compute: 133 % of the peak INT8 GEMM rate (667 of 500 GFLOP/s), above 100 %: faster than the probe" in str(
        facts(latency=3.0, counted=work(fp32=0)).line
    )


def test_bytes_count_where_no_cache_holds_them():
    heavy = work(int8=GIGA // 10, fp32=0, weights=100 * 10**6)
    found = facts(counted=heavy)
    assert found.roof.memory_ms == pytest.approx(1e3 * heavy.bytes / 20e9)
    assert found.bound == "memory"
    assert found.line.startswith("memory: 50 % of the peak memory rate of 20 GB/s; 40 % products in INT8")
    assert facts(counted=heavy, memory=None).bound == "compute"


def test_the_largest_part_of_the_time_gives_the_name():
    assert facts(latency=100.0).line.startswith("overhead: 6 % of the peak GEMM rates")
    slow = (*LAYERS, Layer("resize", "Interpolate", "fp32", 20.0, False))
    assert facts(latency=28.0, layers=slow).line.startswith("other layers: ")
    assert "(Interpolate, MVN)" in facts(latency=28.0, layers=slow).line


def test_layers_that_take_more_than_the_latency_are_not_hidden():
    found = facts(latency=5.0)
    assert found.time.outside_ms == pytest.approx(-3)
    assert found.time.outside_share == 0
    assert "outside" not in found.line


def test_the_same_layer_of_all_blocks_is_one_group():
    names = ("blocks.0.mlp.fc1/MatMul", "blocks.11.mlp.fc1/MatMul", "blocks.0.mlp.fc2/MatMul", "blocks.0.attn/MatMul_2")
    layers = tuple(
        Layer(name, "MatMul", "int8", ms, True) for name, ms in zip(names, (1.0, 2.0, 2.0, 0.5), strict=True)
    )
    found = [(each.name, each.count, each.ms) for each in facts(layers=layers).groups]
    assert found == [
        ("blocks.*.mlp.fc1/MatMul", 2, 3.0),
        ("blocks.*.mlp.fc2/MatMul", 1, 2.0),
        ("blocks.*.attn/MatMul_2", 1, 0.5),
    ]


def test_a_machine_whose_speed_moved_is_told_of():
    """Layers are held against the latency of their own moment, the rates against the bench's."""
    found = facts(latency=20.0, profiled=10.0)
    assert found.time.outside_share == pytest.approx(0.2)
    assert found.line.startswith("compute: 30 % of the peak GEMM rates")
    assert found.line.endswith("; the machine's speed changed: 20.00 ms in the bench, 10.00 ms in the profile")
    assert "speed changed" not in facts(latency=10.5, profiled=10.0).line


def test_nothing_is_claimed_of_what_is_not_known():
    assert facts(rates=RATES[:1]).roof is None
    assert facts(rates=RATES[:1]).line.startswith("compute: 40 % products in INT8")
    unknown = facts(counted="it depends on the length of the sequences", layers=())
    assert (unknown.line, unknown.work, unknown.time) == (None, None, None)
    assert unknown.work_unknown == "it depends on the length of the sequences"
    waiting = facts(waits=True)
    assert (waiting.latency_ms, waiting.roof) == (None, None)
    assert waiting.line.startswith("compute: 40 % products in INT8, 20 % products in FP32")
    assert context_facts(None, [row()], {}) is None
    other = context_facts(Context(RATES, MEMORY, (), ()), [row(artifact="original")], {}).artifacts[0]
    assert (other.line, other.work_unknown) == (None, "counted for engines only")


@settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.floats(0, 50), min_size=1, max_size=6),
    products=st.lists(st.booleans(), min_size=6, max_size=6),
    latency=st.floats(0.01, 100),
)
def test_parts_add_up_to_the_whole(times, products, latency):
    layers = tuple(Layer(str(i), f"k{i}", ("int8", "fp32")[i % 2], ms, products[i]) for i, ms in enumerate(times))
    found = facts(latency=latency, layers=layers)
    json.dumps(encode(found), allow_nan=False)
    time = found.time
    parts = [*time.products.values(), *time.others.values(), time.outside_share]
    assert sum(parts) == pytest.approx(1)
    assert found.bound in ("compute", "memory", "other layers", "overhead")


def test_the_lines_say_it_to_people():
    context = Context(
        RATES, MEMORY, (Profile("a", 1, 30, LAYERS, 10.0),), (LeftOut("rate", "openvino-cpu fp16", "no FP16"),)
    )
    text = "\n".join(context_lines(context_facts(context, [row()], {"a": work()})))
    assert text.splitlines()[:2] == [
        "machine: openvino-cpu INT8 500, FP32 100 GFLOP/s; memory 20 GB/s copied by 2 threads",
        "not measured: rate of openvino-cpu fp16: no FP16",
    ]
    assert "a: compute: 60 % of the peak GEMM rates" in text
    assert "a: 2.2 GFLOP and at least 6.2 MB per image (weights 6.0 MB)" in text
    assert "a: layers 8.00 of 10.00 ms: INT8 4.00, FP32 4.00" in text
    assert "      4.00 ms  50 %  INT8       fc1 (FullyConnected)" in text
    assert context_lines(None) == ["context: not measured (the benchmark was shorter than one second)"]
