"""`--history` of the commands that measure, and `vitdeploy history`: what was recorded, and what it says."""

import json
import re
import sys

import pytest

from tests.command_line import command_line, undisturbed
from tests.history.made import bench_document, bench_rows, latencies, machine
from vitdeploy.api.bench import Benchmark
from vitdeploy.errors import AnswersError, GateError, MissingPackageError, StorageError
from vitdeploy.history.api import read_history, record, recorded
from vitdeploy.history.files import append, read_rows
from vitdeploy.history.row import open_place
from vitdeploy.known_bad.entries import KnownBadTable
from vitdeploy.spec import decode

MODEL = "vit_w32d2h2_patch8_32"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    with undisturbed(folder), command_line(folder, folder / "store", short_bench=True) as run:
        assert run("export", MODEL, "-o", "graph").returncode == 0
        assert run("compile", "graph", "--target", "onnxruntime-cpu", "-o", "bundle").returncode == 0
        run.folder = folder
        yield run


def rows(where):
    return read_rows(open_place(where), lambda text, done, total: None)[0]


@pytest.fixture(scope="module")
def slower(tmp_path_factory):
    """A history of 60 benches, of which the last 30 are slower, with another ONNX Runtime."""
    folder = tmp_path_factory.mktemp("slower")
    for number, p50 in enumerate(latencies(4, 60, 0.01, 0.0, 0.0, at=30, factor=1.2)):
        where = machine(openvino="2026.3.0" if number < 30 else "2026.4.0")
        found = bench_rows(float(p50), number, where, flags=["unstable"] if number == 59 else [])
        append(open_place(folder), found, bench_document(float(p50)))
    return folder


def test_a_bench_is_recorded(run):
    for _ in range(2):
        done = run("bench", "bundle", MODEL, "--scenario", "single", "--duration", "0.1", "--history", "benches")
        assert done.returncode == 0, done.stderr
    found = rows(run.folder / "benches")
    assert [(row.kind, row.target) for row in found] == 2 * [("bench", "onnxruntime-cpu"), ("bench", "original")]
    engine, original = found[:2]
    assert engine.artifact == "onnxruntime-cpu-fp32" and len(engine.model_digest) == 64
    assert engine.runtime == "onnxruntime" and engine.runtime_version and engine.cpu and engine.vitdeploy
    assert (original.model, original.runtime) == (MODEL, "torch")
    assert all(0 < row.p50_ms <= row.p99_ms and row.throughput > 0 for row in found)
    document = run("history", "benches", "--json").document
    assert document["results"] == 2 and len(document["series"]) == 2 and document["left_out"] == []
    assert all(len(series["points"]) == 2 for series in document["series"])


def test_a_comparison_is_recorded_before_its_gate(run):
    assert run("compile", "graph", "--target", "onnxruntime-cpu", "-o", "other").returncode == 0
    done = run("compare", "bundle", "other", "--duration", "0.1", "--max-drop", "1", "--history", "compared", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = rows(run.folder / "compared")
    assert (row.kind, row.artifact, row.gate) == ("compare", "onnxruntime-cpu-fp32", "pass")
    assert json.loads(done.stdout)["engines"][0]["same_engine"]  # so nothing was measured
    assert row.p50_ms is None and len(row.model_digest) == 64


def test_a_history_that_cannot_be_written_is_told_before_anything_is_measured(run):
    (run.folder / "file").write_text("mine")
    done = run("bench", "bundle", "--history", "file", "--json")
    assert done.returncode == 2 and "is not a folder" in json.loads(done.stdout)["error"]["message"]


def test_an_error_of_writing_comes_after_the_one_document(run, monkeypatch):
    def full(*given):
        raise StorageError("no space left to write h")

    monkeypatch.setattr("vitdeploy.history.api.append", full)
    command = ("bench", "bundle", "--scenario", "single", "--duration", "0.1", "--history", "h", "--json")
    done = run(*command)
    assert done.returncode == 4 and "no space left" in done.stderr
    assert json.loads(done.stdout)["results"]  # one document, and the result is in it


def test_the_text_says_when_and_what_changed_with_it(run, slower):
    told = run("history", slower).stdout
    assert "slower at 31" in told and "unstable" in told
    assert re.search(
        r"series 1: vit openvino-cpu-fp32 got 2\d\.\d % slower \(\d+\.\d to \d+\.\d\) at result 31 of 2026-01-02, "
        r"when the runtime changed from openvino 2026\.3\.0 to openvino 2026\.4\.0\.\n",
        told,
    )
    assert "the same on both sides: vitdeploy, model digest, host" in told


def test_the_page_is_one_file_and_replaces_no_other(run, slower):
    for _ in range(2):
        assert run("history", slower, "-o", "page.html").returncode == 0
    page = (run.folder / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "Slower" in page and "<script" not in page and "src=" not in page
    assert page.index("when the runtime changed from openvino 2026.3.0") < page.index("All series</h2>")
    (run.folder / "mine.html").write_text("<title>mine</title>")
    done = run("history", slower, "-o", "mine.html")
    assert done.returncode == 2 and "is not replaced" in done.stderr


def test_files_that_are_none_are_named_and_nothing_fails(run, tmp_path):
    append(open_place(tmp_path), bench_rows(1.0), {})
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    done = run("history", tmp_path)
    assert done.returncode == 0 and "cut.parquet: not a complete Parquet file" in done.stdout
    assert run("history", tmp_path / "nothing").returncode == 2


def test_a_canary_that_fails_is_recorded_and_raised(tmp_path):
    error = AnswersError("openvino-cpu-int8 gives wrong answers here", found="2 of 8")
    error.bundle, error.engine = "somewhere/bundle", "openvino-cpu-int8"
    with pytest.raises(AnswersError), recorded(tmp_path):
        raise error
    (row,) = rows(tmp_path)
    assert (row.kind, row.artifact, row.target) == ("canary", "openvino-cpu-int8", "openvino-cpu")
    assert "2 of 8" in row.error


def test_a_canary_of_a_bundle_brings_an_entry_for_the_table_of_runtimes(run, monkeypatch):
    def wrong(*given, **options):
        error = AnswersError("gives wrong answers here", found="0 of 8")
        error.bundle, error.engine = str(run.folder / "bundle"), "onnxruntime-cpu-fp32"
        raise error

    monkeypatch.setattr("vitdeploy.api.bench.bench.of", wrong)
    assert run("bench", "bundle", "--history", "canaries").returncode == 4
    done = run("history", "canaries", "-o", "canaries.html")
    assert "wrong answers: onnxruntime " in done.stdout and "--json contains a proposed entry" in done.stdout
    (found,) = run("history", "canaries", "--json").document["canaries"]
    (entry,) = decode(KnownBadTable, {"format": 1, "entries": [found["proposal"]]}).entries
    assert entry.runtime == "onnxruntime" and {"MatMul", "Softmax"} & set(entry.pattern.operators)
    assert "Wrong answers</h2>" in (run.folder / "canaries.html").read_text()


def test_without_a_history_nothing_is_written_nor_imported():
    with recorded(None) as write:
        write(Benchmark(bench_document(1.0)))


def test_a_gate_is_judged_after_its_result_was_recorded(tmp_path):
    with pytest.raises(GateError), recorded(tmp_path) as write:
        write(Benchmark(bench_document(1.0)))
        raise GateError("not met")
    assert len(rows(tmp_path)) == 1


def test_from_python(tmp_path):
    for p50 in (1.0, 1.1):
        record(tmp_path, Benchmark(bench_document(p50)))
    found = read_history(tmp_path, progress=False)
    assert found.document.results == 2 and found.slower == found.faster == ()
    assert "2 results in 1 series" in str(found) and "2 decided results" in str(found)


@pytest.mark.parametrize(("module", "uri"), [("pyarrow.parquet", "h"), ("fsspec", "memory://h")])
def test_without_its_packages_the_extra_is_named(tmp_path, monkeypatch, module, uri):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=module.partition(".")[0]) as told, recorded(uri):
        pass
    assert told.value.fix == "pip install 'vitdeploy[data]'"
