"""`vitdeploy serve` as people and orchestrators run it: a process that is started, used and stopped."""

import http.client
import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from vitdeploy.cli.main import cli
from vitdeploy.errors import HostError, MissingFileError, MissingPackageError, TargetError

ROOT = Path(__file__).parent.parent.parent
BODY = json.dumps(
    {"inputs": [{"name": "image", "shape": [1, 8, 8, 1], "datatype": "UINT8", "data": list(range(64))}]}
).encode()


class Client(threading.Thread):
    """Asks one request after the other on one connection, until the server takes no more."""

    def __init__(self, port, seen):
        super().__init__()
        self.port, self.seen = port, seen
        self.statuses = []
        self.broken = 0

    def run(self):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        while True:
            try:
                connection.request("POST", "/v2/models/quarters/infer", BODY, {"Content-Type": "application/json"})
                answer = connection.getresponse()
            except OSError:  # nobody took the request
                return
            try:
                answer.read()
            except http.client.HTTPException:
                self.broken += 1
                return
            self.statuses.append(answer.status)
            self.seen.release()
            if answer.status != 200:
                return


def test_a_stop_under_load_loses_nothing_that_was_accepted(served_bundle):
    arguments = ["serve", str(served_bundle), "--port", "0", "--json", "--max-batch", "4"]
    command = [sys.executable, "-c", "from vitdeploy.cli.main import main; main()", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    told = []
    reader = threading.Thread(target=lambda: told.extend(process.stderr))
    reader.start()
    try:
        document = json.loads("".join(itertools.takewhile(lambda line: line != "}\n", process.stdout)) + "}")
        assert document["model"] == "quarters"
        assert document["engine"] == "onnxruntime-cpu-fp32"
        port = int(document["address"].rpartition(":")[2])
        seen = threading.Semaphore(0)
        clients = [Client(port, seen) for _ in range(8)]
        for client in clients:
            client.start()
        for _ in range(200):
            assert seen.acquire(timeout=20)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(20)
        assert process.wait(20) == 0
    finally:
        process.kill()
        reader.join()
        process.stdout.close()
        process.stderr.close()
    lines = [json.loads(line) for line in told if line.startswith("{")]
    answered = sum(client.statuses.count(200) for client in clients)
    assert answered >= 200
    assert answered == sum(line.get("status") == 200 for line in lines)
    assert {status for client in clients for status in client.statuses} <= {200, 503}
    assert not any(client.broken for client in clients)
    assert lines[-1]["message"] == "stopped"
    assert {"time", "level", "id", "method", "path", "status", "ms", "images", "batch"} <= set(lines[0])


def serve(*arguments):
    """What the command raises, without a process of its own."""
    return CliRunner().invoke(cli, ["serve", *map(str, arguments)]).exception


def test_a_port_in_use_is_told(served_bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = serve(served_bundle, "--port", taken.getsockname()[1])
    assert isinstance(error, HostError)
    assert error.exit_code == 4
    assert "in use" in error.found
    assert "--port 0" in error.fix


def test_an_address_of_another_machine_is_told(served_bundle):
    error = serve(served_bundle, "--host", "192.0.2.1", "--port", 0)
    assert isinstance(error, HostError)
    assert "cannot listen on 192.0.2.1" in error.message
    assert isinstance(serve(served_bundle, "--host", "no such host", "--port", 0), HostError)


def test_a_wrong_bundle_or_target_is_told(served_bundle, tmp_path):
    assert isinstance(serve(tmp_path, "--port", 0), MissingFileError)
    assert isinstance(serve(served_bundle, "--port", 0, "--target", "tensorrt"), TargetError)


def test_without_the_packages_the_command_says_which_extra(served_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "vitdeploy.serve.server", raising=False)
    monkeypatch.delitem(sys.modules, "vitdeploy.serve.server", raising=False)
    error = serve(served_bundle, "--port", 0)
    assert isinstance(error, MissingPackageError)
    assert error.fix == "pip install 'vitdeploy[serve]'"


@pytest.mark.parametrize("option", [("--port", "70000"), ("--max-delay-ms", "nan"), ("--max-body", "0")])
def test_options_out_of_range_are_refused(served_bundle, option):
    done = CliRunner().invoke(cli, ["serve", str(served_bundle), *option])
    assert done.exit_code == 2
    assert option[0] in done.output
