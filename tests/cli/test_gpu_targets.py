"""Commands for targets that this machine lacks: what is refused before any work, and what can be done all the same."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from onnx import TensorProto

from tests.command_line import ROOT, command_line
from tests.graph.builder import Builder
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.write import write_bundle
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.graph.io.files import GraphMetadata, get_metadata, graph_spec, load_graph, save_graph, set_metadata
from vitdeploy.pipeline.job import prepare
from vitdeploy.pipeline.plan import engine_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.load import load_recipe
from vitdeploy.runtime import tensorrt
from vitdeploy.spec import EngineSpec
from vitdeploy.stages.compile import check_task
from vitdeploy.stages.place import PlaceConfig, place_graph
from vitdeploy.stages.step import Candidate
from vitdeploy.store.store import Artifact
from vitdeploy.workflows.placement import compile_bundle

RECIPE = ROOT / "recipes" / "digits.yaml"
DOCTOR = "`vitdeploy doctor --target tensorrt` lists what else is missing"
EMULATE = "or emulate its types on this CPU: add --emulate"


@pytest.fixture
def run(shared_store, tmp_path, monkeypatch):
    """The command line on a machine without TensorRT: None in sys.modules is a module that is not there."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with command_line(tmp_path, shared_store) as run:
        yield run


@pytest.fixture(scope="module")
def placed(tmp_path_factory, small_export):
    """The small graph placed for TensorRT."""
    folder = tmp_path_factory.mktemp("placed")
    place_graph(PlaceConfig("tensorrt", "fp32"), small_export / "model.onnx", None, folder)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, placed):
    """A bundle whose one engine is a plan."""
    made, out = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("bundle")
    model = load_graph(placed)
    spec = graph_spec(model, "model.onnx")
    (made / "graph.onnx").write_bytes(placed.read_bytes())
    (made / "engine.plan").write_bytes(b"a plan")
    tensors = {"inputs": spec.inputs, "outputs": spec.outputs}
    engine = EngineSpec("tensorrt", "fp32", "graph.onnx", ("engine.plan",), 1, True, "TensorRT", **tensors)
    write_bundle(
        out,
        name="small",
        task="classification",
        graphs={"model": (placed, spec)},
        preprocess=get_metadata(model, "small").preprocess,
        engines=[(engine, made)],
    )
    return out


# --- what is missing here ---------------------------------------------------------------------------------------------


def test_what_cannot_be_verified_here_can_be_emulated(run, placed, bundle, small_export, digits):
    data = ("--data", digits / "evaluation", "--num-samples", 4)
    for artifact in (placed, placed.parent, bundle):
        command = ("verify", artifact, "--against", small_export, *data)
        refused = run(*command)
        assert refused.returncode == 4
        assert "VD4001" in refused.stderr
        assert EMULATE in refused.stderr
        assert run(*command, "--emulate", "--json").document["agreement"] == 100


def test_what_cannot_be_run_here_names_the_doctor(run, bundle, digits):
    image = next((digits / "evaluation").rglob("*.png"))
    for command in (("predict", bundle, image), ("bench", bundle, "--duration", 0.1)):
        refused = run(*command)
        assert refused.returncode == 4
        assert DOCTOR in refused.stderr
        assert "--emulate" not in refused.stderr


def test_an_emulated_bundle_is_checked_as_any_other(run, bundle, small_export, digits, tmp_path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / "engines/tensorrt/engine.plan").write_bytes(b"A plan")
    done = run("verify", copy, "--against", small_export, "--data", digits / "evaluation", "--emulate")
    assert (done.returncode, "VD3101" in done.stderr) == (3, True)


# --- how TensorRT builds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--profile", "8,1,32"), "'8,1,32' is not a profile; expected minimum, optimum and maximum batch: 1,8,32."),
        (("--profile", "8"), "is not a profile"),
        (("--profile", "0,1,2"), "is not a profile"),
        (("--workspace", "0"), "--workspace"),
        (("--builder-optimization-level", "6"), "--builder-optimization-level"),
        (("--hardware-compatibility-level", "turing"), "--hardware-compatibility-level"),
        (("--profile", "2,4,8"), "VD2402  no profile includes the batch 1, at which the engine is compiled"),
    ],
)
def test_options_that_make_no_engine_are_refused(run, small_export, options, says, monkeypatch):
    monkeypatch.setattr("vitdeploy.pipeline.early.require_runtime", lambda target: None)
    monkeypatch.setattr("vitdeploy.runtime.tensorrt.require", lambda: "11.4.0")
    done = run("compile", small_export, "--target", "tensorrt", "-o", "out", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_options_for_tensorrt_are_refused_for_other_targets(run, small_export):
    options = ("--profile", "1,8,32", "--workspace", 64, "--builder-optimization-level", 0, "--version-compatible")
    done = run("compile", small_export, "--target", "onnxruntime-cpu", "-o", "out", *options)
    assert done.returncode == 2
    flags = "--profile, --workspace, --builder-optimization-level, --version-compatible"
    assert f"{flags}: only for --target tensorrt, not for onnxruntime-cpu." in done.stderr


def test_a_fixed_batch_has_no_profiles(placed, tmp_path):
    model = load_graph(placed)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = type(value.shape)([1, *list(value.shape)[1:]])
    save_graph(model, tmp_path / "model.onnx")
    build = BuildOptions(((1, 8, 32),))
    with pytest.raises(TargetError, match="has a fixed batch of 1") as caught:
        compile_bundle(tmp_path / "model.onnx", "tensorrt", None, None, tmp_path, build=build)
    assert "leave the profiles out" in caught.value.fix


def test_how_tensorrt_builds_is_part_of_an_engines_key_and_of_no_other(monkeypatch):
    monkeypatch.setattr("vitdeploy.pipeline.early.require_runtime", lambda target: None)
    row = dataclasses.replace(tensorrt.BACKEND, describe_device=lambda: {"tensorrt": "11.4.0", "gpu": "a GPU"})
    monkeypatch.setattr(tensorrt, "BACKEND", row)
    given = ["targets=[tensorrt, onnxruntime-cpu]", "precision=fp32"]
    [job] = prepare(load_recipe(RECIPE, given), skip_bad=False, progress=silent)

    def keys(*overrides):
        changed = dataclasses.replace(job, recipe=load_recipe(RECIPE, [*given, *overrides]))
        steps = engine_plan(changed, [Candidate(target, "fp32", True) for target in job.recipe.targets])
        artifacts = {step.name: Artifact(Path(), "", step.name) for step in steps}
        return {step.name: step.key(artifacts) for step in steps}

    plain = keys()
    for change in ("workspace=64", "builder_optimization_level=5", "version_compatible=true", "profiles=[[1,8,32]]"):
        other = keys(f"tensorrt.{change}")
        assert [name for name in plain if plain[name] != other[name]] == ["compile tensorrt-fp32"]


def test_a_float_graph_is_typed_before_it_is_compiled(small_export, tmp_path):
    with pytest.raises(TargetError, match="takes the precision from the types in the graph") as caught:
        compile_bundle(small_export / "model.onnx", "tensorrt", None, "fp16", tmp_path)
    assert f"vitdeploy quantize {small_export}/model.onnx --data IMAGES --target tensorrt" in caught.value.fix


# --- encoder-decoders -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequence(tmp_path_factory):
    """A folder with the encoder of an encoder-decoder, as far as commands that refuse it look."""
    b = Builder()
    model = ir.from_proto(b.model(b.add("Identity", b.input("source", ["batch", "length"], TensorProto.INT64))))
    set_metadata(model, GraphMetadata("reverse", "sequence", None))
    folder = tmp_path_factory.mktemp("sequence")
    save_graph(model, folder / "encoder.onnx")
    return folder


@pytest.mark.parametrize("target", [name for name, row in TARGETS.items() if row.device == "GPU"])
def test_an_encoder_decoder_is_refused_on_a_gpu_with_where_it_runs(sequence, tmp_path, target):
    with pytest.raises(CapabilityError, match=f"{target} does not support models with several graphs") as caught:
        compile_bundle(sequence / "encoder.onnx", target, None, None, tmp_path)
    assert (caught.value.exit_code, caught.value.expected) == (4, "onnxruntime-cpu or openvino-cpu")
    assert caught.value.fix == "choose the target onnxruntime-cpu"
    check_task("classification", target, "fp32")


@pytest.mark.parametrize(("target", "precision"), [("tensorrt", "fp16"), ("onnxruntime-cpu", "mixed")])
def test_an_encoder_decoder_is_not_quantized_so(run, sequence, digits, target, precision):
    command = ("quantize", sequence, "--target", target, "--precision", precision, "--data", digits, "-o", "out")
    done = run(*command, "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (4, "VD4002")
    assert "several graphs" in error["message"]
