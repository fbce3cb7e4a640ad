"""Jobs on a real server, and everything that goes wrong on the way there and back."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.command_line import command_line
from vitdeploy.bench.protocol import Protocol
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.devices import client as client_module
from vitdeploy.devices.agent.documents import flat
from vitdeploy.devices.client import Client, Interrupted
from vitdeploy.devices.package import agent_package
from vitdeploy.errors import DeviceError, DeviceResultError, StorageError
from vitdeploy.pipeline.on_devices import on_all
from vitdeploy.pipeline.subjects import compile_bundle
from vitdeploy.runtime import load

QUICK = ("--duration", "0.01", "--warmup", "0")


@pytest.fixture
def here(board, shared_store, tmp_path, monkeypatch):
    """The command line in this process, whose user has named the board."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "this-home"))  # of the agent of "local"
    (tmp_path / "this-home").mkdir()
    _shorten(monkeypatch)
    with command_line(tmp_path, shared_store) as here:
        done = here(
            *("devices", "add", "board", "ssh://board", "--python", sys.executable),
            *("--label", "lab", "--ssh-config", board.config()),
        )
        assert (done.returncode, done.stderr) == (0, "")
        yield here


def _shorten(monkeypatch):
    """Bench in a few short blocks. The class stays what it is: the device decodes it."""
    short = {"block_seconds": 0.02, "min_rounds": 3, "processes": 1}
    defaults = [short.get(field.name, field.default) for field in dataclasses.fields(Protocol)]
    monkeypatch.setattr(Protocol.__init__, "__defaults__", tuple(defaults))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, small_export):
    folder = tmp_path_factory.mktemp("bundle")
    compile_bundle(small_export / "model.onnx", "onnxruntime-cpu", None, None, folder)
    return folder


@pytest.fixture
def client(board, monkeypatch):
    """A client that is quick to try again."""
    monkeypatch.setattr(client_module, "FIRST_RETRY", 0.1)
    monkeypatch.setattr(client_module, "FIRST_LOOK", 0.3)
    return Client(board.device())


@pytest.fixture
def run(client, compile_job, tmp_path):
    """Run the job of the session with a client, in a thread: (its outcome, what was told)."""
    job, files = compile_job

    @contextlib.contextmanager
    def running(client=client):
        told, outcome = [], []

        def work():
            try:
                outcome.append(client.run(job, files, tmp_path, lambda *progress: told.append(progress)))
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


# --- what works -------------------------------------------------------------------------------------------------------


def test_the_doctor_brings_the_agent_once_and_says_what_works(here, board):
    found = here("devices", "doctor", "board", "--json").document
    agent = board.agent / agent_package().digest / "agent.pyz"
    assert hashlib.sha256(agent.read_bytes()).hexdigest() == agent_package().digest
    before = agent.stat().st_mtime_ns
    assert found["works"] and found["targets"]["onnxruntime-cpu"]["works"]
    assert found["executable"] == sys.executable and found["free_bytes"] > 0
    done = here("devices", "doctor", "lab")
    assert "board is ready" in done.stdout.splitlines()
    assert agent.stat().st_mtime_ns == before


def test_bench_on_two_devices_gives_one_document(here, bundle, board):
    done = here("bench", bundle, "--on", "board,local", *QUICK, "--json")
    ours, theirs = done.document["devices"]
    assert (ours["device"], theirs["device"]) == ("board", "local")
    for found in (ours, theirs):
        (row,) = found["results"]
        assert row["provider"] == "CPUExecutionProvider"
        assert row["latency_ms"]["p50"] > 0 and found["left_out"] == []
        (engine,) = found["engines"].values()
        assert engine["kernels"]["fp32"] > 0
    assert board.jobs == []


def test_verify_runs_the_engine_on_the_device_and_the_original_here(here, bundle, small_export, digits):
    common = ("--against", small_export, "--data", digits, "--num-samples", "20", "--json")
    (there,) = here("verify", bundle, "--on", "board", *common).document["devices"]
    here_found = here("verify", bundle, *common).document
    assert there["artifact"].endswith("on board")
    for name in ("n", "agreement", "value", "max_difference"):
        assert there[name] == here_found[name], name


def test_compile_brings_the_engine_home(here, small_export, bundle, digits, tmp_path):
    done = here("compile", small_export, "--target", "openvino-cpu", "-o", "engine", "--on", "board")
    assert done.returncode == 0, done.stderr
    manifest = read_bundle(tmp_path / "engine")
    verify_files(tmp_path / "engine", manifest)
    assert manifest.engines[0].files == ("engines/openvino-cpu/model.xml", "engines/openvino-cpu/model.bin")
    image = next((digits / "evaluation" / "7").glob("*.png"))
    with load(tmp_path / "engine") as ours, load(bundle) as theirs:
        assert ours.predict(image).label == theirs.predict(image).label


def test_a_job_that_was_left_there_is_fetched_by_the_same_command(client, compile_job, run, board):
    job, files = compile_job
    client.ask_status("status", job.digest)
    client._send(job, [files[entry.path] for entry in job.files])
    wait_until(lambda: (board.jobs[0] / "result").is_dir())
    with run() as (told, outcome):
        pass
    assert outcome[0].engines["small"].provider == "CPUExecutionProvider"
    assert any("is there already (done)" in text for text, *_ in told)
    assert board.jobs == []


def test_the_job_goes_on_while_the_connection_is_gone(run, board):
    lock = board.lock()
    with run() as (told, outcome):
        status_file(board)
        wait_until(lambda: any("waits for a job of another user" in text for text, *_ in told))
        wait_until(board.drop_connections)
        wait_until(lambda: any("connection lost" in text for text, *_ in told))
        lock.close()
    assert outcome[0].engines["small"].kernels["fp32"] > 0


def test_jobs_wait_in_the_order_of_their_arrival(client, compile_job, run, board, tmp_path):
    lock = board.lock()
    with run() as (_, outcome):
        first = status_file(board)
        before = subprocess.Popen(["sleep", "60"])
        queue = board.agent / "queue"
        wait_until(lambda: json.loads(first.read_text())["detail"])
        (ticket,) = queue.glob("[0-9]*")
        # An older ticket, of a living process: ours waits for it, whatever the lock says.
        mine = json.loads(ticket.read_text())
        started = int(Path(f"/proc/{before.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = {**mine["process"], "pid": before.pid, "started": started}
        (queue / "000000000").write_text(json.dumps({"what": "bench of ann@desk", "process": process}))
        wait_until(lambda: json.loads(first.read_text())["detail"] == "bench of ann@desk")
        lock.close()
        time.sleep(0.5)
        assert not (board.jobs[0] / "result").exists()
        before.kill()
        before.wait()
    assert outcome[0].engines


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"Port": 1}, "cannot be reached", "is it on?"),
        ({"UserKnownHostsFile": "FOLDER/other_known_hosts"}, "another host key than the one known", "ssh-keygen -R"),
        ({"UserKnownHostsFile": "/dev/null"}, "is not known here", "log in once by hand"),
        ({"IdentityFile": "FOLDER/other"}, "takes none of your keys", "ssh-copy-id"),
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


def test_one_device_that_fails_does_not_end_the_others(here, board, bundle, tmp_path):
    here("devices", "add", "off", "ssh://board:1", "--ssh-config", board.config())
    done = here("bench", bundle, "--on", "off,board", *QUICK, "--json")
    off, on = json.loads(done.stdout)["devices"]
    assert off["error"]["code"] == "VD4301" and on["results"]
    assert (done.returncode, "off (ssh://board:1) cannot be reached" in done.stderr) == (4, True)


def test_a_python_that_is_missing_or_too_old(board):
    with pytest.raises(DeviceError, match="has no Python at /no/python"):
        Client(board.device(python="/no/python")).probe()
    old = f"""exec {sys.executable} -c 'import sys; sys.version_info = (3, 8, 10); exec(sys.argv.pop(2))' "$@" """
    with pytest.raises(DeviceError, match="too old") as caught:
        Client(board.device(python=board.python("python3.8", old))).probe()
    assert "Python 3.8.10" in caught.value.found


def test_what_a_login_prints_is_not_taken_for_an_answer(board):
    noisy = board.python("noisy", f'echo Welcome; echo "{{}}"; echo to stderr >&2; exec {sys.executable} "$@"')
    assert Client(board.device(python=noisy)).probe().executable == sys.executable


def test_a_missing_runtime_is_told_with_its_pip_line(here, board, bundle, tmp_path):
    bare = board.python("bare", f"exec {sys.executable} -S \"$@\"")  # without its site-packages: no numpy, no runtime
    here("devices", "add", "bare", "ssh://board", "--python", bare, "--ssh-config", board.config())
    doctor = here("devices", "doctor", "bare")
    assert doctor.returncode == 4
    assert "missing  numpy, pillow" in doctor.stdout and "-m pip install numpy pillow" in doctor.stdout
    done = here("bench", bundle, "--on", "bare", *QUICK)
    assert done.returncode == 4
    assert "the package numpy is not installed" in done.stderr and "-m pip install numpy pillow" in done.stderr
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "onnxruntime.py").write_text("raise ModuleNotFoundError(name='onnxruntime')")
    partly = board.python("partly", f"PYTHONPATH={hidden} exec {sys.executable} \"$@\"")
    here("devices", "add", "partly", "ssh://board", "--python", partly, "--ssh-config", board.config())
    done = here("bench", bundle, "--on", "partly", *QUICK)
    assert done.returncode == 4
    assert "-m pip install onnxruntime" in done.stderr


def test_a_full_disk_there_is_told_and_leaves_nothing(board, run, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    small = board.home / ".cache"
    small.mkdir(exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.strip()}")
    try:
        with run() as (_, outcome):
            pass
        assert isinstance(outcome[0], StorageError)
        assert "bytes free" in outcome[0].found and outcome[0].exit_code == 4
        (small / "filler").write_bytes(b"\0" * 1_500_000)
        agent = board.agent / agent_package().digest / "agent.pyz"
        agent.unlink()
        with run() as (_, outcome):
            pass
        assert isinstance(outcome[0], DeviceError) and "No space left on device" in outcome[0].found
        assert board.jobs == [] and not agent.exists()
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
        wait_until(lambda: json.loads(file.read_text())["detail"])
        status = json.loads(file.read_text())
        if booted:  # the state that a job has after its device came up again
            status["process"]["boot"] = "another"
        os.kill(status["process"]["pid"], signal.SIGKILL)
        file.write_text(json.dumps(status))
    assert isinstance(outcome[0], DeviceError)
    assert "was lost" in outcome[0].message
    assert ("restarted" in outcome[0].found) == booted
    assert board.jobs == []


def test_an_interrupt_stops_the_job_and_says_so(board, compile_job, tmp_path, monkeypatch):
    job, files = compile_job
    monkeypatch.setattr(client_module, "FIRST_LOOK", 0.3)
    noted = []

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    def tell(text, done, total):
        if "waits for" in text:
            threading.Timer(0.1, interrupt).start()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with board.lock(), pytest.raises(KeyboardInterrupt):
            on_all([board.device()], lambda client: client.run(job, files, tmp_path, tell), noted.append)
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == ["board: the job was stopped"]
    assert board.jobs == [] and not list((board.agent / "queue").glob("[0-9]*"))


def test_a_device_that_stays_away_keeps_its_job(run, board, client, monkeypatch):
    monkeypatch.setattr(client_module, "PATIENCE_SECONDS", 0.5)
    with board.lock(), run() as (told, outcome):
        status_file(board)
        wait_until(lambda: any("waits for" in text for text, *_ in told))
        client.device = board.device(ssh_config=str(board.config(Port=1)))
        wait_until(lambda: outcome)
        assert "the same command fetches the result later" in outcome[0].fix
        assert "cannot be reached, so its job goes on" in client.stop()
        assert len(board.jobs) == 1


def test_cancelled_work_ends(board, compile_job, tmp_path):
    job, files = compile_job
    client = Client(board.device())
    client.cancelled.set()
    with pytest.raises(Interrupted):
        client.run(job, files, tmp_path, lambda *progress: None)


def test_results_that_were_changed_there_are_refused(client, compile_job, run, board, tmp_path):
    job, files = compile_job

    def finished():
        client._send(job, [files[entry.path] for entry in job.files])
        wait_until(lambda: (board.jobs[0] / "result").is_dir())
        return board.jobs[0] / "result" / "result.json"

    result = finished()
    text = result.read_text()
    result.write_text(text.replace(job.digest, "0" * 64))
    with run() as (_, outcome):
        pass
    assert isinstance(outcome[0], DeviceResultError) and "another job" in outcome[0].message
    assert board.jobs == []
    result = finished()
    secret = tmp_path / "secret"
    secret.write_text("never to be listed")
    found = json.loads(text)
    found["files"] = [{"path": "model.xml", "bytes": 18, "sha256": hashlib.sha256(secret.read_bytes()).hexdigest()}]
    result.write_text(json.dumps(found))
    (result.parent / flat("model.xml")).symlink_to(secret)
    with run() as (_, outcome):
        pass
    assert isinstance(outcome[0], DeviceResultError) and "other files" in outcome[0].message
