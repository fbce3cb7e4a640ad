"""What a device says is data that anybody may have written: everything that does not fit is refused."""

import json

import numpy as np
import pytest

from tests.changed import MISSING, changed
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.devices import results
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, JobResult, PlacedArtifact, PlacedGraph, Status
from vitdeploy.devices.results import check_result, check_run, clean, parse
from vitdeploy.errors import CapabilityError, DeviceResultError, MissingPackageError
from vitdeploy.spec import EngineSpec, FileEntry, TensorSpec, decode, encode

PLACED = PlacedArtifact("small", "openvino-cpu", "int8", 1, (PlacedGraph("model", "0/model/model.onnx", 3),))
JOB = DeviceJob(FORMAT, "compile", "a" * 64, "me@here", (PLACED,), (FileEntry("0/model/model.onnx", 1, "0" * 64),))
FILES = [{"path": "model.bin", "bytes": 1, "sha256": "0" * 64}, {"path": "model.xml", "bytes": 1, "sha256": "0" * 64}]
IMAGE = (TensorSpec("image", "uint8", (1, 32, 32, 1)),)
ENGINE = EngineSpec(
    *("openvino-cpu", "int8", "graph.onnx", ("model.xml", "model.bin"), 1, True, "CPU", IMAGE, IMAGE),
    kernels={"int8": 3},
    options={"INFERENCE_PRECISION_HINT": "f32"},
)
PROTOCOL = Protocol(duration=0.0, min_rounds=2)
MACHINE = {
    **{"own_seconds": 0.004, "other_seconds": -0.001, "stolen_seconds": 0.0, "joules": None, "mhz": None},
    **{"celsius": -5.0, "throttles": 0, "suspended_seconds": 0.0},
}


def document():
    return {"format": FORMAT, "job": JOB.digest, "host": {}, "engines": {"small": encode(ENGINE)}, "files": FILES}


def read(found):
    return check_result("board", parse("board", json.dumps(found).encode(), JobResult), JOB)


def test_the_right_result_is_taken():
    assert read(document()).engines == {"small": ENGINE}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("job",), "0" * 64),
        (("format",), 2),
        (("job",), MISSING),
        (("engines",), {}),
        (("engines",), {"other": encode(ENGINE)}),
        (("more",), 1),
        (("engines", "small", "target"), "tensorrt"),
        (("engines", "small", "precision"), "fp32"),
        (("engines", "small", "batch"), 8),
        (("engines", "small", "weight_bits"), 7),
        (("engines", "small", "files"), ["../../.bashrc"]),
        (("engines", "small", "files"), ["model.xml", "model.bin", "/etc/passwd"]),
        (("engines", "small", "graph"), "other.onnx"),
        (("engines", "small", "options"), {"CACHE_DIR": "x"}),
        (("engines", "small", "kernels"), {"int8": -3}),
        (("engines", "small", "kernels"), {"int8": 1e400}),
        (("engines", "small", "inputs"), []),
        (("engines", "small", "parts"), [encode(ENGINE)]),
        (("engines", "small", "part"), "../../elsewhere"),
        (("files",), []),
        (("files",), [*FILES, FILES[0]]),
        (("files", 0, "path"), "../model.bin"),
        (("files", 0, "bytes"), "1"),
        (("files", 0, "bytes"), -1),
        (("files", 0, "bytes"), 10**30),
        (("files", 0, "bytes"), 2 << 30),
        (("engines", "small", "files"), ["model.xml", "model.xml"]),
        (("engines", "small", "inputs", 0, "shape", 0), -1),
        (("engines", "small", "inputs", 0, "shape", 0), 0),
        (("engines", "small", "inputs", 0, "shape", 0), 1 << 31),
        (("engines", "small", "inputs", 0, "dtype"), "object"),
        (("engines", "small", "row_parts"), [0]),
        (
            ("engines", "small", "sequence"),
            {"start": 1, "end": 2, "pad": 0, "max_length": 9, "source_vocabulary": None},
        ),
    ],
)
def test_a_result_that_is_not_what_was_asked_for_is_refused(path, value):
    with pytest.raises(DeviceResultError) as caught:
        read(changed(document(), path, value))
    assert caught.value.exit_code == 3 and caught.value.message.startswith("board: ")


@pytest.mark.parametrize("line", [b"", b"[]", b"{", b'{"format": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000, b"\xff"])
def test_what_is_no_document_is_refused(line):
    with pytest.raises(DeviceResultError):
        parse("board", line, JobResult)


def bench_run(**changes):
    """Two rounds a scenario of one artifact; `changes` are of the first round of "single"."""
    rounds = {
        name: [{"batch": PROTOCOL.batch_of(name), "latencies_ms": [1.0, 2.0], "seconds": 0.0031} for _ in range(2)]
        for name in PROTOCOL.scenarios
    }
    rounds["single"][0].update(changes)
    entry = {
        **{"artifact": "small", "target": "openvino-cpu", "precision": "int8", "provider": "CPU"},
        **{"load_seconds": 0.5, "first_inference_ms": 3.0, "rounds": rounds},
    }
    return {"protocol": encode(PROTOCOL), "entries": [entry], "load_average": 0.5, "cpus": 4}


def test_measurements_go_over_the_wire_unchanged():
    found = check_run("board", bench_run(machine=MACHINE), PROTOCOL, ["small"])
    assert isinstance(found, BenchRun)
    again = decode(BenchRun, json.loads(json.dumps(encode(found))))
    assert np.array_equal(again.entries[0].rounds["single"][0].latencies_ms, [1.0, 2.0])


@pytest.mark.parametrize(
    "changes",
    [
        {"latencies_ms": []},
        {"latencies_ms": [1.0, float("nan")]},
        {"latencies_ms": [-1.0, 2.0]},
        {"latencies_ms": [1.0, 1e300]},
        {"latencies_ms": [1.0, "2"]},
        {"latencies_ms": [[1.0]]},
        {"seconds": 0.001},  # less than its queries
        {"seconds": -1.0},
        {"seconds": None},
        {"batch": 3},
        {"process": 3},
        {"begun_seconds": -1.0},
        {"begun_seconds": float("inf")},
        {"begun_seconds": float("nan")},
        {"begun_seconds": 1e300},
        {"busy_seconds": -1.0},
        {"waiting_ms": [-1.0]},
        {"latencies_ms": [1e-9, 2.0]},
        {"machine": {**MACHINE, "own_seconds": 1e300}},
        {"machine": {**MACHINE, "celsius": -300.0}},
        {"machine": {**MACHINE, "throttles": -1}},
    ],
)
def test_impossible_measurements_are_refused(changes):
    with pytest.raises(DeviceResultError):
        check_run("board", bench_run(**changes), PROTOCOL, ["small"])


@pytest.mark.parametrize(
    "changes",
    [
        {"warm_load_seconds": 1e300},
        {"parts_ms": {"model": []}},
        {"parts_ms": {"model": [-1.0]}},
        {"stages_ms": {"infer": [1.0]}},
        {"stages_ms": {"infer": [], "end_to_end": [1.0]}},
        {"stages_ms": {"images": [1.0], "end_to_end": [1.0]}},
    ],
)
def test_impossible_times_of_a_whole_artifact_are_refused(changes):
    found = bench_run()
    found["entries"][0].update(changes)
    with pytest.raises(DeviceResultError):
        check_run("board", found, PROTOCOL, ["small"])


def test_measurements_of_something_else_are_refused():
    for names, protocol in ((["other"], PROTOCOL), (["small"], Protocol(threads=4, duration=0.0, min_rounds=2))):
        with pytest.raises(DeviceResultError):
            check_run("board", bench_run(), protocol, names)
    with pytest.raises(DeviceResultError, match="of the wrong form"):
        check_run("board", {**bench_run(), "protocol": {**encode(PROTOCOL), "batch": [0]}}, PROTOCOL, ["small"])
    less = bench_run()
    less["entries"][0]["rounds"]["single"].pop()
    with pytest.raises(DeviceResultError, match="wrong number of single rounds"):
        check_run("board", less, PROTOCOL, ["small"])


def longer(rounds, process=0, duration=1.0):
    """Measurements whose protocol may go on twice, with so many rounds of latency."""
    found = bench_run()
    found["protocol"] = {**found["protocol"], "duration": duration, "min_rounds": 2}
    single = found["entries"][0]["rounds"]["single"]
    found["entries"][0]["rounds"]["single"] = [{**single[0], "process": process} for _ in range(rounds)]
    return found


def test_a_device_may_measure_again_as_often_as_it_was_allowed_to():
    allowed = Protocol(duration=1.0, min_rounds=2)
    assert (allowed.most_sessions, allowed.most_rounds) == (3, 6)
    for rounds in (2, 3, 6):
        check_run("board", longer(rounds, process=8), allowed, ["small"])
    for found in (longer(1), longer(7), longer(4, process=9)):
        with pytest.raises(DeviceResultError):
            check_run("board", found, allowed, ["small"])
    two = longer(4)
    two["entries"].append({**bench_run()["entries"][0], "artifact": "other"})
    with pytest.raises(DeviceResultError, match="single rounds that were not measured alternately"):
        check_run("board", two, allowed, ["small", "other"])


def context():
    layer = {"name": "fc\x1b[31m1", "kind": "FullyConnected", "precision": "int8", "milliseconds": 1.0, "product": True}
    return {
        "rates": [
            {
                "target": "openvino-cpu",
                "precision": "int8",
                "flops_per_second": 5e11,
                "rows": 192,
                "width": 768,
                "kernel": "k",
            }
        ],
        "memory": {"bytes_per_second": 2e10, "array_bytes": 1 << 27, "cache_bytes": None, "threads": 2},
        "profiles": [{"artifact": "small", "batch": 1, "runs": 30, "layers": [layer], "latency_ms": 2.0}],
        "left_out": [{"what": "rate", "name": "openvino-cpu bf16", "why": "\x07"}],
    }


def test_a_context_goes_over_the_wire_without_its_escapes():
    found = check_run("board", {**bench_run(), "context": context()}, PROTOCOL, ["small"]).context
    assert (found.rates[0].flops_per_second, found.rates[0].rows, found.memory.threads) == (5e11, 192, 2)
    assert found.profiles[0].layers[0].name == "fc\\x1b[31m1"
    assert found.left_out[0].why == "\\x07"


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("rates", "flops_per_second", 0.0),
        ("rates", "flops_per_second", 1e300),
        ("rates", "flops_per_second", float("inf")),
        ("rates", "rows", 0),
        ("rates", "rows", 1 << 60),
        ("memory", "bytes_per_second", -1.0),
        ("memory", "threads", 0),
        ("memory", "cache_bytes", -5),
        ("profiles", "artifact", "another"),
        ("profiles", "batch", 8),
        ("profiles", "runs", 0),
        ("profiles", "per_layer_ms", -1.0),
        ("profiles", "latency_ms", -1.0),
        ("profiles", "latency_ms", 0.0),
        ("layers", "milliseconds", -1.0),
        ("layers", "milliseconds", 1e300),
        ("layers", "name", "n" * 201),
        ("layers", "fuses", ["n"] * 33),
        ("layers", "fuses", ["n" * 201]),
        ("layers", "product", 1),
        ("left_out", "what", "money"),
    ],
)
def test_impossible_contexts_are_refused(part, key, value):
    document = context()
    inner = document["profiles"][0]["layers"] if part == "layers" else document[part]
    (inner if part == "memory" else inner[0])[key] = value
    with pytest.raises(DeviceResultError):
        check_run("board", {**bench_run(), "context": document}, PROTOCOL, ["small"])


@pytest.mark.parametrize("part", ["rates", "profiles"])
def test_a_context_says_everything_once(part):
    document = context()
    document[part] *= 2
    with pytest.raises(DeviceResultError, match="of other artifacts"):
        check_run("board", {**bench_run(), "context": document}, PROTOCOL, ["small"])


def test_more_layers_than_a_model_has_are_refused(monkeypatch):
    monkeypatch.setattr(results, "MOST", 2)
    document = context()
    document["profiles"][0] |= {"runs": 2, "layers": document["profiles"][0]["layers"] * 3}
    with pytest.raises(DeviceResultError, match="too many layers"):
        check_run("board", {**bench_run(), "context": document}, PROTOCOL, ["small"])


def test_the_error_of_a_device_keeps_its_class_and_loses_its_escapes():
    failure = {"artifact": "small", "code": "VD4002", "message": "no \x1b[31mINT8", "fix": "a\rb"}
    with pytest.raises(CapabilityError) as caught:
        parse("board", json.dumps({"failure": failure}).encode(), Status)
    assert caught.value.message == "board: small: no \\x1b[31mINT8"
    assert caught.value.fix == "on board: a\\rb"
    with pytest.raises(MissingPackageError):
        read({**document(), "failure": {**failure, "code": "VD4001"}})
    assert clean(Status("queued", "\x07bell")).detail == "\\x07bell"
