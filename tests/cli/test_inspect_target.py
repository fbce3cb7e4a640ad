"""`vitdeploy inspect --target tensorrt`: what it shows, its gate, and every kind of bad input."""

import json
import shutil

import numpy as np
import onnx
import pytest

from tests.command_line import command_line
from tests.graph.builder import Builder
from tests.lint.cases import CASES, attention
from vitdeploy.lint.linter import lint
from vitdeploy.spec import encode

VERSIONS = ["10.3", "10.16", "11.4"]


@pytest.fixture
def run(shared_store, tmp_path):
    """The command line in this process, which spares loading PyTorch again."""
    with command_line(tmp_path, shared_store) as run:
        yield run


@pytest.fixture
def graph(tmp_path):
    """Writes a graph beside the command and gives its name."""

    def write(proto, name="graph.onnx"):
        onnx.save(proto, tmp_path / name)
        return name

    return write


def broken():
    return CASES["TRT302"].build(False)


def test_a_graph_without_errors(run, graph):
    done = run("inspect", graph(attention()), "--target", "tensorrt")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == ["graph.onnx for TensorRT 10.3, 10.16, 11.4: 0 errors, 0 warnings, 1 note", "TRT401  note"]
    assert lines[2].startswith("        found:    softmax_")
    assert lines[3].startswith("        expected: ")
    assert lines[4].startswith("        fix:      ")
    assert "checked against the TensorRT documentation; TensorRT itself was not run" in lines


def test_the_document_has_every_finding(run, graph):
    found = run("inspect", graph(attention(late=True)), "--target", "tensorrt", "--json").document
    assert (found["target"], found["versions"]) == ("tensorrt", VERSIONS)
    [(name, told)] = found["graphs"].items()
    assert (name, told["file"], told["counts"]) == ("model", "graph.onnx", {"error": 0, "warning": 1, "note": 0})
    [finding] = told["findings"]
    assert (finding["rule"], finding["severity"], finding["versions"]) == ("TRT406", "warning", VERSIONS)
    assert set(finding) == {"rule", "severity", "node", "found", "expected", "fix", "versions"}


def test_errors_fail_the_gate_after_they_were_shown(run, graph):
    done = run("inspect", graph(broken()), "--target", "tensorrt", "--json")
    assert done.returncode == 5
    import onnx_ir as ir

    assert json.loads(done.stdout)["graphs"]["model"]["findings"] == encode(lint(ir.from_proto(broken())))
    assert "VD5001  tensorrt would refuse graph.onnx or compute wrong results" in done.stderr
    assert "found:    TRT302" in done.stderr


def test_a_release_alone(run, graph):
    b = Builder()
    exponent = b.model(b.add("Pow", b.input("x", ["batch", 4]), np.int64(2)))
    done = run("inspect", graph(exponent), "--target", "tensorrt")
    assert (done.returncode, "TRT203  error (10.3)" in done.stdout) == (5, True)
    done = run("inspect", "graph.onnx", "--target", "tensorrt", "--target-version", "11.4")
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0, "graph.onnx for TensorRT 11.4: 0 errors, 0 warnings, 0 notes",
    )  # fmt: skip


def test_many_nodes_of_one_rule_are_cut_for_people_and_whole_for_programs(run, graph):
    b = Builder()
    x = b.input("x", ["batch", 4])
    for _ in range(6):
        x = b.add("Pow", x, np.int64(2))
    done = run("inspect", graph(b.model(x)), "--target", "tensorrt", "--target-version", "10.3")
    assert done.stdout.count("to the power of int64") == 4
    assert "and 2 more" in done.stdout
    done = run("inspect", "graph.onnx", "--target", "tensorrt", "--target-version", "10.3", "--json")
    assert json.loads(done.stdout)["graphs"]["model"]["counts"]["error"] == 6


def test_both_graphs_of_an_encoder_decoder(run, graph, tmp_path):
    (tmp_path / "both").mkdir()
    graph(attention(), "both/encoder.onnx")
    graph(broken(), "both/decoder_step.onnx")
    done = run("inspect", "both", "--target", "tensorrt", "--json")
    graphs = json.loads(done.stdout)["graphs"]
    assert (done.returncode, set(graphs)) == (5, {"encoder", "decoder_step"})
    assert graphs["encoder"]["counts"]["error"] == 0 < graphs["decoder_step"]["counts"]["error"]


def test_a_bundle_without_an_engine_for_tensorrt_is_judged_by_its_float_graph(run, small_bundle):
    found = json.loads(run("inspect", small_bundle, "--target", "tensorrt", "--json").stdout)
    assert found["graphs"]["model"]["file"] == str(small_bundle / "model.onnx")


def test_a_bundle_with_an_engine_for_tensorrt_is_judged_by_its_graph(run, small_bundle, tmp_path):
    bundle = shutil.copytree(small_bundle, tmp_path / "bundle")
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    manifest["engines"][0]["target"] = "tensorrt"
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = json.loads(run("inspect", bundle, "--target", "tensorrt", "--json").stdout)
    assert found["graphs"]["model"]["file"] == str(bundle / "engines" / "onnxruntime-cpu" / "graph.onnx")


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--target", "openvino-cpu"), "VD2402", "expected: --target tensorrt"),
        (("--target", "abacus"), "VD2402", "expected: onnxruntime-cpu, openvino-cpu, openvino-gpu"),
        (("--target", "tensorrt", "--target-version", "9.3"), "VD2402", "expected: 10.3, 10.16, 11.4"),
        (("--target-version", "11.4"), "", "--target-version needs --target tensorrt."),
    ],
)
def test_targets_and_releases_that_are_not_known(run, graph, arguments, code, says):
    done = run("inspect", graph(attention()), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert code in done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("make", "exit_code", "code"),
    [
        (lambda path: None, 2, "VD2002"),
        (lambda path: path.mkdir(), 2, "VD2002"),
        (lambda path: path.write_bytes(b"\x08garbage" * 50), 2, "VD2202"),
        (lambda path: path.write_bytes(b""), 2, "VD2202"),
    ],
    ids=["missing", "empty folder", "garbage", "empty file"],
)
def test_what_is_no_graph(run, tmp_path, make, exit_code, code):
    make(tmp_path / "given")
    done = run("inspect", "given", "--target", "tensorrt")
    assert (done.returncode, done.stdout) == (exit_code, "")
    assert done.stderr.startswith(code)


def test_a_bundle_that_was_tampered_with(run, small_bundle, tmp_path):
    bundle = shutil.copytree(small_bundle, tmp_path / "bundle")
    with (bundle / "model.onnx").open("ab") as file:
        file.write(b"\0")
    done = run("inspect", bundle, "--target", "tensorrt")
    assert (done.returncode, "VD3101" in done.stderr) == (3, True)


def test_weights_that_are_not_there(run, external_graph, tmp_path):
    shutil.copy(external_graph, tmp_path / "alone.onnx")
    done = run("inspect", "alone.onnx", "--target", "tensorrt")
    assert (done.returncode, "VD2002" in done.stderr) == (2, True)
