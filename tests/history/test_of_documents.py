"""Each kind of document as rows: what it says, and nothing that it does not say."""

import pytest

from tests.history.made import MEASURED, START, bench_document, bench_rows, machine, report
from tests.report.pages import compare_document, run_report, sweep_document
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.errors import AnswersError
from vitdeploy.history.of_documents import (
    MeasuredArtifact,
    MeasuredMachine,
    digest_of,
    moment,
    row_of_canary,
    rows_of_comparison,
    rows_of_report,
    rows_of_sweep,
)
from vitdeploy.spec import decode


def test_a_run_has_a_row_for_each_artifact():
    document = report()
    rows = rows_of_report(document, machine())
    assert [row.artifact for row in rows] == [each.artifact for each in document.bench.results]
    engine = document.engines[0]
    (row,) = [each for each in rows if each.artifact == engine.artifact]
    measured = document.bench.row(engine.artifact)
    assert (row.kind, row.model, row.target, row.precision) == ("run", "example", engine.target, engine.precision)
    assert row.time == moment(document.created) and row.cpu == document.environment["cpu"]
    assert (row.p50_ms, row.p99_ms, row.throughput) == (
        measured.latency_ms.p50,
        measured.latency_ms.p99,
        measured.throughput,
    )
    assert (row.metric, row.value, row.reference_value, row.samples) == ("top-1", 97.5, 98.0, 64)
    assert (row.drop, row.drop_low, row.drop_high) == (0.5, -0.5, 1.5)
    assert (row.agreement, row.agreement_low, row.agreement_high) == (99.0, 95.0, 99.8)
    assert (row.size_bytes, row.gate, row.flags) == (engine.bytes, engine.gate.status, " ".join(measured.flags))
    assert row.model_digest == digest_of(document.provenance.source.sha256)
    (original,) = [each for each in rows if each.artifact == "original"]
    assert (original.agreement, original.gate) == (None, None)


def test_what_was_not_measured_is_not_known():
    (row,) = rows_of_report(report(bench=None), machine())
    assert row.p50_ms is None and row.batch is None and row.agreement == 99.0


def test_what_a_report_does_not_decide_is_not_decided_here():
    document = decode(type(report()), run_report())
    rows = {row.artifact: row for row in rows_of_report(document, machine())}
    for artifact, reason in document.bench.undecided.items():
        assert (rows[artifact].decided, rows[artifact].undecided) == (False, reason)
    assert sum(row.decided for row in rows.values()) == len(rows) - len(document.bench.undecided)
    assert rows["original"].flags == "unstable contended short"


def test_a_bench_has_the_machine_and_the_runtime_that_it_was_on():
    facts = {"gpu": "an H200", "driver": "570.1"}
    (row,) = bench_rows(
        2.0, where=MeasuredMachine(machine().environment, {"openvino-cpu": facts}, "lab"), flags=["unstable"]
    )
    assert (row.kind, row.model, row.model_digest) == ("bench", "vit", "ab" * 32)
    assert (row.runtime, row.runtime_version, row.driver, row.device) == (
        "openvino",
        "2026.3.0",
        "570.1",
        "lab an H200",
    )
    assert (row.cores, row.cpu, row.vitdeploy, row.flags) == (4, "a CPU", "0.1.0", "unstable")
    assert (row.p50_ms_low, row.p50_ms_high) == pytest.approx((1.96, 2.04)) and row.throughput_low is None


def test_a_comparison_has_rows_of_the_candidate_alone():
    document = decode(ComparisonDocument, compare_document())
    rows = rows_of_comparison(document, MeasuredArtifact("vit", "", "cd"), machine())
    assert [row.artifact for row in rows] == [pair.engine for pair in document.engines]
    for row, pair in zip(rows, document.engines, strict=True):
        assert row.p50_ms == document.bench.row(f"candidate {pair.engine}").latency_ms.p50
        assert (row.kind, row.model, row.gate, row.model_digest) == ("compare", "vit", "fail", "cd")
        assert row.agreement is None  # of the same files nothing was asked


def test_a_comparison_of_reports_was_measured_nowhere():
    found = compare_document() | {"bench": None, "measured": False}
    found["engines"][0]["accuracy"]["how"] = "recorded"
    row, _ = rows_of_comparison(decode(ComparisonDocument, found), MeasuredArtifact("vit", ""), machine())
    assert (row.p50_ms, row.cpu, row.runtime_version) == (None, "", "") and row.agreement == 99.0


def test_a_sweep_has_its_failures_too():
    document = decode(SweepDocument, sweep_document())
    rows = rows_of_sweep(document, machine())
    assert {row.kind for row in rows} == {"sweep"} and rows[-1].model == "swin-tiny"
    assert rows[-1].error.startswith("VD2304: the checkpoint does not fit") and not rows[-1].decided
    found = sweep_document()
    found["recipes"][1]["error"]["code"] = AnswersError.code
    assert rows_of_sweep(decode(SweepDocument, found), machine())[-1].kind == "canary"


def test_wrong_golden_answers_are_a_row():
    error = AnswersError("openvino-cpu-fp32 gives wrong answers here", found="2 of 8 answers")
    row = row_of_canary(error, MEASURED, machine(), START)
    assert (row.kind, row.target, row.precision, row.gate) == ("canary", "openvino-cpu", "fp32", "fail")
    assert row.error == "VD4204: openvino-cpu-fp32 gives wrong answers here: 2 of 8 answers" and row.p50_ms is None


def test_the_digest_of_a_model_is_of_its_files_wherever_they_lie():
    assert digest_of({}) is None and digest_of({"a": "12"}) == "12"
    assert digest_of({"a": "12", "b": "34"}) == digest_of({"x": "34", "y": "12"}) != digest_of({"a": "12", "b": "35"})


def test_times_of_documents():
    assert moment("2025-01-02T03:04:05Z") == moment("2025-01-02T05:04:05+02:00") == moment("2025-01-02T03:04:05")
    assert moment("yesterday").tzinfo is not None
    assert bench_document(1.0).results[0].latency_ms.p50 == 1.0
