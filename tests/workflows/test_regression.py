"""`compare`: which engines are compared, what is judged, and what is said of bundles and of reports."""

import copy
import dataclasses
import json
import shutil
import xml.etree.ElementTree as ElementTree

import numpy as np
import onnx_ir as ir
import pytest

from tests.command_line import command_line
from tests.documents import bench_of, ratio_of, row
from tests.report.test_html import HOSTILE, REPORT, VERIFY, Page
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.bundle.read import read_bundle
from vitdeploy.document.comparison import ComparisonDocument, ComparisonLimits, TimeRatio
from vitdeploy.errors import InputError, MissingFileError, TargetError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.progress import silent
from vitdeploy.report.html import render_regression
from vitdeploy.report.text import render_junit
from vitdeploy.runtime import load
from vitdeploy.spec import decode, encode
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.regression import NOT_IN_TURNS, Pair, _timed, compare, judge, pair_up, unjudged

ENGINE = "openvino-cpu-int8"
STRICT = ComparisonLimits(max_drop=1.0, max_slowdown=5.0)


def a_report(right=9000, n=10000, milliseconds=2.0, flags=(), engine=ENGINE, seed=0):
    """A report.json with `right` answers of `n`, and 24 rounds around a latency that scatter by 1 %."""
    scatter = np.random.default_rng(seed).normal(1, 0.01, 24)
    report = copy.deepcopy(REPORT)
    report["engines"][0]["verify"] = VERIFY | {"n": n, "value": 100 * right / n}
    report["engines"][0]["artifact"] = report["bench"]["results"][1]["artifact"] = engine
    report["bench"]["results"][1]["flags"] = list(flags)
    report["bench"]["block_medians_ms"] = {engine: (milliseconds * scatter).tolist()}
    report["environment"] = {"cpu": "a CPU", "cores": "2", "machine": "x86_64"}
    report["provenance"]["data"]["evaluation"] = "ab" * 32
    return report


def compared(folder, baseline, candidate, limits=STRICT, choice=None, target=None, duration=0.1):
    """(the document, the gate) of two reports, or of two folders."""
    paths = []
    for name, each in (("old.json", baseline), ("new.json", candidate)):
        path = each
        if isinstance(each, dict):
            path = folder / name
            path.write_text(json.dumps(each))
        paths.append(path)
    options = {"target": target, "choice": choice, "skip_bad": False, "trust": None, "progress": silent}
    protocol = Protocol(("single",), (1,), duration, block_seconds=0.02, min_rounds=3, warmup=0.02, processes=1)
    document = compare(*paths, limits, protocol=protocol, **options)
    return document, document.gate


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_engines_of_one_name_are_partners_and_single_ones_too():
    assert pair_up(["a-int8", "b-int8"], ["b-int8", "c-int8"]) == (
        [Pair("b-int8", "b-int8")],
        ["a-int8 is only in the baseline", "c-int8 is only in the candidate"],
        ["a"],
    )
    assert pair_up(["a-int8"], ["b-fp32"]) == ([Pair("a-int8", "b-fp32")], [], [])
    assert Pair("a", "b").name == "a → b"
    with pytest.raises(TargetError, match="no engine in common"):
        pair_up(["a-int8", "b-int8"], ["c-int8"])


def test_what_an_app_gets_of_a_target_is_compared_where_its_engine_is_gone():
    """An engine that fails its budget is no longer in the bundle: the app gets another one."""
    broken = Pair("a-int8", "a-fp32")
    assert pair_up(["a-int8", "b-int8"], ["b-int8", "a-fp32"]) == ([Pair("b-int8", "b-int8"), broken], [], [])
    assert pair_up(["a-int8", "a-fp32"], ["a-fp32"]) == ([Pair("a-fp32", "a-fp32"), broken], [], [])
    # The first one is still there: the others of the target are nobody's loss.
    assert pair_up(["a-int8", "a-fp32"], ["a-int8"]) == (
        [Pair("a-int8", "a-int8")],
        ["a-fp32 is only in the baseline"],
        [],
    )


def test_a_target_that_is_gone_keeps_within_no_limit(tmp_path):
    two = a_report()
    other = {**copy.deepcopy(two["engines"][0]), "artifact": "onnxruntime-cpu-int8"}
    two["engines"].append(other)
    _, gate = compared(tmp_path, two, a_report(), ComparisonLimits(1.0, None))
    assert (gate.status, gate.reasons) == ("fail", ("the candidate has no engine for onnxruntime-cpu",))
    assert compared(tmp_path, two, a_report(), ComparisonLimits(None, None))[1].status == "none"


# --- reports ----------------------------------------------------------------------------------------------------------


def test_equal_reports_pass(tmp_path):
    document, gate = compared(tmp_path, a_report(), a_report(seed=1))
    assert gate.status == "pass" and gate.reasons == ()
    [engine] = document.engines
    assert engine.accuracy.drop == 0 and engine.ratios[0].difference == "no difference"
    assert NOT_IN_TURNS in document.remarks and not document.measured


@pytest.mark.parametrize(
    ("candidate", "check", "reason"),
    [
        ({"milliseconds": 2.2}, "latency", "latency +10"),
        ({"right": 8700}, "accuracy", "drop 3.00 points"),
    ],
)
def test_what_is_lost_is_found(tmp_path, candidate, check, reason):
    document, gate = compared(tmp_path, a_report(), a_report(**candidate))
    assert gate.status == "fail" and reason in gate.reasons[0] and gate.reasons[0].startswith(ENGINE)
    statuses = {each.name: each.status for each in document.engines[0].checks}
    assert statuses[check] == "fail"


def test_an_engine_of_the_same_files_loses_nothing(tmp_path):
    same = a_report()
    same["provenance"]["files"] = [{"path": f"compile/{ENGINE}/graph.onnx", "sha256": "ab" * 32, "bytes": 9}]
    document, gate = compared(tmp_path, same, same, ComparisonLimits(0.0, None))
    assert gate.status == "pass" and document.engines[0].accuracy.how == "same files"
    other = copy.deepcopy(same)
    other["provenance"]["files"][0]["sha256"] = "cd" * 32
    document, gate = compared(tmp_path, same, other, ComparisonLimits(0.0, None))
    assert gate.status == "undecided" and document.engines[0].accuracy.how == "recorded"


def test_one_engine_in_two_reports_has_one_latency(tmp_path):
    """As in two bundles: the same files pass. That the machine was slower at one time is no slowdown of the engine."""
    one, two = a_report(), a_report(milliseconds=28.9)
    for each in (one, two):
        each["provenance"]["files"] = [{"path": f"compile/{ENGINE}/graph.onnx", "sha256": "ab" * 32, "bytes": 9}]
        each["environment"]["openvino"] = "2026.4.1"
    document, gate = compared(tmp_path, one, two)
    assert gate.status == "pass" and document.engines[0].same_engine and not document.engines[0].ratios
    checks = {check.name: check.status for check in document.engines[0].checks}
    assert checks == {"accuracy": "pass", "latency": "pass"}
    assert document.gate.status == "pass"
    suite = ElementTree.fromstring(render_junit(document))  # noqa: S314
    assert suite.get("failures") == "0"
    two["environment"]["openvino"] = "2027.0"  # another kernel may be slower
    assert compared(tmp_path, one, two)[1].status == "fail"


def test_a_latency_that_was_not_decided_is_neither_slower_nor_as_fast(tmp_path):
    for milliseconds in (2.0, 28.9):
        other = a_report(milliseconds=milliseconds)
        other["bench"]["undecided"] = {ENGINE: "others ran"}
        document, gate = compared(tmp_path, a_report(), other, ComparisonLimits(None, 5.0))
        assert gate.status == document.gate.status == "undecided"
        assert gate.reasons == (f"{ENGINE}: latency not decided: in the candidate, others ran",)
        assert document.engines[0].ratios[0].difference == "not decided"
        document, gate = compared(tmp_path, a_report(), a_report(milliseconds=milliseconds, flags=["contended"]))
        assert gate.status == "undecided"
        assert document.engines[0].ratios[0].difference == "not decided"


def test_what_is_gained_passes(tmp_path):
    document, gate = compared(tmp_path, a_report(), a_report(right=9500, milliseconds=1.0))
    assert gate.status == "pass"
    assert document.engines[0].ratios[0].difference == "faster"


def test_a_flagged_measurement_passes_nothing(tmp_path):
    document, gate = compared(tmp_path, a_report(), a_report(flags=["throttled"]), ComparisonLimits(None, 5.0))
    assert gate.status == "undecided" and "flags (throttled)" in gate.reasons[0]
    assert document.engines[0].flags == ("throttled",)


def test_other_machines_and_other_images_decide_nothing(tmp_path):
    other = a_report()
    other["environment"]["cpu"] = "another CPU"
    other["provenance"]["data"]["evaluation"] = "cd" * 32
    document, gate = compared(tmp_path, a_report(), other)
    assert gate.status == "undecided"
    assert any("max_drop needs images" in reason for reason in gate.reasons)
    assert any("a CPU, 2, x86_64 and another CPU, 2, x86_64" in reason for reason in gate.reasons)
    assert any("different images" in remark for remark in document.remarks)


def test_two_boards_with_one_cpu_are_other_machines(tmp_path):
    sides = [a_report(), a_report()]
    for report, board in zip(sides, ("Orange Pi 5", "Radxa ROCK 5B"), strict=True):
        report["environment"]["board"] = board
    _, gate = compared(tmp_path, *sides)
    assert any("Orange Pi 5, a CPU, 2, x86_64 and Radxa ROCK 5B, a CPU" in reason for reason in gate.reasons)


def test_what_was_not_measured_is_not_decided(tmp_path):
    without = {**a_report(), "bench": None}
    _, gate = compared(tmp_path, without, a_report())
    assert gate.status == "undecided" and "max_slowdown needs times" in gate.reasons[-1]
    detector = {**a_report(), "task": "detection"}
    _, gate = compared(tmp_path, detector, detector, ComparisonLimits(1.0, None))
    assert gate.status == "undecided" and "have no interval" in gate.reasons[0]
    document, gate = compared(tmp_path, a_report(), a_report(n=5000, right=4500), ComparisonLimits(None, None))
    assert gate.status == "none" and document.engines[0].accuracy is None


def test_a_target_chooses_engines(tmp_path):
    both = a_report()
    both["engines"].append({**both["engines"][0], "artifact": "onnxruntime-cpu-int8"})
    document, _ = compared(tmp_path, both, both, target="onnxruntime-cpu")
    assert [engine.engine for engine in document.engines] == ["onnxruntime-cpu-int8"]


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (lambda report: report.pop("engines"), "$.engines: missing"),
        (lambda report: report.update(format=2), "$.format: found '2', expected one of 1"),
        (lambda report: report["engines"][0]["verify"].update(value=float("nan")), "value: found 'nan'"),
        (lambda report: report["engines"][0]["verify"].update(value=101.0), "expected samples, and a value in percent"),
        (lambda report: report["bench"]["block_medians_ms"].update({ENGINE: [-1.0]}), "expected latencies above 0"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, spoil, found):
    report = copy.deepcopy(a_report())
    spoil(report)
    with pytest.raises(InputError) as caught:
        compared(tmp_path, a_report(), report)
    assert "is not a vitdeploy report" in caught.value.message and found in caught.value.found


def test_what_is_neither_is_refused(tmp_path):
    with pytest.raises(MissingFileError, match="neither a bundle nor a report"):
        compared(tmp_path, tmp_path / "nothing", a_report())
    with pytest.raises(InputError, match="reports cannot be compared on images"):
        compared(tmp_path, a_report(), a_report(), choice=DataChoice(tmp_path, "none", None, 0, "all", 0))


def test_a_ratio_that_is_not_decided_hinders_and_flags_of_one_side_do_not():
    names = "baseline a", "candidate a"
    rows = [row(name, flags=("unstable", "contended")) for name in names]
    for reason, status in (("", "pass"), ("others ran", "undecided")):
        bench = bench_of(rows, [ratio_of(names[1], names[0], 1.0, 0.01, reason)])
        found = _timed(unjudged("a", None, ()), Pair("a", "a"), bench)
        assert found.flags == ()
        gate = judge(found, ComparisonLimits(None, 5.0))[1]
        assert gate.status == status and reason in "".join(gate.reasons)


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundles(small_export, tmp_path_factory):
    """The small model; the same again; and one that answers a class more often than it should."""
    folder = tmp_path_factory.mktemp("bundles")
    for name in ("old", "same", "spoilt"):
        (folder / name).mkdir()
    for name in ("old", "same"):
        compile_bundle(small_export / "model.onnx", "onnxruntime-cpu", None, None, folder / name)
    model = load_graph(small_export / "model.onnx")
    bias = next(node for node in reversed(list(model.graph)) if node.op_type == "Add")
    name, value = next((i, v) for i, v in enumerate(bias.inputs) if v.is_initializer())
    shifted = value.const_value.numpy() + np.eye(10, dtype=np.float32)[3] * 5
    value.const_value = ir.tensor(shifted, name=value.name)
    save_graph(model, folder / "spoilt.onnx")
    compile_bundle(folder / "spoilt.onnx", "onnxruntime-cpu", None, None, folder / "spoilt")
    return folder


def test_the_same_engine_is_neither_asked_nor_measured(bundles, tmp_path):
    document, gate = compared(tmp_path, bundles / "old", bundles / "same", ComparisonLimits(0.0, 0.0))
    assert gate.status == "pass" and not document.measured
    [engine] = document.engines
    assert engine.same_engine and not engine.ratios
    assert engine.accuracy.how == "same files" and engine.accuracy.drop_ci95 == (0.0, 0.0)
    assert {check.name: check.status for check in engine.checks} == {"accuracy": "pass", "latency": "pass"}


@pytest.fixture(scope="module")
def answered(bundles, digits, tmp_path_factory):
    """Images in folders named by what the old bundle answers, so that it is always right."""
    folder = tmp_path_factory.mktemp("answered")
    for index in range(10):
        (folder / str(index)).mkdir()
    with load(bundles / "old") as predictor:
        for image in sorted((digits / "calibration").rglob("*.png"))[:64]:
            shutil.copy(image, folder / str(predictor.predict(image).index))
    return DataChoice(folder, "folders", None, 0, "all", 0)


def digests_of(document):
    return {row.name: (row.baseline, row.candidate) for row in document.digests}


def test_a_bundle_with_other_answers_fails(bundles, answered, tmp_path):
    document, gate = compared(tmp_path, bundles / "old", bundles / "spoilt", ComparisonLimits(1.0, None), answered)
    accuracy = document.engines[0].accuracy
    assert (accuracy.how, accuracy.n, accuracy.baseline) == ("measured", 64, 100.0)
    assert accuracy.candidate == accuracy.agreement < 90
    assert gate.status == "fail" and "drop" in gate.reasons[0]
    assert [ratio.metric for ratio in document.engines[0].ratios] == ["latency"]
    names = [row.artifact for row in document.bench.results]
    assert names == ["baseline onnxruntime-cpu-fp32", "candidate onnxruntime-cpu-fp32"]
    digests = digests_of(document)
    files = {entry.path for name in ("old", "spoilt") for entry in read_bundle(bundles / name).files}
    assert files <= set(digests) and digests["model.onnx"][0] != digests["model.onnx"][1]
    page = Page(render_regression(decode(ComparisonDocument, json.loads(json.dumps(encode(document)))))).text
    assert "onnxruntime-cpu-fp32" in page and "accuracy: measured" in page and "Latency" in page
    assert all(digest in page for pair in digests.values() for digest in pair if digest)


def test_the_command_writes_all_and_leaves_5(bundles, answered, tmp_path, shared_store):
    with command_line(tmp_path, shared_store, short_bench=True) as here:
        plain = ("--data", answered.path, "--duration", 0.1, "--junit", "junit.xml", "-o", "found")
        done = here("compare", bundles / "old", bundles / "spoilt", "--max-drop", 1, *plain)
        assert done.returncode == 5 and "accuracy gate fail; drop" in done.stdout and "baseline 100.00 %" in done.stdout
        assert json.loads((tmp_path / "found" / "compare.json").read_text())["gate"]["status"] == "fail"
        assert "Answers: failed" in (tmp_path / "found" / "compare.html").read_text()
        assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("failures") == "1"  # noqa: S314
        same = here("compare", bundles / "old", bundles / "same")
        blind = here("compare", bundles / "old", bundles / "spoilt", "--max-drop", 1, "--no-bench")
        assert blind.returncode == 5 and "evaluate on more images (--data), or raise the limit" in blind.stderr
        assert same.returncode == 0 and "identical files: same answers and same times" in same.stdout
        assert here("compare", bundles / "old", bundles / "same", "--junit", "no/such/x.xml").returncode == 2
        assert "need --data" in here("compare", bundles / "old", bundles / "same", "--labels", "none").stderr


# --- what is written --------------------------------------------------------------------------------------------------


def test_junit_has_a_case_for_each_check(tmp_path):
    document, _ = compared(tmp_path, a_report(), a_report(milliseconds=2.2), ComparisonLimits(None, 5.0))
    document = dataclasses.replace(document, engines=(dataclasses.replace(document.engines[0], engine=HOSTILE),))
    suite = ElementTree.fromstring(render_junit(document)).find("testsuite")  # noqa: S314
    assert suite.attrib["tests"] == "2" and suite.attrib["failures"] == "1" and suite.attrib["skipped"] == "1"
    cases = {case.get("name"): case for case in suite}
    assert cases["accuracy"].find("skipped") is not None
    assert cases["latency"].find("failure").get("type") == "fail"
    assert "latency +10" in cases["latency"].find("failure").text
    assert "<script>" in cases["latency"].get("classname") and "\x1b" not in cases["latency"].get("classname")


def test_the_digests_of_both_reports_are_there(tmp_path):
    old, new = a_report(), a_report()
    new["provenance"]["source"]["sha256"] = {"weights.safetensors": "cd" * 32}
    document, _ = compared(tmp_path, old, new)
    found = digests_of(document)
    assert found["weights.safetensors"] == ("ab" * 32, "cd" * 32)
    assert found["evaluation data"][0] == found["evaluation data"][1] == old["provenance"]["data"]["evaluation"]


def test_the_page_escapes_what_reports_say(tmp_path):
    document, _ = compared(tmp_path, a_report(engine=HOSTILE), a_report(engine=HOSTILE))
    document = dataclasses.replace(document, candidate=HOSTILE, remarks=(HOSTILE,))
    html = render_regression(decode(ComparisonDocument, json.loads(json.dumps(encode(document)))))
    assert "<script" not in html and "no difference" in html and "Speed: " in html


@pytest.mark.parametrize(
    ("metric", "bounds", "status", "difference"),
    [
        ("latency", (None, 0.8), "pass", "faster"),
        ("latency", (1.3, None), "fail", "slower"),
        ("latency", (None, None), "undecided", "not decided"),
        ("throughput", (1.2, None), "pass", "faster"),
        ("throughput", (None, 0.7), "fail", "slower"),
        ("throughput", (None, None), "undecided", "not decided"),
    ],
)
def test_what_holds_beside_others_decides_a_limit(metric, bounds, status, difference):
    """Of a ratio without a reliable interval."""
    ratio = TimeRatio(metric, 1.0, (0.5, 2.0), False, "others ran", bounds=bounds)
    facts, gate = judge(unjudged("engine", None, [ratio]), ComparisonLimits(None, 5.0))
    assert (gate.status, facts.ratios[0].difference) == (status, difference)
    assert "others ran" in gate.reasons[0] if status == "undecided" else "others ran" not in "".join(gate.reasons)
