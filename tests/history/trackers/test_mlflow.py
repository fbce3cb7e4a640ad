"""Results in MLflow: its real client and its real server; and services that refuse, are late, or break off."""

import contextlib
import dataclasses
import http.server
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from tests.command_line import command_line, undisturbed
from tests.history.made import MEASURED, START, bench_document, bench_rows, machine, report, stamped
from vitdeploy.api.bench import Benchmark
from vitdeploy.errors import AnswersError, HostError, MissingPackageError
from vitdeploy.history.api import record, recorded, report_to
from vitdeploy.history.files import append
from vitdeploy.history.of_documents import row_of_canary, rows_of_report
from vitdeploy.history.row import open_place
from vitdeploy.history.trackers import Attached, TrackedResult, open_tracker

if importlib.util.find_spec("mlflow") is None:  # imported by the tests alone: it takes long
    pytest.skip("needs MLflow's client: pip install 'vitdeploy[tracking]'", allow_module_level=True)

ROOT = Path(__file__).parent.parent.parent.parent
ENGINE = "openvino-cpu-fp32"


def silent(text, done, total):
    """Nobody is told how far it is."""


def server_command():
    """MLflow with its server: in an environment of its own (`make mlflow-server`), as it wants an older pyarrow, or
    wherever it is found."""
    own = ROOT / "build" / "mlflow" / "bin" / "mlflow"
    found = str(own) if own.exists() else shutil.which("mlflow")
    if found is None or subprocess.run([found, "server", "--help"], capture_output=True).returncode:
        pytest.skip("no server of MLflow here: make mlflow-server")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URI of a server on loopback."""
    folder, command = tmp_path_factory.mktemp("mlflow"), server_command()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "files")]
    options += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [command, "server", *options], env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        uri = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{uri}/health", timeout=5):  # noqa: S310
                break
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            time.sleep(0.1)
        yield uri
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.fixture
def runs(server, request, monkeypatch):
    """What the server has of an experiment of this test."""
    from mlflow import MlflowClient

    name = request.node.name[:60]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", name)
    client = MlflowClient(server)

    def found():
        experiment = client.get_experiment_by_name(name)
        return [] if experiment is None else list(client.search_runs([experiment.experiment_id], max_results=1000))

    found.client = client
    return found


def test_a_history_is_sent_once(server, runs, tmp_path):
    for number, p50 in enumerate((1.0, 2.0)):
        append(open_place(tmp_path), bench_rows(p50, number), bench_document(p50))
    uri = f"mlflow:{server}"
    assert str(report_to(uri, tmp_path, progress=False)).endswith(": 2 results sent")
    append(open_place(tmp_path), bench_rows(3.0, 2), bench_document(3.0))
    assert str(report_to(uri, tmp_path, progress=False)).endswith(": 1 result sent, 2 already there")
    found = sorted(runs(), key=lambda run: run.info.start_time)
    assert [run.data.metrics[f"{ENGINE}/p50_ms"] for run in found] == [1.0, 2.0, 3.0]
    assert [run.info.start_time - 1000 * START.timestamp() for run in found] == [0, 3_600_000, 7_200_000]
    assert {run.info.status for run in found} == {"FINISHED"}
    params = found[0].data.params
    assert params["model"] == "vit" and params[f"{ENGINE}/precision"] == "fp32" and params["cpu"] == "a CPU"
    assert params[f"{ENGINE}/runtime"] == "openvino 2026.3.0"
    assert [each.path for each in runs.client.list_artifacts(found[0].info.run_id)] == ["result.json"]


def test_a_run_goes_with_its_page_and_its_bundle(server, runs, tmp_path):
    (tmp_path / "bundle" / "engines").mkdir(parents=True)
    (tmp_path / "bundle" / "manifest.json").write_text("{}")
    (tmp_path / "bundle" / "engines" / "graph.onnx").write_bytes(b"\0" * 1000)
    rows = stamped(rows_of_report(report(), machine()), 1)
    attached = Attached({"report.html": b"<!doctype html>", "result.json": b"{}"}, {"recipe.precision": "int8"})
    tracker = open_tracker(f"mlflow:{server}")
    tracker.send([TrackedResult(tuple(rows), lambda: attached, tmp_path / "bundle")], silent)
    (run,) = runs()
    assert run.data.params["recipe.precision"] == "int8" and run.info.run_name == "example run"
    paths = [each.path for each in runs.client.list_artifacts(run.info.run_id)]
    assert paths == ["bundle", "report.html", "result.json"]
    file = runs.client.download_artifacts(run.info.run_id, "bundle/engines/graph.onnx", str(tmp_path))
    assert Path(file).read_bytes() == b"\0" * 1000


def test_what_is_not_decided_and_what_failed_say_so(server, runs, tmp_path):
    append(open_place(tmp_path), bench_rows(1.0, reason="a busy machine"), bench_document(1.0))
    canary = row_of_canary(AnswersError("wrong answers", found="2 of 8"), MEASURED, machine(), START)
    append(open_place(tmp_path), [canary], {})
    report_to(f"mlflow:{server}", tmp_path, progress=False)
    undecided, failed = sorted(runs(), key=lambda run: run.info.status == "FAILED")
    assert f"{ENGINE}/p50_ms" not in undecided.data.metrics
    assert undecided.data.metrics[f"{ENGINE}/undecided/p50_ms"] == 1.0
    assert undecided.data.tags["vitdeploy.undecided"] == ENGINE
    assert (failed.info.status, failed.data.metrics) == ("FAILED", {})
    assert "2 of 8" in failed.data.params[f"{ENGINE}/error"]


def test_what_was_sent_in_part_goes_on_in_the_same_run(server, runs):
    def cut():
        raise KeyboardInterrupt

    tracker, rows = open_tracker(f"mlflow:{server}"), tuple(stamped(bench_rows(1.0), 1))
    with pytest.raises(KeyboardInterrupt):
        tracker.send([TrackedResult(rows, cut)], silent)
    assert [run.info.status for run in runs()] == ["RUNNING"]
    told = open_tracker(f"mlflow:{server}").send([TrackedResult(rows)], silent)
    assert (told.new, told.already) == (1, 0)
    (run,) = runs()
    assert run.info.status == "FINISHED" and run.data.metrics[f"{ENGINE}/p50_ms"] == 1.0


def test_more_rows_than_one_request_takes(server, runs):
    rows = [dataclasses.replace(bench_rows(1.0)[0], artifact=f"engine-{number}") for number in range(90)]
    open_tracker(f"mlflow:{server}").send([TrackedResult(tuple(stamped(rows, 1)))], silent)
    (run,) = runs()
    assert len([name for name in run.data.metrics if name.endswith("/p50_ms")]) == 90
    assert len([name for name in run.data.params if name.endswith("/precision")]) == 90


def test_from_the_command_line_and_around_a_measurement(server, runs, tmp_path):
    record(tmp_path / "h", Benchmark(bench_document(1.0)))
    with undisturbed(tmp_path), command_line(tmp_path, tmp_path / "store") as run:
        done = run("history", "h", "--report-to", f"mlflow:{server}", "--report-to", "bencher:b.json")
    assert done.returncode == 0, done.stderr
    assert f"mlflow:{server}, experiment " in done.stdout and ": 1 result sent" in done.stdout
    with recorded(tmp_path / "h", [f"mlflow:{server}"]) as write:
        write(Benchmark(bench_document(2.0)))
    assert str(report_to(f"mlflow:{server}", tmp_path / "h", progress=False)).endswith(
        "0 results sent, 2 already there"
    )
    assert len(runs()) == 2 and (tmp_path / "b.json").exists()


# --- without a server that does what it should ------------------------------------------------------------------------


class Faulty(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.fault(self)

    do_POST = do_GET

    def log_message(self, *given):
        pass


@contextlib.contextmanager
def faulty(fault):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faulty)
    server.fault = fault
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"me:SECRET@127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def half(handler):
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"experiment": ')


def page(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "6")
    handler.end_headers()
    handler.wfile.write(b"<html>")


@pytest.mark.parametrize(
    ("fault", "found"), [(half, "no answer|MlflowException"), (page, "MlflowException"), (None, "MlflowException")]
)
def test_a_server_that_answers_half_something_else_or_not_at_all(monkeypatch, fault, found):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    at = faulty(fault) if fault else contextlib.nullcontext("me:SECRET@127.0.0.1:9")
    with at as place, pytest.raises(HostError, match="cannot be used") as told:
        open_tracker(f"mlflow:http://{place}").prepare()
    assert told.value.found.startswith(tuple(found.split("|"))) and told.value.exit_code == 4
    assert "SECRET" not in str(told.value) and "mlflow:http://127.0.0.1:" in str(told.value)


def unauthorized(handler):
    """As MLflow's own server with --app-name basic-auth answers."""
    text = b"You are not authenticated. Please see https://www.mlflow.org/docs/latest/auth/index.html"
    handler.send_response(401)
    handler.send_header("WWW-Authenticate", 'Basic realm="mlflow"')
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text)


def test_credentials_that_are_missing_are_named_by_their_variables(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "WRONG-SECRET")
    with faulty(unauthorized) as place, pytest.raises(HostError, match="refuses") as told:
        open_tracker(f"mlflow:http://{place}").prepare()
    assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in told.value.expected
    assert "SECRET" not in str(told.value) and told.value.__suppress_context__


def test_a_server_that_is_late_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("vitdeploy.history.trackers.PATIENCE_SECONDS", 0.3)
    ended = threading.Event()
    with faulty(lambda handler: ended.wait(20)) as place:
        with pytest.raises(HostError, match="does not answer") as told:
            open_tracker(f"mlflow:http://{place}").prepare()
        ended.set()
    assert told.value.found == "no answer for 0 s" and "SECRET" not in str(told.value)


def test_a_tracker_that_cannot_be_sent_to_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(HostError), recorded(None, ["mlflow:http://127.0.0.1:9"]):
        pytest.fail("measured")


def test_without_its_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match="mlflow") as told:
        open_tracker("mlflow")
    assert told.value.fix == "pip install 'vitdeploy[tracking]'"
