"""Engines that did not give their golden answers: who else is right, and what that says for the table of runtimes."""

import dataclasses
import json

from tests.history.made import ARTIFACT, MEASURED, START, bench_rows, machine, stamped
from vitdeploy.errors import AnswersError
from vitdeploy.history.canaries import canaries_of
from vitdeploy.history.of_documents import MeasuredArtifact, row_of_canary
from vitdeploy.known_bad.entries import KnownBadTable
from vitdeploy.spec import decode

GRAPH = json.dumps({"graph": {"operators": ["MatMul", "Softmax"], "opset": 20}})


def canary(where=None, what=MEASURED):
    error = AnswersError("wrong answers here", found="2 of 8 answers are the original's")
    return row_of_canary(error, what, where or machine(), START)


def facts_of(*rows, document=GRAPH):
    every = [row for number, each in enumerate(rows, 1) for row in stamped([each], number)]
    (found,) = canaries_of(every, lambda row: document)
    return found


def test_a_release_that_is_wrong_alone_is_told_and_proposed():
    found = facts_of(canary())
    assert found.sentence == (
        f"openvino 2026.3.0 gave wrong answers with vit {ARTIFACT} on a CPU; "
        "no other engine was correct with this release."
    )
    (entry,) = decode(KnownBadTable, {"format": 1, "entries": [found.proposal]}).entries
    assert (entry.runtime, entry.device, entry.versions) == ("openvino", "CPU", "==2026.3.0")
    assert entry.pattern.operators == entry.pattern.beside == ("MatMul", "Softmax") and entry.pattern.opset == 20
    assert entry.precisions == ("fp32",) and entry.isa == () and entry.id == "openvino-2026.3.0-vit-fp32"
    assert "2 of 8 answers" in entry.reproduced and "2026-01-01" in entry.reproduced


def test_who_is_right_with_the_same_release_and_with_others_is_told():
    rows = [
        canary(),
        canary(),
        dataclasses.replace(bench_rows(1.0)[0], model="other"),
        *bench_rows(1.0, where=machine(openvino="2026.10.0")),
        *bench_rows(1.0, where=machine(openvino="2026.2.0")),
        *bench_rows(1.0, where=machine(cpu="an older CPU")),
    ]
    found = facts_of(*rows)
    assert found.sentence == (
        f"openvino 2026.3.0 2 times gave wrong answers with vit {ARTIFACT} on a CPU; the same release was correct with "
        "this engine on an older CPU and 1 other engine; this engine was correct with 2026.2.0 and 2026.10.0."
    )
    assert found.proposal["way_out"] == "Install openvino 2026.10.0."
    assert found.proposal["reproduced"].endswith("; 2026.2.0, 2026.10.0 correct")


def test_instruction_sets_that_only_wrong_machines_have_are_proposed():
    newer = machine(isa="avx2 avx512f amx")
    found = facts_of(canary(newer), canary(newer), *bench_rows(1.0, where=machine(cpu="an older CPU", isa="avx2")))
    assert found.proposal["isa"] == ["amx", "avx512f"]


def test_what_fails_elsewhere_or_was_never_asked_is_not_taken_for_right():
    graph = dataclasses.replace(bench_rows(1.0)[0], artifact="model.onnx")
    found = facts_of(canary(), graph, dataclasses.replace(bench_rows(1.0)[0], error="VD4201: failed"))
    assert (found.right_machines, found.right_releases, found.right_engines) == ((), (), 0)


def test_each_engine_and_release_is_one():
    rows = [canary(), canary(machine(openvino="2026.4.0")), canary(what=MeasuredArtifact("vit", "openvino-cpu-int8"))]
    assert len(canaries_of(rows, lambda row: GRAPH)) == 3
    assert canaries_of(bench_rows(1.0), lambda row: GRAPH) == ()


def test_without_the_graph_nothing_is_proposed():
    for document in (None, "{}", '{"graph": null}', '{"graph": {"operators": [], "opset": 20}}', "[1]", "no JSON"):
        found = facts_of(canary(), document=document)
        assert found.proposal is None and found.sentence
    assert facts_of(canary(machine(openvino="a build"))).proposal is None
