"""Results in Weights & Biases: its real client, without a network, and its file read back record by record."""

import contextlib
import http.server
import importlib.util
import json
import os
import struct
import subprocess
import sys
import threading

import pytest

from tests.history.made import MEASURED, START, bench_document, bench_rows, machine, report, stamped
from vitdeploy.api.bench import Benchmark
from vitdeploy.errors import AnswersError, HostError, MissingPackageError
from vitdeploy.history.api import record, report_to
from vitdeploy.history.files import append
from vitdeploy.history.of_documents import row_of_canary, rows_of_report
from vitdeploy.history.row import open_place
from vitdeploy.history.trackers import Attached, TrackedResult, open_tracker

if importlib.util.find_spec("wandb") is None:  # imported by the tests alone: it takes long
    pytest.skip("needs the client: pip install 'vitdeploy[tracking]'", allow_module_level=True)

ENGINE = "openvino-cpu-fp32"
KEY = "SECRET" * 6 + "KEYS"


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def records(file):
    """The records of a file of the client: LevelDB's log format, in blocks of 32 KiB behind a header of 7 bytes, with
    messages of the client's own definition in it."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, found = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def runs(folder):
    """What the files of all runs say: project, configuration, summary, exit code and artifacts."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        each = {"config": {}, "summary": {}, "artifacts": {}}
        for record_ in records(file):
            kind = record_.WhichOneof("record_type")
            if kind == "run":
                each |= {"id": record_.run.run_id, "project": record_.run.project, "name": record_.run.display_name}
                each["config"] |= {item.key: json.loads(item.value_json) for item in record_.run.config.update}
            elif kind == "summary":
                names = {item.key or "/".join(item.nested_key): item for item in record_.summary.update}
                each["summary"] |= {name: json.loads(item.value_json) for name, item in names.items()}
            elif kind == "exit":
                each["exit"] = record_.exit.exit_code
            elif kind == "artifact" or (kind == "request" and record_.request.HasField("log_artifact")):
                artifact = record_.artifact if kind == "artifact" else record_.request.log_artifact.artifact
                each["artifacts"][artifact.type] = sorted(entry.path for entry in artifact.manifest.contents)
        found.append(each)
    return found


def test_a_history_is_sent_once(offline):
    for number, p50 in enumerate((1.0, 2.0)):
        append(open_place(offline / "h"), bench_rows(p50, number), bench_document(p50))
    told = str(report_to("wandb:team/vision", offline / "h", progress=False))
    assert told == "wandb:team/vision, offline: 2 results sent"
    append(open_place(offline / "h"), bench_rows(3.0, 2), bench_document(3.0))
    told = str(report_to("wandb:team/vision", offline / "h", progress=False))
    assert told == "wandb:team/vision, offline: 1 result sent, 2 already there"
    found = sorted(runs(offline), key=lambda run: run["config"]["time"])
    assert [run["summary"][f"{ENGINE}/p50_ms"] for run in found] == [1.0, 2.0, 3.0]
    assert {run["project"] for run in found} == {"vision"} and {run["exit"] for run in found} == {0}
    assert len({run["id"] for run in found}) == 3
    assert found[0]["config"]["model"] == "vit" and found[0]["config"][f"{ENGINE}/runtime"] == "openvino 2026.3.0"


def test_a_run_goes_with_its_page_and_its_bundle(offline):
    (offline / "bundle" / "engines").mkdir(parents=True)
    (offline / "bundle" / "manifest.json").write_text("{}")
    (offline / "bundle" / "engines" / "graph.onnx").write_bytes(b"\0" * 1000)
    rows = stamped(rows_of_report(report(), machine()), 1)
    attached = Attached({"report.html": b"<!doctype html>", "result.json": b"{}"}, {"recipe.precision": "int8"})
    outcome = TrackedResult(tuple(rows), lambda: attached, offline / "bundle")
    open_tracker("wandb").send([outcome], lambda *given: None)
    (run,) = runs(offline)
    assert run["project"] == "vitdeploy" and run["config"]["recipe.precision"] == "int8"
    assert run["artifacts"] == {
        "report": ["report.html", "result.json"],
        "model": ["engines/graph.onnx", "manifest.json"],
    }


def test_what_is_not_decided_and_what_failed_say_so(offline):
    undecided = TrackedResult(tuple(stamped(bench_rows(1.0, reason="a busy machine"), 1)))
    canary = row_of_canary(AnswersError("wrong answers", found="2 of 8"), MEASURED, machine(), START)
    open_tracker("wandb").send([undecided, TrackedResult(tuple(stamped([canary], 2)))], lambda *given: None)
    found = {run["exit"]: run for run in runs(offline)}
    assert f"{ENGINE}/p50_ms" not in found[0]["summary"]
    assert found[0]["summary"][f"{ENGINE}/undecided/p50_ms"] == 1.0
    assert "2 of 8" in found[1]["config"][f"{ENGINE}/error"]
    assert not any(name.endswith("p50_ms") for name in found[1]["summary"])


def test_what_was_cut_off_is_sent_again(offline):
    def cut():
        raise KeyboardInterrupt

    rows = tuple(stamped(bench_rows(1.0), 1))
    with pytest.raises(KeyboardInterrupt):
        open_tracker("wandb").send([TrackedResult(rows, cut)], lambda *given: None)
    told = open_tracker("wandb").send([TrackedResult(rows)], lambda *given: None)
    assert (told.new, told.already) == (1, 0) and len(runs(offline)) == 1


# --- with a network, in processes of their own: the client keeps what it has read of the environment ------------------


@contextlib.contextmanager
def refusing():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(401)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *given):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def online(folder, **environment):
    record(folder / "h", Benchmark(bench_document(1.0)))
    command = "from vitdeploy.cli.main import main; main()"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, "-c", command, "history", "h", "--report-to", "wandb"],
        cwd=folder,
        env={**kept, "HOME": str(folder), "NETRC": str(folder / "none"), "WANDB_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
    )


def test_a_missing_key_is_named_by_its_variable(tmp_path):
    done = online(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 4 and "WANDB_API_KEY" in done.stderr, done.stderr
    assert "found:    none" in done.stderr


def test_a_key_that_the_server_refuses_is_never_printed(tmp_path):
    with refusing() as url:
        done = online(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY=KEY)
    assert done.returncode == 4 and "a key that the server refuses" in done.stderr, done.stderr
    assert "SECRET" not in done.stdout + done.stderr


def test_a_server_that_does_not_answer_is_told(monkeypatch):
    tracker = open_tracker("wandb")
    monkeypatch.setattr("vitdeploy.history.trackers.PATIENCE_SECONDS", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(tracker, "_has_key", lambda: ended.wait(20))
    monkeypatch.setattr(tracker, "_offline", False)
    with pytest.raises(HostError, match="does not answer"):
        tracker.prepare()
    ended.set()


def test_a_client_that_is_switched_off_is_told(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(HostError, match="is switched off"):
        open_tracker("wandb").prepare()


def test_without_its_client_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingPackageError, match="wandb") as told:
        open_tracker("wandb")
    assert told.value.fix == "pip install 'vitdeploy[tracking]'"
