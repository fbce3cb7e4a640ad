"""Tables of what layers cost: what they predict, which one is taken, how one is fitted, and what is built by them."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, InputError
from vitdeploy.graph.io.files import load_graph
from vitdeploy.search import costs
from vitdeploy.search.layers import Shape
from vitdeploy.spec import encode

TARGETS = ("openvino-cpu", "onnxruntime-cpu")
HOSTS = {
    "CPUs with AMX": {"cpu": "Intel(R) Xeon(R)", "isa": "avx2 avx512f avx512_vnni avx_vnni avx512_bf16 amx_int8"},
    "Zen 5": {"cpu": "AMD EPYC 9R45", "isa": "avx2 avx512f avx512_vnni avx_vnni avx512_bf16"},
    "Zen 4": {"cpu": "AMD EPYC 9R14", "isa": "avx2 avx512f avx512_vnni avx512_bf16"},
    "CPUs with AVX512-VNNI": {"cpu": "Intel(R) Xeon(R) Platinum 8275CL", "isa": "avx2 avx512f avx512_vnni"},
    "CPUs with AVX-VNNI": {"cpu": "13th Gen Intel(R) Core(TM) i7", "isa": "avx2 avx_vnni"},
    "Arm CPUs with i8mm": {"cpu": "Neoverse-V1", "isa": "asimddp i8mm"},
    "Arm CPUs with dot products": {"cpu": "Neoverse-N1", "isa": "asimddp"},
    "other CPUs": {"cpu": "x", "isa": "unknown"},
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "user_cache", lambda: tmp_path)
    return tmp_path


def form(**numbers):
    return costs.FormCosts(
        **{**dict.fromkeys(("call", "mac", "uneven", "ragged", "weight", "read", "written"), 0.0), **numbers}
    )


def table(**forms):
    found = {"int8": form(mac=1.0), "float": form(mac=4.0), **forms}
    return costs.CostTable("openvino-cpu", "a CPU", "", "a test", found, {"fp32": 0.5, "bf16": 0.25}, 0.1)


def test_a_layer_costs_what_its_numbers_say():
    numbers = costs.FormCosts(1000, 1, 0.1, 0.3, 2, 3, 4)
    outside = 1000 + 2 * 6 + 3 * 4 + 4 * 6  # of 4 rows; 2 inputs and 3 outputs below
    assert numbers.nanoseconds(Shape(2, 2, 3)) == 1000 + 12 + 2 * 6 + 3 * 4 + 4 * 6 == outside + 12
    per_row = {rows: (numbers.nanoseconds(Shape(rows, 2, 3)) - 1000 - 12) / rows - 18 for rows in (5, 64, 198, 197)}
    assert per_row == pytest.approx({5: 6, 64: 6, 198: 6 * 1.1, 197: 6 * 1.4})


def test_parts_read_the_weights_once():
    found = table(int8=form(mac=1.0, ragged=0.5, weight=10.0, call=7.0), float=form(mac=4.0, call=4.0))
    whole, parts = (found.parts(Shape(1, 2, 3), rows) for rows in ((197,), (192, 5)))
    assert whole == 7 + 197 * 6 * 1.5 + 60
    assert parts == 7 + 4 + 197 * 6 + 60


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cpus", HOSTS)
def test_int8_saves_something_in_a_layer_however_small(target, cpus):
    """The call of a product in INT8 may cost more than such a layer takes in float."""
    found = costs.costs_for(target, HOSTS[cpus])
    small, large = Shape(17, 32, 32), Shape(197, 768, 3072)
    assert 0 < found.saved(small) < found.saved(large)
    assert found.saved(large) == found.added(large, "float")


def test_a_form_beside_bf16_and_one_that_is_not_there():
    found = table(**{"dynamic": form(mac=2.0), "float bf16": form(mac=3.0)})
    one = Shape(1, 1, 10)
    assert [found.layer(one, each) for each in ("int8", "dynamic", "float")] == [10, 20, 40]
    assert [found.layer(one, each, "bf16") for each in ("int8", "dynamic", "float")] == [10, 40, 30]
    workload = costs.Workload({"a": one, "b": one}, products=5, elements=8)
    assert found.plain(workload) == 20 + 5 * 4 + 8 * 0.5
    assert found.plain(workload, "bf16") == 20 + 5 * 3 + 8 * 0.25


def test_what_of_a_graph_takes_time(small_export):
    """Width 32, two blocks of two heads, 17 tokens: the products of attention, its softmax, norms and activations."""
    model = load_graph(small_export / "model.onnx")
    one, eight = (costs.workload_of(model, batch) for batch in (1, 8))
    assert one.products == 2 * 2 * 17 * 17 * 32
    norms = sum(node.op_type == "LayerNormalization" for node in model.graph)
    assert one.elements >= 2 * (2 * 17 * 17 + 17 * 128) + (norms - 1) * 17 * 32
    fc1 = next(shape for name, shape in one.layers.items() if name.endswith("fc1"))
    assert (fc1.rows, fc1.k, fc1.n) == (17, 32, 128)
    assert (eight.products, eight.elements) == (8 * one.products, 8 * one.elements)
    assert all(eight.layers[name].rows == 8 * shape.rows for name, shape in one.layers.items())


@pytest.mark.parametrize("cpus", HOSTS)
def test_each_class_of_cpus_has_its_tables(cpus):
    assert costs.cpu_class(HOSTS[cpus]) == cpus
    for target in TARGETS:
        found = costs.costs_for(target, HOSTS[cpus])
        assert (found.target, found.cpus) == (target, cpus)
        assert found.forms["int8"].mac > 0 and found.forms["int8"].mac <= found.forms["float"].mac
        assert ("dynamic" in found.forms) == costs.has_dynamic(target, HOSTS[cpus])
        assert ("dynamic bf16" in found.forms) == (target == "openvino-cpu" and "amx_int8" in HOSTS[cpus]["isa"])
        assert str(found).startswith(f"the cost table for {cpus} (")


def test_a_target_without_tables_is_refused():
    assert not costs.has_costs("tensorrt")
    with pytest.raises(CapabilityError, match="no cost table for the target tensorrt"):
        costs.costs_for("tensorrt")


def test_this_users_own_table_comes_first_and_one_of_another_runtime_says_so(cache):
    shipped = costs.costs_for("openvino-cpu")
    own = costs._own("openvino-cpu")
    own.parent.mkdir()
    measured = dataclasses.replace(table(), cpus="my CPU", runtime="openvino 1.0")
    own.write_text(json.dumps(encode(measured)))
    found = costs.costs_for("openvino-cpu")
    assert found.cpus == "my CPU" and found.digest != shipped.digest
    assert "measured with openvino 1.0, installed: openvino " in str(found)
    assert costs.costs_for("openvino-cpu", HOSTS["Zen 4"]).cpus == "Zen 4"
    for text in (
        "{",
        "[1]",
        json.dumps({**encode(measured), "forms": {"int8": 1}}),
        json.dumps({**encode(measured), "forms": {}}),
    ):
        own.write_text(text)
        with pytest.raises(InputError) as caught:
            costs.costs_for("openvino-cpu")
        assert "vitdeploy doctor --measure" in caught.value.fix


def test_numbers_are_found_again_in_times():
    expected = costs.FormCosts(20_000, 0.002, 0.0001, 0.0003, 0.02, 0.2, 0.1)
    slower = dataclasses.replace(expected, mac=0.008, uneven=0.0004, ragged=0.0012)
    shapes = [Shape(*sizes) for sizes in (*costs.SHAPES, costs.FEW_ROWS)]
    clock = np.random.default_rng(0).uniform(0.98, 1.02, len(shapes))
    by_shape = [
        {"int8": tick * expected.nanoseconds(each), "float": tick * slower.nanoseconds(each)}
        for each, tick in zip(shapes, clock, strict=True)
    ]
    by_rows = [{str(rows): expected.nanoseconds(Shape(rows, *sizes)) for rows in costs.ROWS} for sizes in costs.ROWS_OF]
    found = costs._fitted(("int8", "float"), shapes, by_shape, by_rows)
    for shape in (Shape(128, 384, 384), Shape(577, 768, 768), Shape(198, 192, 192)):
        for name, numbers in (("int8", expected), ("float", slower)):
            assert found[name].nanoseconds(shape) == pytest.approx(numbers.nanoseconds(shape), rel=0.1)


def test_a_table_is_measured_and_kept(cache, forked_benches, monkeypatch):
    monkeypatch.setattr(costs, "SHAPES", ((16, 32, 32), (64, 32, 64), (64, 64, 32), (128, 64, 64)))
    monkeypatch.setattr(costs, "FEW_ROWS", (8, 64, 64))
    monkeypatch.setattr(costs, "ROWS_OF", ((32, 32),))
    monkeypatch.setattr(costs, "ROUNDS", 2)
    monkeypatch.setattr(costs.summary, "disturbed_reason", lambda bench_run: "")  # other tests run beside this one
    found = costs.measure_costs("onnxruntime-cpu")
    assert costs.costs_for("onnxruntime-cpu") == found
    assert set(found.forms) == {"int8", "float"} and found.element["fp32"] > 0 <= found.scaling
    assert found.origin.startswith("measured 20") and found.runtime == found.installed
    busy = f"others had 40 % of the CPUs: {costs.summary.MEASURE_AGAIN}"
    monkeypatch.setattr(costs.summary, "disturbed_reason", lambda bench_run: busy)
    with pytest.raises(CapabilityError) as caught:
        costs.measure_costs("onnxruntime-cpu")
    assert caught.value.found == "others had 40 % of the CPUs"
    assert costs.costs_for("onnxruntime-cpu") == found


QUANTIZE = """
import sys
import vitdeploy
from vitdeploy.stages import search
search.ENOUGH, search.LEAST_MACS = 100.1, 0  # a small model keeps its answers in plain INT8
found = vitdeploy.quantize(*sys.argv[1:], num_samples=64, high_precision=50.0, progress=False)
assert found.high_precision.layers, found.high_precision
"""


@pytest.mark.parametrize("target", TARGETS)
def test_a_busy_machine_makes_the_same_graph(target, planted_file, digits, tmp_path):
    """The same inputs, in two processes, one of them beside two that are busy and with one thread for products."""
    images = tmp_path / "images"
    images.mkdir()
    for sample in split(digits, "none", calibration=64, evaluation=1, seed=0).calibration:
        (images / sample.path.name).write_bytes(sample.path.read_bytes())

    def made(name, **environment):
        command = [sys.executable, "-c", QUANTIZE, str(planted_file), str(images), target]
        subprocess.run([*command, str(tmp_path / name)], check=True, env={**os.environ, **environment})
        return {file: (tmp_path / name / file).read_bytes() for file in ("model.onnx", "high_precision.json")}

    quiet = made("quiet")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        beside = made("busy", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    finally:
        for each in busy:
            each.kill()
    assert beside == quiet
