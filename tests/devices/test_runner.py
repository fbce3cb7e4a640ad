"""The session of `verify`, with a device that says what it likes of its engine."""

import json

import pytest

from vitdeploy.devices.agent.documents import PlacedArtifact, PlacedGraph
from vitdeploy.devices.call import DevicePatience
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.runner import RemoteRunner
from vitdeploy.errors import DeviceError, DeviceResultError
from vitdeploy.spec import EngineSpec, GraphSpec, TensorSpec, encode

PLACED = PlacedArtifact("small", "onnxruntime-cpu", "fp32", 1, (PlacedGraph("model", "graph.onnx", 0),))
IMAGE, LOGITS = TensorSpec("image", "uint8", ("batch", 32, 32, 3)), TensorSpec("logits", "float32", ("batch", 10))
SENT = {"model": GraphSpec("graph.onnx", (IMAGE,), (LOGITS,))}
ENGINE = EngineSpec("onnxruntime-cpu", "fp32", "graph.onnx", ("graph.onnx",), 1, True, "CPU", (IMAGE,), (LOGITS,))
LOADED = {"engine": encode(ENGINE), "inputs": [encode(IMAGE)], "outputs": [encode(LOGITS)], "provider": "CPU\x1b[2J"}


def session(tmp_path, *lines, graphs=SENT, **patience):
    """A runner whose device says these lines to whatever it is asked."""
    (tmp_path / "answers").write_text("".join(f"{line}\n" for line in ("vitdeploy-agent ok", *map(json.dumps, lines))))
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\ncat "{tmp_path}/answers"; cat > /dev/null\n')
    path.chmod(0o755)
    client = Client(Device("pi5", python=str(path)), patience=DevicePatience(**patience))
    return RemoteRunner(client, PLACED, {}, name="small on pi5", graphs=graphs)


def test_an_engine_is_loaded_once_it_was_its_turn(tmp_path):
    told = []
    runner = session(tmp_path, {"waits_for": "bench of ann\x07"}, {"begun": True}, LOADED)
    runner._client.tell = lambda text, *_: told.append(text)
    with runner:
        assert runner.provider == "CPU\\x1b[2J" and runner.inputs == (IMAGE,)
    assert told == ["pi5: waiting for bench of ann\\x07 (at most 1 h)"]


@pytest.mark.parametrize(
    ("changes", "graphs", "message"),
    [
        ({"engine": {**encode(ENGINE), "part": "../../elsewhere"}}, SENT, "an engine with other parts"),
        ({"inputs": []}, SENT, "an engine without inputs or outputs"),
        ({"inputs": [{**encode(IMAGE), "name": "other"}]}, SENT, "an engine of another graph"),
        ({"inputs": [{**encode(IMAGE), "shape": ["batch", 64, 64, 3]}]}, SENT, "an engine of another graph"),
        ({"outputs": [{**encode(LOGITS), "shape": ["batch", 7]}]}, SENT, "an engine of another graph"),
        ({"outputs": [{**encode(LOGITS), "shape": ["batch"]}]}, SENT, "an engine of another graph"),
        ({"outputs": [encode(LOGITS), encode(LOGITS)]}, SENT, "an engine of another graph"),
        ({"outputs": [{**encode(LOGITS), "dtype": "object"}]}, {}, "an implausible tensor"),
        ({"inputs": [{**encode(IMAGE), "shape": []}]}, {}, "implausible batch size"),
        ({"inputs": [{**encode(IMAGE), "shape": [0, 32, 32, 3]}]}, {}, "an implausible tensor"),
        ({"inputs": [{**encode(IMAGE), "shape": [100_000, 32, 32, 3]}]}, {}, "implausible batch size"),
        ({"inputs": [{**encode(IMAGE), "shape": [-1, 32, 32, 3]}]}, {}, "exceeds the limits"),
        ({"inputs": [{**encode(IMAGE), "shape": [10**30, 32, 32, 3]}]}, {}, "exceeds the limits"),
    ],
)
def test_an_engine_of_another_graph_is_refused(tmp_path, changes, graphs, message):
    with pytest.raises(DeviceResultError, match=f"pi5: .*{message}"):
        session(tmp_path, {**LOADED, **changes}, graphs=graphs).load()


def test_no_turn_is_waited_for_without_end(tmp_path):
    with pytest.raises(DeviceError, match="pi5: no answer for 0") as caught:
        session(tmp_path, {"waits_for": "bench of ann"}, queue=0.1).load()
    assert caught.value.found == "it is waiting for bench of ann"
