"""Jobs on a real server, and everything that goes wrong on the way there and back."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import command_line
from tests.forked import start
from tests.golden_bundle import golden_small_bundle, with_one_weight_changed
from tests.graph.builder import Builder, values
from tests.known_bad.test_commands import RESIZE, kept
from tests.test_imports import device_python  # noqa: F401  # a Python with numpy and Pillow only
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.devices.advice import diagnose
from vitdeploy.devices.agent.documents import FORMAT, JobResult
from vitdeploy.devices.call import DevicePatience
from vitdeploy.devices.client import Client, Interrupted, agent_package
from vitdeploy.devices.registry import Device
from vitdeploy.errors import DeviceError, DeviceResultError, HostError, StorageError
from vitdeploy.runtime import load
from vitdeploy.spec import EngineSpec, TensorSpec, encode
from vitdeploy.workflows.placement import place_graphs

# Run in a process of its own, which an interrupt ends.
COMPILE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests themselves run in the background
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
sys.argv = ["vitdeploy", "compile", model, "--target", "onnxruntime-cpu", "--on", "board", "-o", out, "-v"]
from vitdeploy.cli.main import main
main()
"""
QUICK = ("--duration", "0.01", "--warmup", "0")
QUICKLY = DevicePatience(first_retry=0.1)


@pytest.fixture
def here(board, shared_store, tmp_path, monkeypatch):
    """The command line in this process, whose user has named the board."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    _at_home(monkeypatch, tmp_path / "this-home")
    _shorten(monkeypatch)
    with command_line(tmp_path, shared_store) as here:
        done = here(
            *("devices", "add", "board", "ssh://board", "--python", sys.executable),
            *("--label", "lab", "--ssh-config", board.config()),
        )
        assert (done.returncode, done.stderr) == (0, "")
        yield here


def _at_home(monkeypatch, home):
    """Agents of this machine live in `home`, with a lock of their own; this process keeps its temporary folder."""
    tempfile.gettempdir()  # remembers what it is
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(home / "tmp"))


def _shorten(monkeypatch):
    """Bench in a few short blocks. The class stays what it is: the device decodes it."""
    short = {"block_seconds": 0.02, "min_rounds": 3, "processes": 1}
    defaults = [short.get(field.name, field.default) for field in dataclasses.fields(Protocol)]
    monkeypatch.setattr(Protocol.__init__, "__defaults__", tuple(defaults))


@pytest.fixture
def client(board, monkeypatch):
    """A client of the board that needs no ssh, and is quick to look again: for what happens on the board itself."""
    _at_home(monkeypatch, board.home)
    return Client(Device("board", python=sys.executable), patience=QUICKLY)


@pytest.fixture
def far(board, client):
    """The same over ssh."""
    return Client(board.device(), patience=QUICKLY)


@pytest.fixture
def run(client, compile_job, tmp_path):
    """Run the job of the session with a client, in a thread: (its outcome, what was told)."""
    job, files = compile_job

    @contextlib.contextmanager
    def running(client=client):
        told, outcome = [], []
        client.tell = lambda *progress: told.append(progress)

        def work():
            try:
                outcome.append(client.run(job, files, tmp_path))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        yield told, outcome
        thread.join(timeout=60)
        assert not thread.is_alive()

    return running


def wait_until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found


def status_file(board):
    wait_until(lambda: board.jobs and (board.jobs[0] / "status.json").exists())
    return board.jobs[0] / "status.json"


def waits_for(status):
    return json.loads(status.read_text())["detail"]


@pytest.fixture
def finished(client, board, compile_job):
    """Leave a finished job of the session on the board: the right result, with `changes`."""
    job = dataclasses.replace(compile_job[0], device=f"board, {sys.executable}")
    tensors = (TensorSpec("x", "float32", (1,)),)
    engine = EngineSpec(
        "onnxruntime-cpu", "fp32", "graph.onnx", ("graph.onnx",), 1, True, "a provider", tensors, tensors
    )

    def make(changes):
        folder = board.agent / "jobs" / job.digest / "result"
        folder.mkdir(parents=True)
        result = encode(JobResult(FORMAT, job.digest, {}, {"small": engine}))
        (folder / "result.json").write_text(json.dumps({**result, **changes}))
        return folder

    return make


# --- what works -------------------------------------------------------------------------------------------------------


def test_the_doctor_brings_the_agent_once_and_says_what_works(here, board):
    found = here("devices", "doctor", "lab", "--json").document
    agent = board.agent / agent_package().digest / "agent.pyz"
    assert hashlib.sha256(agent.read_bytes()).hexdigest() == agent_package().digest
    before = agent.stat().st_mtime_ns
    assert found["works"] and found["targets"]["onnxruntime-cpu"]["works"]
    assert found["executable"] == sys.executable and found["free_bytes"] > 0
    assert Client(board.device()).ask_status("status", "0" * 64).state == "absent"
    assert agent.stat().st_mtime_ns == before


def test_bench_on_many_devices_gives_one_document_and_one_that_fails_ends_no_other(here, small_bundle, board):
    here("devices", "add", "off", "ssh://board:1", "--ssh-config", board.config())
    done = here("bench", small_bundle, "--on", "off,board,local", *QUICK, "--json")
    off, *measured = json.loads(done.stdout)["devices"]
    assert (off["device"], off["error"]["code"]) == ("off", "VD4301")
    assert (done.returncode, "off (ssh://board:1) cannot be reached" in done.stderr) == (4, True)
    assert [found["device"] for found in measured] == ["board", "local"]
    for found in measured:
        (row,) = found["results"]
        assert row["provider"] == "CPUExecutionProvider"
        assert row["latency_ms"]["p50"] > 0 and row["stages_ms"]["end_to_end"] > 0 and found["left_out"] == []
        (engine,) = found["engines"].values()
        assert engine["kernels"]["fp32"] > 0
    assert board.jobs == []


def test_an_engine_that_answers_wrongly_there_is_not_measured(here, small_bundle, tmp_path, tmp_path_factory):
    right = golden_small_bundle(small_bundle, tmp_path_factory)
    wrong = with_one_weight_changed(right, tmp_path / "wrong")
    [found] = here("bench", wrong, right, "--on", "board", *QUICK, "--json").document["devices"]
    assert [row["artifact"] for row in found["results"]] == [f"{right}:onnxruntime-cpu-fp32"]
    [left] = found["left_out"]
    assert left["code"] == "VD4204" and f"{wrong}:onnxruntime-cpu-fp32" in left["message"]


def test_what_the_runtime_there_is_known_to_compute_wrongly_is_not_measured(here, digits, tmp_path):
    """OpenVINO ignores antialias in every release. The original is on ONNX Runtime, here."""
    b, half = Builder(), np.array([1, 1, 0.5, 0.5], np.float32)
    small = b.add("Resize", b.input("x", ["batch", 3, 8, 8]), "", half, mode="linear", antialias=1)
    graph = kept(b.model(b.add("Conv", small, values(4, 3, 2, 2)), rank=4), tmp_path / "graph")
    placed = tmp_path / "placed"
    placed.mkdir()
    place_graphs(graph / "model.onnx", "openvino-cpu", None, placed)
    accept = ("--accept-known-bad", RESIZE)
    for command in (("verify", "--against", graph, "--data", digits), ("bench", *QUICK)):
        refused = here(command[0], placed / "model.onnx", *command[1:], "--on", "board")
        assert refused.returncode == 4 and "measured" not in refused.stderr
        assert "VD4003  board: openvino " in refused.stderr and " ".join(accept) in refused.stderr
    done = here("bench", placed / "model.onnx", *accept, "--on", "board", *QUICK, "--json")
    [found] = done.document["devices"]
    [(name, engine)] = found["engines"].items()
    assert engine["accepted"] == [RESIZE]
    assert found["remarks"][0].startswith(f"{name} was compiled despite {RESIZE}: Resize ignores antialias")


def test_verify_runs_the_engine_on_the_device_and_the_original_here(here, small_bundle, small_export, digits):
    common = ("--against", small_export, "--data", digits, "--num-samples", "20", "--json")
    (there,) = here("verify", small_bundle, "--on", "board", *common).document["devices"]
    here_found = here("verify", small_bundle, *common).document
    assert there["artifact"].endswith("on board")
    for name in ("n", "agreement", "value", "max_difference"):
        assert there[name] == here_found[name], name


def test_compile_brings_the_engine_home(here, small_export, small_bundle, digits, tmp_path):
    done = here("compile", small_export, "--target", "openvino-cpu", "-o", "engine", "--on", "board")
    assert done.returncode == 0, done.stderr
    manifest = read_bundle(tmp_path / "engine")
    verify_files(tmp_path / "engine", manifest)
    assert manifest.engines[0].files == ("engines/openvino-cpu/model.xml", "engines/openvino-cpu/model.bin")
    image = next((digits / "evaluation" / "7").glob("*.png"))
    with load(tmp_path / "engine") as ours, load(small_bundle) as theirs:
        assert ours.predict(image).label == theirs.predict(image).label


def test_a_job_that_was_left_there_is_fetched_by_the_same_command(finished, run, board):
    finished({})
    with run() as (told, outcome):
        pass
    assert outcome[0].engines["small"].provider == "a provider"
    assert any("is already there (done)" in text for text, *_ in told)
    assert board.jobs == []


def test_the_job_goes_on_while_the_connection_is_gone(run, far, board):
    with board.lock() as holder, run(far) as (told, outcome):
        status_file(board)
        wait_until(lambda: any(f"waiting for process {holder.pid}" in text for text, *_ in told))
        wait_until(board.drop_connections)
        wait_until(lambda: any("connection lost" in text for text, *_ in told))
        holder.stdin.close()
    assert outcome[0].engines["small"].kernels["fp32"] > 0


def test_jobs_wait_in_the_order_of_their_arrival(client, run, board):
    with board.lock() as holder, run() as (_, outcome):
        first = status_file(board)
        wait_until(lambda: waits_for(first).startswith(f"process {holder.pid}"))
        queue = board.agent / "queue"
        (ticket,) = queue.glob("[0-9]*")
        # An older ticket, of a living process: ours waits for that one, whatever the lock says.
        older = subprocess.Popen(["sleep", "60"])
        started = int(Path(f"/proc/{older.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = {**json.loads(ticket.read_text())["process"], "pid": older.pid, "started": started}
        (queue / "000000000").write_text(json.dumps({"what": "bench of ann@desk", "process": process}))
        wait_until(lambda: waits_for(first) == "bench of ann@desk")
        (queue / "0000000000").write_text((queue / "000000000").read_text())
        wait_until(lambda: waits_for(first) == "bench of ann@desk (2 jobs before this one)")
        older.kill()
        older.wait()
        wait_until(lambda: waits_for(first).startswith(f"process {holder.pid}"))
        client.cancelled.set()
        assert client.stop() == "board: the job was stopped"
    assert isinstance(outcome[0], Interrupted | DeviceError)
    assert not list(queue.glob("[0-9]*"))


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"Port": 1}, "cannot be reached", "is it on?"),
        ({"UserKnownHostsFile": "FOLDER/other_known_hosts"}, "the host key of", "ssh-keygen -R"),
        ({"UserKnownHostsFile": "/dev/null"}, "is unknown", "log in once manually"),
        ({"IdentityFile": "FOLDER/other"}, "accepts none of your keys", "ssh-copy-id"),
        ({"HostName": "no-such-host.invalid"}, "cannot be reached", "check: ssh"),
    ],
)
def test_a_device_that_cannot_be_reached(board, options, message, fix):
    key = (board.folder / "other.pub").read_text().split()[:2]
    (board.folder / "other_known_hosts").write_text(f"[127.0.0.1]:{board.port} {' '.join(key)}\n")
    with pytest.raises(DeviceError, match=message) as caught:
        Client(board.device(ssh_config=str(board.config(**options)))).probe()
    assert fix in caught.value.fix
    assert caught.value.exit_code == 4


def test_a_python_that_is_missing_or_too_old(board):
    with pytest.raises(DeviceError, match="has no Python at /no/python"):
        Client(board.device(python="/no/python")).probe()
    old = f"""exec {sys.executable} -c 'import sys; sys.version_info = (3, 8, 10); exec(sys.argv.pop(2))' "$@" """
    with pytest.raises(DeviceError, match="too old") as caught:
        Client(board.device(python=board.python("python3.8", old))).probe()
    assert "Python 3.8.10" in caught.value.found


def test_a_clock_of_1970_is_told_and_minds_no_job(board, run):
    python = board.changed_python("early", "import time\nnow = time.time\ntime.time = lambda: now() % 86400\n")
    device = board.device(python=python)
    works, _, advice = diagnose(device, Client(device).probe())
    [clock] = [each for each in advice if each.name == "clock"]
    assert works and clock.found.startswith("the date is 1970-01-01") and "sudo date -s @$(date +%s)" in clock.fix
    with run(Client(device)) as (_, outcome):
        pass
    assert outcome[0].engines["small"].kernels["fp32"] > 0


def test_a_glibc_that_is_too_old_and_a_missing_wheel_are_told_with_the_system(here, board, device_python):  # noqa: F811
    old = (
        "import platform\nplatform.libc_ver = lambda *names: ('glibc', '2.17')\nplatform.machine = lambda: 'riscv64'\n"
    )
    python = board.changed_python("other", old, python=device_python)
    here("devices", "add", "other", "ssh://board", "--python", python, "--ssh-config", board.config())
    done = here("devices", "doctor", "other")
    assert done.returncode == 4
    [fix] = {line for line in done.stdout.splitlines() if "no known version of onnxruntime runs with" in line}
    assert "glibc 2.17 and riscv64" in fix


def test_a_32_bit_python_is_refused_by_name(here, board, run, device_python):  # noqa: F811
    python = board.changed_python("narrow", "import sys\nsys.maxsize = 2**31 - 1\n", python=device_python)
    here("devices", "add", "narrow", "ssh://board", "--python", python, "--ssh-config", board.config())
    done = here("devices", "doctor", "narrow")
    assert done.returncode == 4 and "blocked  32-bit Python" in done.stdout and "pip install" not in done.stdout
    with run(Client(board.device(python=python))) as (_, outcome):
        pass
    assert isinstance(outcome[0], HostError) and "32 bits on a kernel for" in outcome[0].found
    assert board.jobs == []


def test_a_model_that_no_memory_there_can_hold_is_not_sent_off(board, run):
    lines = """
import pathlib
read = pathlib.Path.read_text
full = "MemTotal: 900 kB\\nMemAvailable: 20 kB\\nSwapFree: 10 kB\\n"
pathlib.Path.read_text = lambda self, *a, **k: full if str(self) == "/proc/meminfo" else read(self, *a, **k)
"""
    with run(Client(board.device(python=board.changed_python("full", lines)))) as (_, outcome):
        pass
    assert isinstance(outcome[0], HostError) and outcome[0].message == "board: not enough memory for small"
    assert outcome[0].found == "30,720 bytes of memory and swap free" and board.jobs == []


def test_a_board_that_throttles_is_flagged_and_decides_nothing(here, board, small_bundle):
    tools = board.folder / "tools"
    tools.mkdir()
    (tools / "vcgencmd").write_text('#!/bin/sh\n[ "$1" = get_throttled ] && echo throttled=0x50005\n')
    (tools / "vcgencmd").chmod(0o755)
    python = board.changed_python("hot", "", str(tools))
    here("devices", "add", "hot", "ssh://board", "--python", python, "--ssh-config", board.config())
    [found] = here("bench", small_bundle, "--on", "hot", *QUICK, "--scenario", "single", "--json").document["devices"]
    [row] = found["results"]
    throttled = row["scenarios"]["single"]["throttled"]
    assert "throttled" in row["flags"] and "contended" not in row["flags"]
    assert throttled == {
        "blocks": 3,
        "of": 3,
        "left_out": False,
        "seen": ["under-voltage", "the firmware throttled the CPU"],
    }
    [reason] = found["undecided"].values()
    assert reason.startswith("only 0 of 3 single rounds count") and "throttled: 3 of 3 blocks" in reason


def test_what_a_login_prints_is_not_taken_for_an_answer(board):
    noisy = board.python("noisy", f'echo Welcome; echo "{{}}"; echo to stderr >&2; exec {sys.executable} "$@"')
    assert Client(board.device(python=noisy)).probe().executable == sys.executable


def test_a_missing_runtime_is_told_with_its_pip_line(here, board, small_bundle, device_python):  # noqa: F811
    bare = board.folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    for name, python in (("bare", bare / "bin" / "python"), ("partly", device_python)):
        here("devices", "add", name, "ssh://board", "--python", python, "--ssh-config", board.config())
    doctor = here("devices", "doctor", "bare")
    assert doctor.returncode == 4
    assert "missing  numpy, pillow" in doctor.stdout and "-m pip install numpy pillow" in doctor.stdout
    done = here("bench", small_bundle, "--on", "bare,partly", *QUICK)
    assert done.returncode == 4
    assert "bare: the package numpy is not installed" in done.stderr
    assert "-m pip install numpy pillow" in done.stderr and "-m pip install onnxruntime" in done.stderr


def test_a_full_disk_there_is_told_and_leaves_nothing(board, run, far):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    small = board.home / ".cache"
    small.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        with run(far) as (_, outcome):
            pass
        assert isinstance(outcome[0], StorageError) and outcome[0].exit_code == 4
        assert "bytes free" in outcome[0].found and board.jobs == []
        agent = board.agent / agent_package().digest / "agent.pyz"
        agent.unlink()
        with contextlib.suppress(OSError), (small / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"\0" * 4096)
        with run(far) as (_, outcome):
            pass
        assert isinstance(outcome[0], DeviceError) and "No space left on device" in outcome[0].found
        assert not agent.exists()
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_limit_on_files_there_is_told(board, run):
    limited = board.python("limited", f'[ "$4" = submit ] && ulimit -f 40; exec {sys.executable} "$@"')
    with run(Client(board.device(python=limited))) as (_, outcome):
        pass
    assert isinstance(outcome[0], StorageError) and "File too large" in outcome[0].found
    assert board.jobs == []


@pytest.mark.parametrize("booted", [False, True])
def test_a_job_whose_process_is_gone_is_lost_and_forgotten(run, board, booted):
    with board.lock(), run() as (_, outcome):
        file = status_file(board)
        wait_until(lambda: waits_for(file))
        status = json.loads(file.read_text())
        if booted:  # the state that a job has after its device came up again
            status["process"]["boot"] = "another"
        os.kill(status["process"]["pid"], signal.SIGKILL)
        file.write_text(json.dumps(status))
    assert isinstance(outcome[0], DeviceError)
    assert "was lost" in outcome[0].message
    assert ("restarted" in outcome[0].found) == booted
    assert board.jobs == []


def test_a_job_that_is_killed_while_it_measures_leaves_nothing_running(client, board, compile_job, tmp_path):
    """As the kernel does because memory ran out: the measuring processes end, and the next job has the device."""
    (placed,), files = compile_job[0].artifacts, compile_job[1]
    # A duration so short that it waits for no quiet machine, and a run that ends by itself only long after.
    protocol = Protocol(("sustain:60s",), duration=0.1, warmup=0.1, processes=1)
    job = dataclasses.replace(compile_job[0], kind="bench", artifacts=(placed,), protocol=protocol)
    outcome = []

    def work():
        try:
            outcome.append(client.run(job, files, tmp_path))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    status = status_file(board)
    wait_until(lambda: outcome or ", second" in str(json.loads(status.read_text())["progress"]), seconds=90)
    assert not outcome
    leader = json.loads(status.read_text())["process"]["pid"]
    group = [pid for pid in running() if session_of(pid) == leader]
    assert len(group) > 1
    os.kill(leader, signal.SIGKILL)
    thread.join(timeout=60)
    assert isinstance(outcome[0], DeviceError) and "was lost" in outcome[0].message
    assert "because memory ran out" in outcome[0].found and board.jobs == []
    wait_until(lambda: not [pid for pid in group if session_of(pid) == leader])
    with board.lock():
        pass


def running():
    return [int(process.name) for process in Path("/proc").glob("[0-9]*")]


def session_of(pid):
    """The session of a process that has not ended."""
    with contextlib.suppress(OSError):
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
        return int(session) if state != "Z" else None
    return None


def test_an_interrupt_stops_the_job_there_and_says_so(here, board, small_export, tmp_path):
    log, model = tmp_path / "log", str(small_export / "model.onnx")
    with board.lock():
        process = start(exec, COMPILE, {"model": model, "out": str(tmp_path / "out"), "log": str(log)})
        file = status_file(board)
        wait_until(lambda: waits_for(file) and "waiting for" in log.read_text())
        os.kill(process.pid, signal.SIGINT)
        process.join(timeout=30)
        assert process.exitcode == 130, log.read_text()
        assert board.jobs == [] and not list((board.agent / "queue").glob("[0-9]*"))
    said = log.read_text().splitlines()
    assert "board: the job was stopped" in said and not any("Traceback" in line for line in said)
    assert not (tmp_path / "out").exists()


def test_a_device_that_stays_away_keeps_its_job(run, board, far):
    far.patience = dataclasses.replace(QUICKLY, lost=0.5)
    with board.lock(), run(far) as (told, outcome):
        status_file(board)
        wait_until(lambda: any("waiting for" in text for text, *_ in told))
        far.device = board.device(ssh_config=str(board.config(Port=1)))
        wait_until(board.drop_connections)
        wait_until(lambda: outcome)
        assert "run the same command later to fetch the result" in outcome[0].fix
        assert "the job was not stopped (the device cannot be reached)" in far.stop()
        assert len(board.jobs) == 1


def test_cancelled_work_ends(board, compile_job, tmp_path):
    job, files = compile_job
    client = Client(board.device())
    client.cancelled.set()
    with pytest.raises(Interrupted):
        client.run(job, files, tmp_path)


def test_results_that_were_changed_there_are_refused_and_forgotten(finished, run, board, tmp_path):
    finished({"job": "0" * 64})
    with run() as (_, outcome):
        pass
    assert isinstance(outcome[0], DeviceResultError) and "another job" in outcome[0].message
    assert board.jobs == []


def test_a_link_there_brings_nothing_home(finished, run, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("never asked for")
    entry = {"path": "model.xml", "bytes": 15, "sha256": hashlib.sha256(secret.read_bytes()).hexdigest()}
    (finished({"files": [entry]}) / "model.xml").symlink_to(secret)
    with run() as (_, outcome):
        pass
    assert isinstance(outcome[0], DeviceResultError) and "files that do not belong" in outcome[0].message


def test_a_result_that_does_not_fit_on_this_disk_stays_there(finished, client, compile_job, board, tmp_path):
    finished({})
    with pytest.raises(StorageError, match="cannot be written") as caught:
        client.run(*compile_job, tmp_path / "not-there")
    assert "run the same command to fetch the result" in caught.value.fix and len(board.jobs) == 1
    assert client.run(*compile_job, tmp_path).engines["small"].provider == "a provider"
    assert board.jobs == []


def test_a_job_that_failed_for_want_of_space_there_is_forgotten(finished, run, board):
    """Or else the same command would fetch that failure for ever."""
    finished({"failure": {"artifact": "", "code": "VD4101", "message": "no space left"}})
    with run() as (_, outcome):
        pass
    assert isinstance(outcome[0], StorageError) and "no space left" in outcome[0].message
    assert board.jobs == []
