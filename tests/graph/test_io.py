"""Reading and writing ONNX: refusals, round trip, deterministic bytes, metadata."""

import dataclasses

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from vitdeploy.errors import GraphError, MissingFileError
from vitdeploy.graph.io import (
    METADATA_KEY,
    GraphMetadata,
    fixed_batch,
    get_metadata,
    graph_spec,
    load_graph,
    save_graph,
    set_metadata,
)
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec


@pytest.fixture
def file(small_export):
    return small_export / "model.onnx"


@pytest.fixture
def model(file):
    return load_graph(file)


@pytest.mark.parametrize("name", ["absent.onnx", "."])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(MissingFileError) as caught:
        load_graph(tmp_path / name)
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
    with pytest.raises(GraphError, match="not a valid ONNX file") as caught:
        load_graph(path)
    assert caught.value.found
    assert caught.value.exit_code == 2


def test_a_graph_that_breaks_a_rule_of_onnx_is_refused_when_read(tmp_path, file):
    proto = onnx.load(str(file))
    proto.graph.node[3].input[0] = "nowhere"
    onnx.save(proto, str(tmp_path / "model.onnx"))
    with pytest.raises(GraphError, match="not a valid ONNX file"):
        load_graph(tmp_path / "model.onnx")


def test_a_graph_that_breaks_a_rule_of_onnx_is_not_written(tmp_path, model):
    next(node for node in model.graph if node.op_type == "Softmax").op_type = "Hardmox"
    with pytest.raises(GraphError, match="breaks a rule of ONNX") as caught:
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


def test_the_written_file_has_the_lowest_ir_version_that_holds_its_opset(tmp_path, model):
    model.ir_version = 12
    save_graph(model, tmp_path / "model.onnx")
    assert onnx.load(str(tmp_path / "model.onnx")).ir_version == 9


def test_metadata_comes_back_as_it_was_written(tmp_path, model):
    preprocess = PreprocessSpec(36, (32, 32), "lanczos", (0.1,), (0.3,))
    metadata = GraphMetadata("other", "classification", preprocess, "openvino-cpu", "int8")
    set_metadata(model, metadata)
    save_graph(model, tmp_path / "model.onnx")
    assert get_metadata(load_graph(tmp_path / "model.onnx"), "model.onnx") == metadata


def test_an_export_carries_its_preprocessing(model):
    metadata = get_metadata(model, "model.onnx")
    assert metadata == GraphMetadata(
        "small", "classification", PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,)), None, None
    )


def test_a_graph_without_metadata_is_refused(model):
    model.metadata_props.clear()
    with pytest.raises(GraphError, match="does not say how its input is made") as caught:
        get_metadata(model, "model.onnx")
    assert "vitdeploy export" in caught.value.fix


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"name": 3}', "null"])
def test_metadata_of_another_form_is_refused(model, text):
    model.metadata_props[METADATA_KEY] = text
    with pytest.raises(GraphError, match="metadata that cannot be read") as caught:
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
