"""What trackers get of a result: names that say whose numbers they are, and which of them are not decided."""

import dataclasses
import json
import re

import pytest

from tests.history.made import MEASURED, START, bench_document, bench_rows, machine, report, stamped
from tests.report.pages import compare_document, run_report, sweep_document
from vitdeploy.api.bench import Benchmark
from vitdeploy.api.values import Reporter
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.errors import AnswersError, InputError, OutputError
from vitdeploy.history.api import outcomes_of_history, outcomes_of_result, record, report_to
from vitdeploy.history.files import append
from vitdeploy.history.of_documents import (
    MeasuredArtifact,
    row_of_canary,
    rows_of_comparison,
    rows_of_report,
    rows_of_sweep,
)
from vitdeploy.history.row import open_place
from vitdeploy.history.trackers import TrackedResult, open_tracker, outcomes_of
from vitdeploy.history.trackers.bencher import metrics_of
from vitdeploy.spec import decode, encode

ENGINE = "openvino-cpu-fp32"


def outcome(rows):
    return TrackedResult(tuple(stamped(rows, 1)))


def test_a_result_says_what_was_measured_where_and_with_what():
    document = report()
    found = outcome(rows_of_report(document, machine(driver="550.1")))
    engine = document.engines[0]
    row = document.bench.row(engine.artifact)
    assert found.params["model"] == "example" and found.params["cpu"] == document.environment["cpu"]
    assert found.params[f"{engine.artifact}/precision"] == engine.precision
    assert found.params[f"{engine.artifact}/target"] == engine.target
    assert found.params[f"{engine.artifact}/decided"] == "yes"
    assert found.metrics[f"{engine.artifact}/p50_ms"] == row.latency_ms.p50
    assert found.metrics[f"{engine.artifact}/p99_ms"] == row.latency_ms.p99
    assert found.metrics[f"{engine.artifact}/throughput"] == row.throughput
    assert found.metrics[f"{engine.artifact}/top-1"] == 97.5
    assert found.metrics[f"{engine.artifact}/original top-1"] == 98.0
    assert found.metrics[f"{engine.artifact}/drop"] == 0.5
    assert found.metrics[f"{engine.artifact}/agreement_low"] == 95.0
    assert found.metrics[f"{engine.artifact}/size_bytes"] == engine.bytes
    assert f"{engine.artifact}/undecided" not in found.params and not found.failed


def test_times_that_are_not_decided_have_names_that_say_so():
    found = outcome(bench_rows(2.0, reason="other work took 30 % of the processors"))
    assert f"{ENGINE}/p50_ms" not in found.metrics and found.metrics[f"{ENGINE}/undecided/p50_ms"] == 2.0
    assert all(name.startswith(f"{ENGINE}/undecided/") for name in found.metrics)
    assert found.params[f"{ENGINE}/decided"] == "no" and "30 %" in found.params[f"{ENGINE}/undecided"]
    assert found.tags["vitdeploy.undecided"] == ENGINE


def test_a_canary_has_failed_and_no_numbers():
    error = AnswersError("wrong answers here", found="2 of 8")
    found = outcome([row_of_canary(error, MEASURED, machine(), START)])
    assert found.failed and found.metrics == {}
    assert found.params[f"{ENGINE}/error"] == "VD4204: wrong answers here: 2 of 8"


def test_one_result_has_one_name_and_another_has_another():
    rows = stamped(bench_rows(1.0), 1)
    assert TrackedResult(tuple(rows)).id == TrackedResult(tuple(rows)).id
    others = [{"run": "0" * 12}, {"model": "other"}, {"model_digest": "cd" * 32}]
    assert len({TrackedResult((dataclasses.replace(rows[0], **each),)).id for each in [{}, *others]}) == 4


def test_rows_of_two_models_are_two_outcomes():
    rows = stamped([*bench_rows(1.0), dataclasses.replace(bench_rows(2.0)[0], model="other")], 1)
    assert [[row.model for row in each] for each in outcomes_of([*rows, *rows])] == [["vit"] * 2, ["other"] * 2]


def test_two_rows_of_one_artifact_lose_neither():
    rows = [*bench_rows(1.0), dataclasses.replace(bench_rows(2.0)[0], batch=8)]
    found = outcome(rows).metrics
    assert (found[f"{ENGINE}/p50_ms"], found[f"{ENGINE} 2/p50_ms"]) == (1.0, 2.0)


def test_names_have_no_character_that_mlflow_refuses():
    row = dataclasses.replace(bench_rows(1.0)[0], artifact='../a (2)"\n/é.onnx', metric="mAP@[.5:.95]", value=1.0)
    found = outcome([row])
    names = [*found.metrics, *found.params]
    assert all(re.fullmatch(r"[\w\-. :/]{1,250}", name, re.ASCII) for name in names)
    assert not any(part in ("", ".", "..") for name in names for part in name.split("/"))


# --- with documents ---------------------------------------------------------------------------------------------------


def attached(tmp_path, rows, document):
    append(open_place(tmp_path), rows, document)
    return [each.attach() for each in outcomes_of_history(tmp_path, Reporter(quiet=True))]


def test_a_run_of_a_history_brings_its_document_page_and_recipe(tmp_path):
    document = decode(type(report()), run_report())
    (found,) = attached(tmp_path, rows_of_report(document, machine()), document)
    assert json.loads(found.files["result.json"]) == encode(document)
    assert found.files["report.html"].startswith(b"<!doctype html>")
    assert found.params and all(name.startswith("recipe.") for name in found.params)


def test_a_comparison_brings_its_page(tmp_path):
    document = decode(ComparisonDocument, compare_document())
    rows = rows_of_comparison(document, MeasuredArtifact("mine", ""), machine())
    (found,) = attached(tmp_path, rows, document)
    assert b"<!doctype html>" in found.files["report.html"] and found.params == {}


def test_each_recipe_of_a_sweep_brings_its_own_report(tmp_path):
    document = decode(SweepDocument, sweep_document())
    found = attached(tmp_path, rows_of_sweep(document, machine()), document)
    made, failed = (
        [json.loads(each.files["result.json"]) for each in found if ("report.html" in each.files) == page]
        for page in (True, False)
    )
    assert [each["name"] for each in made] == [each.report.name for each in document.recipes if each.report]
    assert [each["code"] for each in failed] == [each.error.code for each in document.recipes if each.error]


def test_what_no_document_is_left_of_is_sent_without(tmp_path):
    record(tmp_path, Benchmark(bench_document(1.0)))
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "renamed.parquet")
    (found,) = outcomes_of_history(tmp_path, Reporter(quiet=True))
    assert found.attach().files == {} and found.metrics


def test_a_bench_goes_with_its_document_alone():
    result = Benchmark(bench_document(1.0))
    (found,) = outcomes_of_result(result, stamped(bench_rows(1.0), 1), bundle=True)
    assert list(found.attach().files) == ["result.json"] and found.bundle is None


# --- Bencher ----------------------------------------------------------------------------------------------------------


def test_bencher_gets_its_units_and_the_machine_in_the_name():
    found, left_out = metrics_of(bench_rows(2.0))
    assert left_out == []
    ((name, measures),) = found.items()
    assert name == f"vit, {ENGINE}, batch 1, a CPU, 4 cores"
    assert measures["latency"] == {
        "value": pytest.approx(2e6),
        "lower_value": pytest.approx(1.96e6),
        "upper_value": pytest.approx(2.04e6),
    }
    assert measures["throughput"]["value"] == 1000.0 and set(measures) == {"latency", "p99-latency", "throughput"}


def test_bencher_gets_accuracies_and_sizes_of_a_run():
    found, _ = metrics_of(rows_of_report(report(), machine()))
    (measures,) = [each for each in found.values() if "agreement" in each]
    assert measures["top-1"] == {"value": 97.5} and measures["file-size"]["value"] > 0
    assert measures["drop"] == {"value": 0.5, "lower_value": -0.5, "upper_value": 1.5}


def test_times_that_are_not_decided_are_left_out_for_bencher_and_named():
    canary = row_of_canary(AnswersError("wrong", found="0 of 8"), MeasuredArtifact("b", ENGINE), machine(), START)
    found, left_out = metrics_of([*bench_rows(2.0, reason="a busy machine"), canary])
    assert found == {}
    assert [(each.what.split(",")[0], each.why) for each in left_out] == [
        ("vit", "a busy machine"),
        ("b", "VD4204: wrong: 0 of 8"),
    ]


def test_of_a_history_bencher_gets_the_latest_of_each_series(tmp_path):
    for p50 in (1.0, 2.0, 3.0):
        append(open_place(tmp_path / "h"), bench_rows(p50), bench_document(p50))
    file = tmp_path / "bmf.json"
    for _ in range(2):
        told = report_to(f"bencher:{file}", tmp_path / "h", progress=False)
        assert str(told) == f"bencher:{file}: 3 results sent"
    (measures,) = json.loads(file.read_text()).values()
    assert measures["latency"]["value"] == pytest.approx(3e6)


def test_several_results_of_one_command_are_in_one_file(tmp_path):
    tracker = open_tracker(f"bencher:{tmp_path / 'bmf.json'}")
    for name in ("one", "two"):
        tracker.send([outcome([dataclasses.replace(bench_rows(1.0)[0], model=name)])], lambda *given: None)
    assert len(json.loads((tmp_path / "bmf.json").read_text())) == 2


def test_a_file_of_something_else_is_not_replaced_and_told_before(tmp_path):
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    with pytest.raises(OutputError, match="is not replaced"):
        open_tracker(f"bencher:{tmp_path / 'mine.json'}").prepare()
    new = open_tracker(f"bencher:{tmp_path / 'new.json'}")
    new.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]


@pytest.mark.parametrize(
    ("text", "found"), [("tensorboard", "tensorboard"), ("bencher", "bencher without a file"), ("", "")]
)
def test_a_tracker_that_nobody_knows_is_refused(text, found):
    with pytest.raises(InputError, match="unknown tracker") as told:
        open_tracker(text)
    assert told.value.found == found and "bencher:FILE" in told.value.expected
