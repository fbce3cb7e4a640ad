"""What compile, inspect, doctor, the linter and a recipe do about the table, with the releases that are installed here.

OpenVINO ignores antialias in every release, so that this entry is about the installed one whichever it is.
"""

import dataclasses
import json

import onnx_ir as ir
import pytest
from click.testing import CliRunner

import vitdeploy as vd
from tests.known_bad.graphs import CASES
from vitdeploy.api.inspect import diagnose, inspect, known_lines, lint_graphs
from vitdeploy.cli.main import cli
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import InputError, KnownBadError, RecipeError
from vitdeploy.graph.io.files import GraphMetadata, save_graph, set_metadata
from vitdeploy.known_bad.find import accepted_of
from vitdeploy.recipe.load import load_recipe
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.compile import compile_step
from vitdeploy.stages.step import Candidate

OPENVINO, ONNXRUNTIME = "openvino-cpu", "onnxruntime-cpu"
RESIZE, TIES = "openvino-resize-antialias", "openvino-topk-ties"


def saved(name, folder, case=0):
    """The graph of a case as one of vitdeploy's."""
    return kept(CASES[name][case]()[0], folder, name)


def kept(proto, folder, name="case"):
    model = ir.from_proto(proto)
    set_metadata(model, GraphMetadata(name, "tensors", PreprocessSpec(8, (8, 8)), postprocess=TensorsSpec()))
    folder.mkdir()
    save_graph(model, folder / "model.onnx")
    return folder


@pytest.fixture
def resizing(tmp_path):
    return saved(RESIZE, tmp_path / "resize")


def test_a_known_bad_pair_is_refused_before_anything_is_compiled(resizing, tmp_path):
    pytest.importorskip("openvino")
    with pytest.raises(KnownBadError, match="wrongly") as caught:
        vd.compile(resizing, OPENVINO, tmp_path / "bundle", progress=False)
    assert caught.value.entries == (RESIZE,)
    assert not (tmp_path / "bundle").exists()
    assert vd.compile(resizing, ONNXRUNTIME, tmp_path / "other", progress=False).engines[0].accepted is None


def test_what_was_accepted_is_recorded_in_the_engine_and_said(resizing, tmp_path):
    pytest.importorskip("openvino")
    made = vd.compile(resizing, OPENVINO, tmp_path / "bundle", accept_known_bad=[RESIZE], progress=False)
    assert made.engines[0].accepted == (RESIZE,)
    assert json.loads((made.folder / "manifest.json").read_bytes())["engines"][0]["accepted"] == [RESIZE]
    assert [each["id"] for each in made.document["known_bad"]] == [RESIZE]
    assert made.text[1].startswith(f"{RESIZE}  accepted: openvino (all releases) on a CPU")


def test_an_unknown_id_is_refused_with_those_that_there_are(resizing, tmp_path):
    with pytest.raises(InputError, match=r"unknown entries .*: all"):
        vd.compile(resizing, ONNXRUNTIME, tmp_path / "bundle", accept_known_bad=["all"], progress=False)


def test_the_command_line_says_the_way_out_and_takes_the_id(resizing, tmp_path):
    pytest.importorskip("openvino")
    words = ["compile", str(resizing), "--target", OPENVINO, "-o", str(tmp_path / "bundle")]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, KnownBadError)
    assert f"--accept-known-bad {RESIZE}" in str(done.exception)
    done = CliRunner().invoke(cli, [*words, "--accept-known-bad", RESIZE])
    assert done.exit_code == 0
    assert "fix:    Choose the target onnxruntime-cpu" in done.output


def test_an_engine_that_another_machine_made_is_judged_by_the_release_there(resizing, tmp_path):
    """`compile --on` asks this of what comes back."""
    made = vd.compile(resizing, ONNXRUNTIME, tmp_path / "bundle", progress=False)
    engine = dataclasses.replace(made.engines[0], target=OPENVINO, device={"isa": "avx2", "openvino": "2025.4.1-x"})
    graphs = {"model": resizing / "model.onnx"}
    with pytest.raises(KnownBadError, match=r"openvino 2025\.4\.1 is known to compute it wrongly"):
        accepted_of(engine, graphs, "it")
    assert accepted_of(engine, graphs, "it", [RESIZE]) == (RESIZE,)
    assert accepted_of(made.engines[0], graphs, "it") == ()


def test_inspect_names_every_runtime_that_is_wrong_on_a_graph(resizing, tmp_path):
    document, lines = inspect(resizing)
    assert [each["id"] for each in document["known_bad"]["model"]] == [RESIZE]
    assert any("issues/35893" in line for line in lines)
    document, lines = inspect(saved(RESIZE, tmp_path / "near", 1))
    assert document["known_bad"] == {"model": []}
    assert not any("known" in line for line in lines)
    bundle = vd.compile(resizing, ONNXRUNTIME, tmp_path / "bundle", progress=False)
    document, lines = inspect(bundle.folder)
    assert [each["id"] for each in document["known_bad"]["model"]] == [RESIZE]


def test_inspect_says_apart_what_concerns_no_release_that_is_here(tmp_path):
    document, lines = inspect(saved("tensorrt-10.13-grid-sample", tmp_path / "old"))
    (entry,) = [each for each in document["known_bad"]["model"] if each["id"] == "tensorrt-10.13-grid-sample"]
    assert entry["here"] is False
    (line,) = [line for line in lines if "tensorrt-10.13-grid-sample" in line]
    assert line.startswith("graph model: no known problem here; known to be wrong elsewhere: ")


def test_the_linter_has_the_entries_among_its_findings(tmp_path):
    folder = saved("tensorrt-10.3-rotary", tmp_path / "rotary")
    document, lines, findings = lint_graphs(folder, "tensorrt", "10.3")
    [found] = [each for each in findings if each.rule == "tensorrt-10.3-rotary"]
    assert (found.severity, found.versions) == ("error", ("10.3",))
    assert any(line.startswith("tensorrt-10.3-rotary  error") for line in lines)
    assert document["graphs"]["model"]["counts"]["error"] == 1


def test_the_doctor_lists_what_is_known_of_the_releases_here():
    document, lines = diagnose()
    known = document["known_bad"]
    assert ONNXRUNTIME not in known or all(known[ONNXRUNTIME])
    pytest.importorskip("openvino")
    assert known[OPENVINO][RESIZE] == "refused"
    assert known[OPENVINO][TIES] == "noted"
    [line] = known_lines(known[OPENVINO])
    assert line in lines
    assert f"{RESIZE} (refused)" in line


# --- recipes ----------------------------------------------------------------------------------------------------------


RECIPE = "recipes/digits.yaml"


def test_a_recipe_accepts_entries_by_their_ids(pytestconfig):
    path = pytestconfig.rootpath / RECIPE
    assert load_recipe(path, [f"accept_known_bad=[{RESIZE}]"]).accept_known_bad == (RESIZE,)
    candidate = Candidate(OPENVINO, "fp32", True)
    plain, accepting = (compile_step(candidate, 1, BuildOptions(), ids) for ids in ((), (RESIZE,)))
    assert accepting.config == {**plain.config, "accepted": [RESIZE]}
    with pytest.raises(RecipeError, match=r"unknown entry every; known: openvino-"):
        load_recipe(path, ["accept_known_bad=[every]"])
