"""Reading and writing ONNX: refusals, round trip, deterministic bytes, metadata."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError, MissingFileError, UnsafeGraphError
from vitdeploy.graph.io import files
from vitdeploy.graph.io.admit import admit_graph
from vitdeploy.graph.io.files import (
    METADATA_KEY,
    GraphMetadata,
    admitted_metadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    runner_of,
    save_graph,
    serialised,
    set_metadata,
)
from vitdeploy.graph.values import weight_bytes
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import GraphSpec, PreprocessSpec, SequenceSpec, TensorSpec


@pytest.fixture
def file(small_export):
    return small_export / "model.onnx"


@pytest.fixture
def model(file):
    return load_graph(file)


@pytest.mark.parametrize("name", ["absent.onnx", "."])
def test_a_missing_file_is_named(tmp_path, name):
    for read in (load_graph, admit_graph):
        with pytest.raises(MissingFileError) as caught:
            read(tmp_path / name)
        assert str(tmp_path / name) in caught.value.message


def truncated(content):
    return content[: len(content) // 2]


def without_its_last_byte(content):
    return content[:-1]


def garbage(content):
    return bytes((i * 167 + 13) % 256 for i in range(4096))


def text(content):
    return b"this is no model\n"


def empty(content):
    return b""


@pytest.mark.parametrize("damage", [truncated, without_its_last_byte, garbage, text, empty])
def test_what_is_not_a_whole_onnx_file_is_refused(tmp_path, file, damage):
    path = tmp_path / "model.onnx"
    path.write_bytes(damage(file.read_bytes()))
    with pytest.raises(GraphError, match=r"is not a valid ONNX file|is an empty file") as caught:
        admit_graph(path)
    assert caught.value.found
    assert caught.value.exit_code == 2


def test_a_graph_that_breaks_a_rule_of_onnx_is_refused_when_read(tmp_path, file):
    proto = onnx.load(str(file))
    proto.graph.node[3].input[0] = "nowhere"
    onnx.save(proto, str(tmp_path / "model.onnx"))
    with pytest.raises(GraphError, match="not a valid ONNX file"):
        admit_graph(tmp_path / "model.onnx")


def test_a_graph_that_breaks_a_rule_of_onnx_is_not_written(tmp_path, model):
    next(node for node in model.graph if node.op_type == "Softmax").op_type = "Hardmox"
    with pytest.raises(GraphError, match="fails the ONNX checker") as caught:
        save_graph(model, tmp_path / "model.onnx")
    assert "Hardmox" in caught.value.found
    assert not (tmp_path / "model.onnx").exists()


def test_a_round_trip_keeps_every_node_weight_and_metadata_entry(tmp_path, file, model):
    save_graph(model, tmp_path / "model.onnx")
    before, after = onnx.load(str(file)), onnx.load(str(tmp_path / "model.onnx"))
    for proto in (before, after):
        del proto.graph.value_info[:]  # types of inner tensors are a cache that a reader may complete
    assert before == after


def test_a_file_that_was_read_once_is_written_with_the_same_bytes(tmp_path, model):
    save_graph(model, tmp_path / "first.onnx")
    save_graph(load_graph(tmp_path / "first.onnx"), tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()


def test_a_second_write_has_the_same_bytes_as_the_first(tmp_path, model):
    save_graph(model, tmp_path / "first.onnx")
    save_graph(model, tmp_path / "second.onnx")
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()


def test_a_round_trip_keeps_the_function(tmp_path, file, model):
    save_graph(model, tmp_path / "model.onnx")
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), dtype=np.uint8)
    results = []
    for path in (file, tmp_path / "model.onnx"):
        with OnnxRuntimeRunner(path, name="graph") as runner:
            results.append(runner.infer({"image": images})["logits"])
    np.testing.assert_array_equal(*results)


# --- weights beside the graph -----------------------------------------------------------------------------------------


def logits(graph, **options):
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), dtype=np.uint8)
    with OnnxRuntimeRunner(graph, name="graph", **options) as runner:
        return runner.infer({"image": images})["logits"]


def shared(model, outputs=(), name="logits"):
    images = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 1), dtype=np.uint8)
    with runner_of(model, "graph", outputs) as runner:
        return runner.infer({"image": images})[name]


def test_a_graph_that_shares_its_weights_with_the_session_is_the_same_function(file):
    model = load_graph(file)
    before = ir.to_proto(model).SerializeToString()
    np.testing.assert_array_equal(shared(model), logits(file))
    assert ir.to_proto(model).SerializeToString() == before
    runner = runner_of(model, "graph")
    weights = {str(name): value.const_value.numpy() for name, value in model.graph.initializers.items()}
    assert runner.weights.keys() == {name for name, array in weights.items() if array.nbytes >= 1024}
    assert all(np.shares_memory(array, weights[name]) for name, array in runner.weights.items())
    assert len(runner.graph) < 0.2 * file.stat().st_size


def test_a_session_that_shares_weights_returns_inner_tensors_too(file):
    model = load_graph(file)
    inner = next(str(node.outputs[0].name) for node in model.graph if node.op_type == "Softmax")
    assert (shared(model, [inner], inner).sum(-1) - 1 < 1e-5).all()


def test_weights_above_the_limit_lie_beside_the_graph(external_graph, file, model):
    assert {path.name for path in external_graph.parent.iterdir()} == {"model.onnx", "model.onnx.data"}
    data = external_graph.with_name("model.onnx.data").stat().st_size
    assert data > 0.9 * weight_bytes(model)
    assert external_graph.stat().st_size < file.stat().st_size - data + 10_000


def test_a_graph_with_weights_beside_it_is_the_same_function(external_graph, file):
    np.testing.assert_array_equal(logits(external_graph), logits(file))


def test_weights_beside_the_graph_are_not_read_before_they_are_used(external_graph):
    loaded = load_graph(external_graph)
    outside = [value.const_value for value in loaded.graph.initializers.values()]
    outside = [tensor for tensor in outside if isinstance(tensor, ir.ExternalTensor)]
    assert sum(tensor.nbytes for tensor in outside) > 0.9 * weight_bytes(loaded)
    assert all(tensor.raw is None for tensor in outside)
    np.testing.assert_array_equal(shared(loaded), logits(external_graph))


def test_writing_weights_beside_the_graph_leaves_the_model_in_memory_as_it_was(tmp_path, model, monkeypatch):
    monkeypatch.setattr(files, "MAX_WEIGHT_BYTES", 50_000)
    save_graph(model, tmp_path / "model.onnx")
    assert not any(isinstance(each.const_value, ir.ExternalTensor) for each in model.graph.initializers.values())


def test_both_files_have_the_same_bytes_every_time(tmp_path, external_graph, monkeypatch):
    monkeypatch.setattr(files, "MAX_WEIGHT_BYTES", 50_000)
    save_graph(load_graph(external_graph), tmp_path / "model.onnx")  # from a file that has its weights beside it too
    for name in ("model.onnx", "model.onnx.data"):
        assert (tmp_path / name).read_bytes() == external_graph.with_name(name).read_bytes()


def test_below_the_limit_weights_come_into_the_graph_again(tmp_path, external_graph, file):
    """What an INT8 placement does to the weights of a model of 3 GB."""
    save_graph(load_graph(external_graph), tmp_path / "model.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx"}
    assert (tmp_path / "model.onnx").read_bytes() == serialised(load_graph(file))


def test_the_bytes_of_a_graph_hold_its_weights_wherever_they_lay(external_graph, file):
    content = serialised(load_graph(external_graph))
    assert content == serialised(load_graph(file))
    np.testing.assert_array_equal(logits(content), logits(file))


def test_weights_that_no_node_reads_are_not_shared(file):
    model = load_graph(file)
    unused = ir.tensor(np.ones(1000, np.float32), name="unused")
    model.graph.register_initializer(ir.Value(name="unused", const_value=unused))
    np.testing.assert_array_equal(shared(model), logits(file))


def test_a_graph_that_is_too_large_has_no_bytes(model, monkeypatch):
    monkeypatch.setattr(files, "MAX_WEIGHT_BYTES", 50_000)
    with pytest.raises(GraphError, match="too large to serialise") as caught:
        serialised(model)
    assert caught.value.found == f"{weight_bytes(model):,} bytes"


@pytest.mark.parametrize("kept", [None, 0, 1000, -1])
def test_a_graph_whose_weights_are_gone_or_cut_is_refused(tmp_path, external_graph, kept):
    (tmp_path / "model.onnx").write_bytes(external_graph.read_bytes())
    if kept is not None:
        data = external_graph.with_name("model.onnx.data").read_bytes()
        (tmp_path / "model.onnx.data").write_bytes(data[:kept])
    with pytest.raises(MissingFileError if kept is None else UnsafeGraphError, match=r"external (data|file)") as caught:
        admit_graph(tmp_path / "model.onnx")
    assert "model.onnx.data" in caught.value.found


def test_a_graph_that_breaks_a_rule_of_onnx_is_not_written_in_two_files_either(tmp_path, model, monkeypatch):
    monkeypatch.setattr(files, "MAX_WEIGHT_BYTES", 50_000)
    next(node for node in model.graph if node.op_type == "Softmax").op_type = "Hardmox"
    with pytest.raises(GraphError, match="fails the ONNX checker"):
        save_graph(model, tmp_path / "model.onnx")


# --- versions and metadata --------------------------------------------------------------------------------------------


def test_the_written_file_has_the_lowest_ir_version_that_holds_its_opset(tmp_path, model):
    model.ir_version = 12
    save_graph(model, tmp_path / "model.onnx")
    assert onnx.load(str(tmp_path / "model.onnx")).ir_version == 9


def test_metadata_comes_back_as_it_was_written(tmp_path, model):
    preprocess = PreprocessSpec(36, (32, 32), "lanczos", (0.1,), (0.3,))
    for metadata in (
        GraphMetadata("other", "classification", preprocess, "openvino-cpu", "int8"),
        GraphMetadata("other", "panoptic", preprocess, postprocess=PostprocessSpec("sigmoid", "xyxy", 0.3, (0, 2))),
        GraphMetadata("other", "sequence", None, sequence=SequenceSpec(1, 2, 0, 20, 13)),
    ):
        set_metadata(model, metadata)
        save_graph(model, tmp_path / "model.onnx")
        assert get_metadata(load_graph(tmp_path / "model.onnx"), "model.onnx") == metadata


def test_a_graph_that_takes_no_images_says_so():
    with pytest.raises(GraphError, match="reverse does not take images") as caught:
        GraphMetadata("reverse", "sequence", None).images  # noqa: B018
    assert caught.value.found == "a graph for the task sequence"


def test_an_export_carries_its_preprocessing(model):
    metadata = get_metadata(model, "model.onnx")
    assert metadata == GraphMetadata(
        "small", "classification", PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)), None, None
    )


def test_a_graph_without_metadata_is_refused(model):
    model.metadata_props.clear()
    with pytest.raises(GraphError, match=r"the preprocessing of model\.onnx is unknown") as caught:
        get_metadata(model, "model.onnx")
    assert "vitdeploy export" in caught.value.fix


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": 3}', "null"])
def test_metadata_of_another_form_is_refused(model, text):
    model.metadata_props[METADATA_KEY] = text
    with pytest.raises(GraphError, match=r"metadata of .* cannot be read") as caught:
        get_metadata(model, "model.onnx")
    assert caught.value.found


def test_spec_lists_the_inputs_and_outputs(model):
    image, logits = TensorSpec("image", "uint8", ("batch", 32, 32, 1)), TensorSpec("logits", "float32", ("batch", 10))
    assert graph_spec(model, "model.onnx") == GraphSpec("model.onnx", (image,), (logits,))


def test_fixed_batch_is_the_leading_size_or_none(model):
    spec = graph_spec(model, "model.onnx")
    pinned = dataclasses.replace(spec, inputs=(spec.inputs[0].with_batch(3),))
    assert (fixed_batch(spec), fixed_batch(pinned)) == (None, 3)


def test_a_tensor_without_a_shape_is_refused():
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "test", [value], [value])
    graph.output[0].name = "y"
    with pytest.raises(GraphError, match="x has no declared type and shape"):
        graph_spec(ir.from_proto(helper.make_model(graph)), "model.onnx")


@pytest.mark.parametrize("name", ["decoder_step", "text_tower", "model"])
def test_graphs_beside_one_of_several_are_admitted_with_it(tmp_path, sequence_export, name):
    """Whatever may be taken for a part of the model: only then can it be parsed without a check."""
    for file in sequence_export.glob("*.onnx"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert admitted_metadata(tmp_path / "encoder.onnx").task == "sequence"
    (tmp_path / f"{name}.onnx").write_bytes(b"\x08garbage" * 50)
    with pytest.raises(GraphError, match=rf"{name}\.onnx is not a valid ONNX file"):
        admitted_metadata(tmp_path / "encoder.onnx")
