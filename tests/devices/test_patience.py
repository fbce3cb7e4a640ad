"""A device that does not keep to what it promised: every wait ends, and says what it waited for."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.held import held
from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import TargetState
from vitdeploy.devices import call as call_module
from vitdeploy.devices.advice import Seen, _mend
from vitdeploy.devices.agent import stream
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, PlacedArtifact, PlacedGraph, Status
from vitdeploy.devices.agent.probe import BoardState, DeviceProbe
from vitdeploy.devices.agent.stream import BEAT, Beats
from vitdeploy.devices.call import Call, DevicePatience, Interrupted, Unresponsive, _Clock, spelled
from vitdeploy.devices.client import Client
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import parse, problem_of
from vitdeploy.errors import DeviceError, DeviceResultError

HURRY = DevicePatience(0.5, 0.5, answer=0.6, probe=0.6, stop=0.5, end=0.2, lost=1, mute=2, first_retry=0.01)
GREETS = "echo vitdeploy-agent ok; "
PLACED = PlacedArtifact("small", "openvino-cpu", "int8", 1, (PlacedGraph("model", "0/model/model.onnx", 3),))
JOB = DeviceJob(FORMAT, "compile", "a" * 64, "me@here", (PLACED,), ())


def script(tmp_path, lines):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return Device("pi5", python=str(path))


@pytest.mark.parametrize(
    ("lines", "kind", "message"),
    [
        ("exec sleep 60", Unresponsive, "no response for"),
        (f"{GREETS}exec sleep 60", Unresponsive, "no response for"),
        (f"{GREETS}while sleep 0.1; do printf x; done", Unresponsive, "bytes in 1 s"),
        (
            f"{GREETS}while sleep 0.1; do echo '{BEAT.decode()}'; done",
            Unresponsive,
            "heartbeats for 1 s, but no answer",
        ),
        (f"{GREETS}yes '{BEAT.decode()}'", DeviceResultError, "too many heartbeats and status lines"),
        (f"{GREETS}yes warning >&2", DeviceResultError, "too much output on standard error"),
        (f"{GREETS}yes | tr -d '\\n'", DeviceResultError, "a line is longer than 1,048,576 bytes"),
        (f"{GREETS}exec >&- 2>&- <&-; sleep 60", DeviceError, "no answer"),
        ("yes Welcome", DeviceResultError, "much login output"),
    ],
)
def test_a_conversation_ends_by_itself(tmp_path, monkeypatch, lines, kind, message):
    for limit in ("MAX_TALK_BYTES", "MAX_ERROR_BYTES"):
        monkeypatch.setattr(call_module, limit, 1 << 20)
    with pytest.raises(kind) as caught:
        Client(script(tmp_path, lines), patience=HURRY).probe()
    assert message in str(caught.value) and caught.value.exit_code in (3, 4)


def test_a_device_that_does_not_read_what_it_is_sent_ends_the_sending(tmp_path):
    client = Client(script(tmp_path, f"{GREETS}exec sleep 60"), patience=HURRY)
    with pytest.raises(Unresponsive, match="pi5 does not answer"):
        client.ask(Status, "submit", send=[b"0" * 100_000] * 10)


def test_a_system_whose_pipes_cannot_be_waited_for_is_told(tmp_path, monkeypatch):
    monkeypatch.delattr(select, "poll")
    with pytest.raises(DeviceError, match="commands on devices work from Linux and macOS only"):
        Client(script(tmp_path, GREETS)).probe()


def test_silence_is_told_and_a_mute_agent_is_asked_again_so_often(tmp_path):
    told, hurry = [], replace(HURRY, greeting=9, silence=1.4, told=1, lost=9)
    client = Client(script(tmp_path, "exec sleep 60"), tell=lambda text, *_: told.append(text), patience=hurry)
    client.job = "0" * 64
    with pytest.raises(Unresponsive) as caught:
        client.patiently(client.probe)
    assert "run the same command later to fetch the result" in caught.value.fix
    silence = "no response from pi5 for 1 s"
    assert told == [silence, "pi5: no response from the agent; retrying", silence]


def test_a_connection_counts_as_lost_from_when_it_broke(tmp_path):
    """However long it had stood: what takes long to send is sent again too."""
    lines = f"""if mkdir {tmp_path}/asked; then {GREETS} sleep 1; exit 255; fi
{GREETS} echo '{{"state": "absent"}}'"""
    client = Client(script(tmp_path, lines), patience=DevicePatience(lost=0.5, first_retry=0.01))
    assert client.patiently(lambda: client.ask_status("status", "0" * 64)).state == "absent"


def test_a_cancelled_wait_ends_and_leaves_no_process(tmp_path):
    cancelled, device = threading.Event(), script(tmp_path, "sleep 60 & sleep 60")
    threading.Timer(0.2, cancelled.set).start()
    with Call("pi5", [device.python], DevicePatience(), cancelled, lambda *progress: None) as call:
        with pytest.raises(Interrupted):
            call.greeting()
        group = call._process.pid
    deadline = time.monotonic() + 5
    while living(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not living(group)


def living(group):
    """Whether a process of the group runs; nobody may have waited for one that has ended."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, found = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and state != "Z":
                return True
    return False


@pytest.mark.parametrize(
    ("state", "patience", "message"),
    [
        ({"state": "queued", "detail": "bench of ann"}, {"queue": 0.3}, "the compile has waited for 0.3 s"),
        ({"state": "running"}, {"work": 0.3}, "the compile has run for 0.3 s"),
    ],
)
def test_no_job_is_waited_for_without_end_and_it_is_left_there(tmp_path, state, patience, message):
    lines = f"""case "$4" in
status) {GREETS} echo '{{"state": "queued"}}';;
watch) {GREETS} while echo '{json.dumps(state)}'; do sleep 0.1; done;;
esac"""
    told = []
    client = Client(
        script(tmp_path, lines), tell=lambda text, *_: told.append(text), patience=DevicePatience(**patience)
    )
    with pytest.raises(DeviceError, match=message) as caught:
        client.run(JOB, {}, tmp_path)
    assert "run the same command later to fetch the result" in caught.value.fix and client.job is not None
    assert state["state"] == "running" or "pi5: waiting for bench of ann (at most 0.3 s)" in told


def test_a_device_that_fails_to_stop_or_forget_a_job_ends_no_command(tmp_path):
    said = json.dumps({"failure": {"artifact": "", "code": "VD4101", "message": "no space left"}})
    client = Client(script(tmp_path, f"{GREETS}echo '{said}'"))
    client.job = "0" * 64
    later = "the job continues on the device; run the same command later to fetch the result"
    assert client.stop() == f"pi5: the job was not stopped (pi5: no space left); {later}"
    client._forget(JOB)
    assert client.job is None


def test_what_is_read_fast_enough_is_never_late():
    clock = _Clock(DevicePatience(rate=1000.0, silence=10.0))
    clock.expect(5.0)
    for _ in range(100):
        assert clock.overdue() is None
        clock.passed(1000)
        clock.waited(0.9, True)
    for _ in range(30):
        clock.waited(0.9, True)
    assert clock.overdue() == ("100,000 bytes in 117 s", "at least 1,000 bytes per second")


def test_time_in_which_this_process_was_stopped_is_no_silence():
    clock = _Clock(DevicePatience())
    clock.waited(3600.0, False)
    assert clock.overdue() is None


def test_limits_are_spelled():
    assert [spelled(seconds) for seconds in (20.0, 600.0, 3600.0, 36 * 3600.0, 0.25)] == [
        *("20 s", "10 min", "1 h", "36 h", "0.25 s")
    ]


def test_beats_come_while_the_agent_works_and_never_into_an_answer(monkeypatch):
    monkeypatch.setattr(stream, "BEAT_SECONDS", 0.02)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as host, Beats(writing) as beats:
        assert host.read(len(BEAT) + 1) == BEAT + b"\n"
        with beats.paused():
            while select.select([host], [], [], 0)[0]:
                host.read(len(BEAT) + 1)
            assert not select.select([host], [], [], 0.2)[0]
        assert host.read(len(BEAT) + 1) == BEAT + b"\n"
    os.close(writing)


def test_an_agent_that_is_killed_stops_beating(tmp_path):
    """Or else the host would take the beats of an orphan for work."""
    code = (
        "import os, sys; from vitdeploy.devices.agent import stream; stream.BEAT_SECONDS = 0.05\n"
        "with stream.Beats(1): sys.stdin.readline(); os.kill(os.getpid(), 9)"
    )
    reading, writing = os.pipe()
    source, sink = os.pipe()
    root = str(Path(stream.__file__).parents[3])
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", code],
        {**os.environ, "PYTHONPATH": root},
        file_actions=[(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, writing, 1)],
    )
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as host:
        assert host.read(len(BEAT) + 1) == BEAT + b"\n"
        os.write(sink, b"\n")
        os.waitpid(process, 0)
        while host.read(4096):  # ends only once nobody holds the other end
            pass
    os.close(source)
    os.close(sink)


def test_a_session_whose_host_is_gone_ends_while_it_waits_for_its_turn(tmp_path):
    """Or else it would stay in the queue of a board whose other jobs wait behind it."""
    code = (
        "import sys; from vitdeploy.devices.agent import stream, main; stream.BEAT_SECONDS = 0.05\n"
        "sys.argv[1:] = ['serve']; main.main('')"
    )
    (tmp_path / "tmp").mkdir()
    root = str(Path(stream.__file__).parents[3])
    environment = {**os.environ, "PYTHONPATH": root, "HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    queue = tmp_path / ".cache" / "vitdeploy-agent" / "queue"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with held(tmp_path / "tmp"), subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as agent:
        agent.stdin.write(json.dumps({"placed": {}, "files": [], "options": {}}).encode() + b"\n")
        agent.stdin.flush()
        while b"waits_for" not in agent.stdout.readline():
            pass
        assert [*queue.glob("[0-9]*")]
        agent.stdout.close()
        assert agent.wait(timeout=60) == 128 + signal.SIGTERM
        assert not [*queue.glob("[0-9]*")]


@pytest.mark.parametrize(
    ("document", "odd"),
    [
        ({"state": "running", "progress": ["x", -1, 10]}, "$.progress[1]: the number -1"),
        ({"state": "running", "progress": ["x", 10**30, 10]}, "the number 1000000000000000000000000000000"),
        ({"state": "running", "progress": ["x", 10**400, 10]}, "the number 100000... of 401 digits"),
        ({"state": "running", "progress": ["x", 1, 1e300]}, "the number 1e+300"),
        ({"state": "running", "detail": "x" * (1 << 21)}, "a text of 2,097,152 characters"),
        ({"state": "running", "more": [0] * 200_000}, "200,000 items, more than 100,000"),
        ({"state": "running", "more": json.loads("[" * 40 + "]" * 40)}, "nested more than 32 deep"),
    ],
)
def test_absurd_sizes_are_refused_before_anything_is_made_of_them(document, odd):
    with pytest.raises(DeviceResultError, match="exceeds the limits") as caught:
        parse("pi5", json.dumps(document).encode(), Status)
    assert odd in caught.value.found


def test_only_numbers_of_queries_may_be_as_many_as_there_were():
    assert problem_of({"rounds": [{"latencies_ms": [1.0, 2] * 100_000, "waiting_ms": []}]}) == ""
    for odd in (True, "1", None, [1.0]):
        found = problem_of({"rounds": [{"waiting_ms": [1.0] * 200_000 + [odd]}]})
        assert found == "$.rounds[0].waiting_ms: 200,001 items, more than 100,000"


def test_a_line_of_very_many_lists_is_not_even_parsed():
    with pytest.raises(DeviceResultError) as caught:
        parse("pi5", b"[" + b"[]," * 2_000_001 + b"[]]", Status)
    assert "2,000,003 lists and objects, more than 2,000,000" in caught.value.found


@pytest.mark.parametrize("code", ["VD1000", "VD9999", "VD5001", "rm -rf"])
def test_what_is_a_bug_here_or_a_gate_is_not_for_a_device_to_say(code):
    failure = {"artifact": "", "code": code, "message": "KeyError: 1"}
    with pytest.raises(DeviceError, match="pi5: KeyError: 1") as caught:
        parse("pi5", json.dumps({"failure": failure}).encode(), Status)
    assert caught.value.exit_code == 4


def test_a_target_that_only_the_device_knows_gets_no_pip_line():
    device = Device("pi5", "10.0.0.7")
    states = {"their-npu": TargetState(False, None, (), "not there", "pip install; id")}
    probe = DeviceProbe({}, "python", "2.36", {}, states, 1, 1, {}, "", ())
    line = _mend(Seen(device, {}, BoardState(), 1), probe, "their-npu")
    assert "their-npu" not in TARGETS and line == "use a newer vitdeploy: this one does not know the target"
