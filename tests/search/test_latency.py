"""Times of layers: measured on the real runtimes, kept, and refused on another device."""

import dataclasses
import json

import pytest

from tests.runtime.boards import plant
from vitdeploy.errors import CapabilityError, InputError, MissingFileError, TargetError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime.host import describe_host
from vitdeploy.search import frame, latency
from vitdeploy.search.latency import (
    FORMAT,
    Convolution,
    LatencyTable,
    Shape,
    Timing,
    fingerprint,
    layer_graph,
    load_table,
    measure_latencies,
)

LINEAR = Shape(16, 32, 48)
CONVOLUTION = Shape(16, 12, 8, Convolution(3, 8, 8, (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), 1))
TARGET = "openvino-cpu"


@pytest.fixture
def short(monkeypatch):
    """The same measurement in less time."""
    monkeypatch.setattr(latency, "ROUNDS", 2)
    monkeypatch.setattr(latency, "BLOCK_SECONDS", 0.005)
    monkeypatch.setattr(latency, "WARMUP_SECONDS", 0)


def table(**changes):
    slow, fast = (9.0, 11.0, 10.5, 10.0, 900.0, 10.0, 11.0, 9.0, 10.0), (4.0, 5.0, 4.5, 4.0, 5.0, 4.0, 5.5, 4.0, 3.0)
    timings = (Timing(LINEAR, "fp32", slow), Timing(LINEAR, "int8", fast))
    found = LatencyTable(FORMAT, TARGET, "2026-01-01T00:00:00+00:00", fingerprint(TARGET), timings)
    return dataclasses.replace(found, **changes)


@pytest.mark.parametrize(("target", "shape"), [("openvino-cpu", CONVOLUTION), ("onnxruntime-cpu", LINEAR)])
def test_layers_are_timed_in_both_precisions(short, target, shape):
    seen = []
    found = measure_latencies([shape, shape], target, progress=lambda *each: seen.append(each[1:]))
    assert [(each.shape, each.precision) for each in found.timings] == [(shape, "fp32"), (shape, "int8")]
    assert all(len(each.rounds_us) == 2 and 0 < each.microseconds < 1e5 for each in found.timings)
    assert seen == [(0, 1), (1, 1)]
    assert found.device == fingerprint(target)


def test_a_convolution_has_no_int8_on_onnxruntime(short):
    with pytest.raises(CapabilityError, match="onnxruntime-cpu did not run the graph in INT8"):
        measure_latencies([CONVOLUTION], "onnxruntime-cpu")


@pytest.mark.parametrize("front", [(), ("Gelu", "Mul", "Add")])
@pytest.mark.parametrize("shape", [LINEAR, CONVOLUTION], ids=["linear", "convolution"])
def test_a_tiny_graph_holds_the_layer_several_times_with_its_own_weights(tmp_path, shape, front):
    model = layer_graph(dataclasses.replace(shape, front=front))
    save_graph(model, tmp_path / "model.onnx")  # checks it
    linears = find_linears(model)
    assert [linear.kind for linear in linears] == [shape.kind] * 8
    assert len({float(linear.weight.sum()) for linear in linears}) == 8
    assert [node.op_type for node in model.graph][: len(front)] == list(front)


def test_large_layers_stand_in_a_tiny_graph_less_often():
    assert Shape(1, 4096, 4096).copies == 2
    assert Shape(1, 16384, 8192).copies == 1


def test_a_linear_is_looked_up_by_its_size():
    assert table().timing(LINEAR, "int8").microseconds == 4.0
    assert table().timing(LINEAR, "fp32").microseconds == 10.0


def test_what_int8_saves_is_paired_and_one_slow_round_is_no_matter():
    """The 2nd and the 8th of 9 differences bound their median with 96 %."""
    differences = sorted(a - b for a, b in zip(*(each.rounds_us for each in table().timings), strict=True))
    assert table().saved(LINEAR) == (differences[4], differences[1], differences[7])
    assert differences[7] < 10 < differences[8]


def test_a_table_survives_its_file(tmp_path):
    table().save(tmp_path / "latency.json")
    assert load_table(tmp_path / "latency.json", TARGET) == table()


def test_a_time_that_was_not_measured_is_refused():
    with pytest.raises(InputError, match="has no matmul 17 x 32 x 48 in int8") as caught:
        table().timing(Shape(17, 32, 48), "int8")
    assert "measure the table" in caught.value.fix


@pytest.mark.parametrize("key", ["cpu", "isa", "cores", "machine", "openvino"])
def test_times_of_another_device_are_refused(tmp_path, key):
    table(device={**fingerprint(TARGET), key: "another"}).save(tmp_path / "latency.json")
    with pytest.raises(TargetError, match="was measured elsewhere") as caught:
        load_table(tmp_path / "latency.json", TARGET)
    assert caught.value.found == f"{key}: another"
    assert caught.value.wanted == f"{key}: {fingerprint(TARGET)[key]}"


def test_what_identifies_an_x86_machine_is_what_its_tables_have(monkeypatch):
    facts = dict.fromkeys(("cpu", "isa", "cores", "machine", "system", "python"), "a fact")
    monkeypatch.setattr(frame, "describe_host", lambda: facts)
    assert list(fingerprint(TARGET)) == ["cpu", "isa", "cores", "machine", "openvino"]


def test_times_of_another_board_are_refused_and_of_those_of_its_model_taken(tmp_path, monkeypatch):
    def on(board, folder):
        host = describe_host(tmp_path / folder, "aarch64", range(plant(tmp_path / folder, board)))
        monkeypatch.setattr(frame, "describe_host", lambda: host)
        return tmp_path / "latency.json"

    file = on("radxa-rock-5b", "one")
    table(device=fingerprint(TARGET)).save(file)
    assert load_table(on("radxa-rock-5b", "another"), TARGET).device["board"] == "Radxa ROCK 5B"
    with pytest.raises(TargetError, match="was measured elsewhere") as caught:
        load_table(on("orange-pi-5", "its brother"), TARGET)
    assert (caught.value.found, caught.value.wanted) == ("board: Radxa ROCK 5B", "board: Orange Pi 5")
    # A board without a name, and a table of before boards had names.
    with pytest.raises(TargetError, match="was measured elsewhere") as caught:
        load_table(on("jetson-tx2", "no name"), TARGET)
    assert "board: Radxa ROCK 5B" in caught.value.found
    assert "board: unknown" in caught.value.wanted
    old = {"cpu": "aarch64", "isa": "unknown", "cores": "4", "machine": "aarch64", "openvino": "1"}
    table(device=old).save(on("raspberry-pi-4b", "pi"))
    with pytest.raises(TargetError, match="was measured elsewhere") as caught:
        load_table(tmp_path / "latency.json", TARGET)
    assert caught.value.found.startswith("cpu: aarch64, isa: unknown")
    assert "board: Raspberry Pi 4 Model B Rev 1.1" in caught.value.wanted


def test_times_of_another_target_are_refused(tmp_path):
    table().save(tmp_path / "latency.json")
    with pytest.raises(TargetError, match="was measured elsewhere") as caught:
        load_table(tmp_path / "latency.json", "onnxruntime-cpu")
    assert caught.value.found.startswith("target: openvino-cpu")


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"format": 1}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    (tmp_path / "latency.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="is not a latency table"):
        load_table(tmp_path / "latency.json", TARGET)


def test_a_table_of_another_format_is_refused(tmp_path):
    table(format=2).save(tmp_path / "latency.json")
    with pytest.raises(InputError, match="has another format"):
        load_table(tmp_path / "latency.json", TARGET)


def test_a_table_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="no latency table at"):
        load_table(tmp_path / "latency.json", TARGET)


def test_a_table_is_readable_json(tmp_path):
    table().save(tmp_path / "latency.json")
    content = json.loads((tmp_path / "latency.json").read_text(encoding="utf-8"))
    assert content["timings"][0]["shape"]["rows"] == 16
