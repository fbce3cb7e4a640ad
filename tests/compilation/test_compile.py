"""Compiling: what runs is counted and is what was asked for; no silent fallback."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.targets import CPU_TARGETS
from vitdeploy.benchmark.gemm import LEAST_LAYER_RUNS as LEAST_RUNS
from vitdeploy.benchmark.gemm import profile
from vitdeploy.bundle.read import ENGINE_OPTIONS
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.compilation.engine import compile_engine, probe_target
from vitdeploy.data.folder import split
from vitdeploy.errors import CapabilityError, EngineError, GraphError, TargetError
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.io.files import GraphMetadata, get_metadata, graph_spec, load_graph, save_graph, set_metadata
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import torch_runner
from vitdeploy.pipeline.outcome import said_of_placement
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import EngineSpec, PreprocessSpec, TensorSpec
from vitdeploy.stages.calibrate import calibrate
from vitdeploy.stages.compile import compile_graph, compile_graphs
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.place import PlaceConfig, place_graph, place_graphs
from vitdeploy.stages.reference_model import find_reference_model
from vitdeploy.stages.step import Candidate, check_precision, read_engine

REVERSE = Path(__file__).parent.parent.parent / "calibration" / "reverse"
LAYERS = 4 * 2 + 2
OPENVINO, ORT = "openvino-cpu", "onnxruntime-cpu"
# Query, key and value of both blocks are a linear each in INT8, where they were merged: two more a block.
PLACED = LAYERS + 2 * 2
# The head is too small for INT8 on OpenVINO; on ONNX Runtime the convolution stays float.
INT8_KERNELS = {"fp32": 1, "int8": PLACED - 1}


@pytest.fixture(scope="module")
def graph(small_export):
    return small_export / "model.onnx"


@pytest.fixture(scope="module")
def ranges(tmp_path_factory, graph, digits):
    out = tmp_path_factory.mktemp("ranges")
    calibrate(graph, split(digits, "none", calibration=16, evaluation=1, seed=0).calibration, out)
    return out / "statistics.npz"


@pytest.fixture(scope="module")
def placements(tmp_path_factory, graph, ranges):
    """The path of the INT8 placement of each target."""
    paths = {}
    for target in CPU_TARGETS:
        out = tmp_path_factory.mktemp(target)
        place_graph(PlaceConfig(target, "int8"), graph, ranges, out)
        paths[target] = out / "model.onnx"
    return paths


@pytest.fixture
def fixed_graph(tmp_path, graph):
    """The float graph with its batch fixed to 3."""
    model = load_graph(graph)
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape([3, *value.shape[1:]])
    (tmp_path / "fixed").mkdir()
    save_graph(model, tmp_path / "fixed" / "model.onnx")
    return tmp_path / "fixed" / "model.onnx"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "engine").mkdir()
    return tmp_path / "engine"


def needs(target):
    return pytest.importorskip(CPU_TARGETS[target].package)


def images(batch):
    return np.random.default_rng(2).integers(0, 256, (batch, 32, 32, 1), dtype=np.uint8)


# --- what ran ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_every_placed_layer_runs_in_an_int8_kernel(placements, out, target):
    needs(target)
    engine = compile_graph(placements[target], target, 1, out)
    assert (engine.precision, engine.kernels) == ("int8", INT8_KERNELS)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_placement_has_the_work_of_its_float_graph(graph, placements, target):
    """Products that quantization wrote in another form are counted all the same, and as integers."""
    whole, placed = count_work(load_graph(graph), 2), count_work(load_graph(placements[target]), 2)
    assert sum(placed.flops.values()) == sum(whole.flops.values())
    assert 0.5 < placed.flops["int8"] / whole.flops["fp32"] < 1
    assert placed.weight_bytes < 0.5 * whole.weight_bytes


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_layers_are_timed_under_the_names_of_the_graph(placements, out, target):
    needs(target)
    engine = compile_graph(placements[target], target, 1, out)
    found = profile(out, engine, "small", 2, 1, 0.0)
    assert (found.artifact, found.batch, found.runs) == ("small", 2, LEAST_RUNS)
    assert all(layer.milliseconds >= 0 for layer in found.layers)
    assert any(layer.milliseconds > 0 for layer in found.layers)
    integers = [layer for layer in found.layers if layer.precision == "int8" and layer.product]
    model = load_graph(placements[target])
    placed = {node.name for node in model.graph if node.op_type in ("MatMul", "Conv", "MatMulIntegerToFloat")}
    names = [name for layer in integers for name in (layer.name, *layer.fuses) if name in placed]
    assert len(dict.fromkeys(names)) >= engine.kernels["int8"]
    attention = [layer for layer in found.layers if "attn/" in layer.name and layer.product]
    assert len(attention) >= 2  # products of activations are of no layer with weights


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_float_graph_runs_in_float_kernels_only(graph, out, target, batch):
    needs(target)
    engine = compile_graph(graph, target, batch, out)
    assert (engine.precision, engine.kernels) == ("fp32", {"fp32": LAYERS})


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_ignored_layers_run_in_float_kernels(tmp_path, graph, ranges, out, target):
    needs(target)
    place_graph(PlaceConfig(target, "int8", ("*.mlp.fc2", "*.attn.proj")), graph, ranges, tmp_path)
    engine = compile_graph(tmp_path / "model.onnx", target, 1, out)
    assert engine.kernels == {"fp32": INT8_KERNELS["fp32"] + 4, "int8": INT8_KERNELS["int8"] - 4}


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_the_record_says_how_the_engine_is_loaded(placements, out, target):
    needs(target)
    engine = compile_graph(placements[target], target, 2, out)
    assert engine == read_engine(out)
    assert (engine.target, engine.batch, engine.dynamic_batch) == (target, 2, True)
    assert [tensor.shape for tensor in (*engine.inputs, *engine.outputs)] == [(2, 32, 32, 1), (2, 10)]
    assert all((out / file).is_file() for file in (*engine.files, engine.graph))
    assert {file.name for file in out.iterdir()} == {*engine.files, engine.graph, "engine.json"}  # no profile is left
    assert engine.device[CPU_TARGETS[target].package]


@pytest.mark.parametrize("target", CPU_TARGETS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_float_engine_gives_the_answers_of_its_graph_at_any_batch(graph, out, target, batch):
    needs(target)
    engine = compile_graph(graph, target, 1, out)
    feeds = {"image": images(batch)}
    with OnnxRuntimeRunner(graph, name="graph") as runner:
        expected = runner.infer(feeds)["logits"]
    with make_runner(out, engine, batch=batch) as runner:
        ours = runner.infer(feeds)["logits"]
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


# --- weights beside the graph, and models of two graphs ---------------------------------------------------------------


def test_what_openvino_needs_to_be_right_is_recorded_for_those_who_compile_it_themselves(graph, out, tmp_path):
    """Of as many queries as heads; with another number of them, nothing."""
    assert set(compile_graph(graph, OPENVINO, 1, out).options) == {"INFERENCE_PRECISION_HINT"}
    for name in ("float", "heads"):
        (tmp_path / name).mkdir()
    reference_model = find_reference_model(Source("vit_w34d1h17_patch8_32"))  # 17 tokens, 17 heads
    export(reference_model, ExportConfig("heads", 20, None, True), tmp_path / "float")
    engine = compile_graph(tmp_path / "float" / "model.onnx", OPENVINO, 2, tmp_path / "heads")
    assert engine.options["SNIPPETS_MODE"] == "DISABLE"
    assert set(engine.options) <= ENGINE_OPTIONS


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_engine_of_a_graph_with_its_weights_beside_it_is_the_same(tmp_path, graph, external_graph, out, target):
    needs(target)
    place_graph(PlaceConfig(target, "fp32"), external_graph, None, tmp_path)
    engine = compile_graph(tmp_path / "model.onnx", target, 1, out)
    assert engine.kernels == {"fp32": LAYERS}
    moved = out.rename(tmp_path / "elsewhere")
    feeds = {"image": images(2)}
    with OnnxRuntimeRunner(graph, name="graph") as runner:
        expected = runner.infer(feeds)["logits"]
    with make_runner(moved, engine, batch=2) as runner:
        ours = runner.infer(feeds)["logits"]
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_int8_of_a_graph_with_its_weights_beside_it_is_the_same(
    tmp_path, external_graph, ranges, placements, digits, target
):
    calibrate(external_graph, split(digits, "none", calibration=16, evaluation=1, seed=0).calibration, tmp_path)
    assert (tmp_path / "statistics.npz").read_bytes() == ranges.read_bytes()
    place_graph(PlaceConfig(target, "int8"), external_graph, tmp_path / "statistics.npz", tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == placements[target].read_bytes()
    assert not (tmp_path / "model.onnx.data").exists()


@pytest.fixture(scope="module", params=CPU_TARGETS)
def sequence_engine(request, tmp_path_factory, sequence_export):
    """(EngineSpec, folder) of the embedded encoder-decoder on a target."""
    needs(request.param)
    placed, out = tmp_path_factory.mktemp("placed"), tmp_path_factory.mktemp("engine")
    place_graphs(PlaceConfig(request.param, "fp32"), sequence_export, None, placed)
    return compile_graphs(placed, request.param, 2, out), out


def test_an_engine_of_two_graphs_has_two_parts_with_their_own_files(sequence_engine):
    engine, folder = sequence_engine
    assert engine == read_engine(folder)
    assert [part.part for part in engine.parts] == ["encoder", "decoder_step"]
    assert engine.files == tuple(file for part in engine.parts for file in part.files)
    for part in engine.parts:
        assert {*part.files, part.graph} == {
            f"{part.part}/{path.name}" for path in (folder / part.part).iterdir() if path.name != "engine.json"
        }
    assert [(tensor.name, tensor.dtype) for tensor in (*engine.inputs, *engine.outputs)] == [
        ("source", "int64"),
        ("tokens", "int64"),
        ("logits", "float32"),
    ]
    assert engine.kernels == {"fp32": sum(part.kernels["fp32"] for part in engine.parts)}
    assert engine.dynamic_batch
    assert engine.sequence.start == 1


def test_an_engine_of_two_graphs_writes_the_tokens_of_the_original(sequence_engine, sequence_source):
    """The same tokens in every row, also in rows that end before others, and the logits they were chosen by."""
    engine, folder = sequence_engine
    with np.load(REVERSE / "tokens.npz") as file:
        source, target = file["source"][:9], file["target"][:9]
    with make_runner(folder, engine, batch=3) as runner:
        ours = runner.infer({"source": source})
    with torch_runner(load_model(sequence_source)) as runner:
        assert runner.provider == "PyTorch eager"
        expected = runner.infer({"source": source})
    ends = (expected["tokens"] == 2).argmax(axis=1)
    assert len(set(ends)) > 1
    np.testing.assert_array_equal(ours["tokens"], expected["tokens"])
    np.testing.assert_array_equal(expected["tokens"], target[:, : expected["tokens"].shape[1]])
    for row, end in enumerate(ends):
        a, b = (found["logits"][row, : end + 1] for found in (ours, expected))
        assert np.abs(a - b).max() <= 1e-4 * np.abs(b).max()


def test_what_is_measured_of_two_graphs_are_whole_sources(sequence_engine):
    engine, folder = sequence_engine
    with make_runner(folder, engine, batch=4) as runner:
        feeds = runner.example(4)
        again = runner.example(4)
        assert runner.infer(feeds)["tokens"].shape[0] == 4
    assert feeds["source"].shape == (4, engine.sequence.max_length // 2)
    assert not {engine.sequence.start, engine.sequence.end, engine.sequence.pad} & set(feeds["source"].ravel())
    np.testing.assert_array_equal(feeds["source"], again["source"])


def test_an_engine_without_both_parts_cannot_be_run(sequence_engine):
    engine, folder = sequence_engine
    with pytest.raises(TargetError, match="cannot be run") as caught:
        make_runner(folder, dataclasses.replace(engine, parts=engine.parts[:1]))
    assert caught.value.found == "parts encoder"


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_float_graph_is_no_int8_engine(graph, out, target):
    needs(target)
    with pytest.raises(CapabilityError, match="did not run the graph in INT8") as caught:
        compile_engine(graph, out, target=target, precision="int8", batch=1, placed=0)
    assert str({"fp32": LAYERS}) in caught.value.found
    assert caught.value.fix.startswith(f"choose fp32 for {target}")


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_fewer_int8_kernels_than_placed_layers_are_refused(placements, out, target):
    needs(target)
    placed = INT8_KERNELS["int8"]
    with pytest.raises(CapabilityError, match="did not run the graph in INT8") as caught:
        compile_engine(placements[target], out, target=target, precision="int8", batch=1, placed=placed + 1)
    assert caught.value.found.startswith(f"{placed} of {placed + 1} placed layers")


@pytest.mark.parametrize(("machine", "fix"), [("aarch64", "--ignore LAYER"), ("x86_64", "vitdeploy doctor")])
def test_a_convolution_that_openvino_has_no_int8_for_on_arm_is_named_with_the_way_out(machine, fix):
    image = TensorSpec("image", "uint8", (1, 224, 224, 3))
    files = ("model.xml", "model.bin")
    engine = EngineSpec(OPENVINO, "int8", "graph.onnx", files, 1, True, "CPU", (image,), (image,))
    engine = dataclasses.replace(engine, kernels={"fp32": 1, "int8": 72}, device={"machine": machine})
    with pytest.raises(CapabilityError, match="did not run the graph in INT8") as caught:
        COMPILE[OPENVINO].check_ran(engine, "int8", 73)
    assert caught.value.found.startswith("72 of 73 placed layers") and fix in caught.value.fix
    COMPILE[OPENVINO].check_ran(engine, "int8", 72)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_int8_graph_is_no_fp32_engine(placements, out, target):
    needs(target)
    with pytest.raises(CapabilityError, match="did not run the graph in fp32"):
        compile_engine(placements[target], out, target=target, precision="fp32", batch=1, placed=0)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_placement_without_any_int8_layer_runs_in_float_and_says_so(tmp_path, graph, ranges, out, target):
    needs(target)
    place_graph(PlaceConfig(target, "int8", ("*",)), graph, ranges, tmp_path)
    engine = compile_graph(tmp_path / "model.onnx", target, 1, out)
    assert (engine.precision, engine.kernels) == ("int8", {"fp32": LAYERS})
    candidate = Candidate(target, "int8", shipped=True)
    [remark] = said_of_placement({candidate.step("place"): SimpleNamespace(path=tmp_path)}, candidate)
    assert remark == f"{target}-int8 has no INT8 layers: ignored on request."


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_graph_without_linears_runs_in_float(tmp_path, out, target):
    """A gain for each pixel: there is nothing whose kernel could be found."""
    needs(target)
    image, gain = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["n", 3, 8, 8]) for n in "xy")
    nodes = [onnx.helper.make_node("Mul", ["x", "w"], ["z"]), onnx.helper.make_node("Sigmoid", ["z"], ["y"])]
    weights = [onnx.numpy_helper.from_array(np.float32(1.7), "w")]
    graph = onnx.helper.make_graph(nodes, "gain", [image], [gain], weights)
    opsets = [onnx.helper.make_opsetid("", 20)]
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9))
    set_metadata(model, GraphMetadata("gain", "tensors", PreprocessSpec(8, (8, 8)), postprocess=TensorsSpec()))
    save_graph(model, tmp_path / "model.onnx")
    engine = compile_graph(tmp_path / "model.onnx", target, 1, out)
    assert (engine.precision, engine.kernels) == ("fp32", {})


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_onnxruntime_has_no_half_precision_on_the_cpu(graph, out, precision):
    with pytest.raises(CapabilityError, match=f"{ORT} does not support {precision}") as caught:
        compile_engine(graph, out, target=ORT, precision=precision, batch=1, placed=0)
    assert caught.value.expected == "fp32, int8, mixed, int4"
    assert caught.value.exit_code == 4
    assert not list(out.iterdir())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_refused_before_any_work(tmp_path, graph, precision):
    with pytest.raises(CapabilityError):
        place_graph(PlaceConfig(ORT, precision), graph, None, tmp_path)
    assert not list(tmp_path.iterdir())


def openvino_capabilities():
    return needs(OPENVINO).Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_openvino_refuses_half_precision_on_a_cpu_without_it(graph, out, precision):
    if precision.upper() in openvino_capabilities():
        pytest.skip(f"this CPU has {precision} for OpenVINO")
    with pytest.raises(CapabilityError, match=f"OpenVINO does not support {precision} on this CPU") as caught:
        compile_engine(graph, out, target=OPENVINO, precision=precision, batch=1, placed=0)
    assert caught.value.expected == precision.upper()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_openvino_runs_half_precision_on_a_cpu_with_it(graph, out, precision):
    if precision.upper() not in openvino_capabilities():
        pytest.skip(f"this CPU has no {precision} for OpenVINO")
    engine = compile_engine(graph, out, target=OPENVINO, precision=precision, batch=1, placed=0)
    assert engine.kernels == {precision: LAYERS}


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_fixed_batch_cannot_be_compiled_at_another(fixed_graph, out, target):
    with pytest.raises(TargetError, match="has a fixed batch size of 3") as caught:
        compile_graph(fixed_graph, target, 1, out)
    assert (caught.value.found, caught.value.expected) == ("--batch 1", "batch 3")


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_fixed_batch_is_compiled_at_its_own(fixed_graph, out, target):
    needs(target)
    engine = compile_graph(fixed_graph, target, 3, out)
    assert (engine.batch, engine.dynamic_batch, engine.kernels) == (3, False, {"fp32": LAYERS})


@pytest.mark.parametrize(("placed", "other"), [(ORT, OPENVINO), (OPENVINO, ORT)])
def test_a_graph_placed_for_another_target_is_refused(placements, out, placed, other):
    with pytest.raises(TargetError, match="quantized for another target") as caught:
        compile_graph(placements[placed], other, 1, out)
    assert (caught.value.found, caught.value.expected) == (placed, other)


def test_an_unknown_target_is_refused(graph, out):
    with pytest.raises(TargetError, match="abacus"):
        compile_engine(graph, out, target="abacus", precision="fp32", batch=1, placed=0)
    with pytest.raises(TargetError, match="abacus"):
        check_precision("abacus", "fp32")


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_file_that_is_no_graph_is_refused_by_the_runtime(tmp_path, out, target):
    needs(target)
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError):
        compile_engine(tmp_path / "model.onnx", out, target=target, precision="fp32", batch=1, placed=0)


def test_int8_without_calibration_is_refused(tmp_path, graph):
    with pytest.raises(GraphError, match="INT8 needs calibration"):
        place_graph(PlaceConfig(ORT, "int8"), graph, None, tmp_path)


def test_a_placement_cannot_be_calibrated_again(tmp_path, placements, digits):
    samples = split(digits, "none", calibration=4, evaluation=1, seed=0).calibration
    with pytest.raises(GraphError, match="already quantized or placed") as caught:
        calibrate(placements[OPENVINO], samples, tmp_path)
    assert caught.value.found == "int8 for openvino-cpu"


def test_calibrating_a_fixed_batch_needs_that_many_images(tmp_path, fixed_graph, digits):
    samples = split(digits, "none", calibration=2, evaluation=1, seed=0).calibration
    with pytest.raises(GraphError, match="fixed batch size of 3") as caught:
        calibrate(fixed_graph, samples, tmp_path)
    assert caught.value.found == "2 calibration images"


# --- placements and probes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_placement_says_its_target_and_precision_and_keeps_its_tensors(graph, placements, target):
    before, after = load_graph(graph), load_graph(placements[target])
    metadata = get_metadata(before, "model.onnx")
    placed = dataclasses.replace(metadata, target=target, precision="int8", weight_bits=8)
    assert get_metadata(after, "model.onnx") == placed
    assert graph_spec(after, "model.onnx") == graph_spec(before, "model.onnx")
    set_metadata(before, placed)
    assert before.metadata_props == after.metadata_props


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_int8_graph_is_smaller_than_half_of_the_float_one(graph, placements, target):
    assert placements[target].stat().st_size < 0.6 * graph.stat().st_size


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_probe_says_that_an_installed_target_works(target):
    needs(target)
    result = probe_target(target)
    assert result.works, result.detail
    assert {"fp32", "int8"} <= set(result.precisions)
    assert result.version in result.detail
