"""An ONNX file of another exporter with an input that each image brings: in what order, and what is refused."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import vitdeploy as vd
from vitdeploy.errors import ExportError, GraphError, InputError
from vitdeploy.exporter.parity import ask, check_graph
from vitdeploy.graph.io.files import graph_spec, import_graph, save_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import PreprocessSpec

SIDE, CLASSES = 8, 5


def written(path, *, mask=("n", 1, SIDE, SIDE), kind=TensorProto.FLOAT, batch="n", deaf=False):
    """Logits of what a mask, which comes first, leaves of an image; `deaf`: of half of it, whatever the mask says."""
    weight = np.random.default_rng(0).standard_normal((3 * SIDE * SIDE, CLASSES)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["mask"], ["told"], to=TensorProto.FLOAT),
        helper.make_node("Clip", ["told", *(["half", "half"] if deaf else [])], ["part"]),
        helper.make_node("Mul", ["pixel_values", "part"], ["seen"]),
        helper.make_node("Flatten", ["seen"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "lanes",
        [
            helper.make_tensor_value_info("mask", kind, mask),
            helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, (batch, 3, SIDE, SIDE)),
        ],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, (batch, CLASSES))],
        [
            onnx.numpy_helper.from_array(weight, "weight"),
            *([onnx.numpy_helper.from_array(np.float32(0.5), "half")] if deaf else []),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_the_image_comes_first_and_the_batch_of_both_is_one(tmp_path):
    found = import_graph(written(tmp_path / "a.onnx", mask=("m", 1, SIDE, SIDE)), bind=["mask=input"])
    spec = graph_spec(found.model, "")
    assert [str(each) for each in spec.inputs] == ["image: float32[batch, 3, 8, 8]", "mask: float32[batch, 1, 8, 8]"]
    assert "each image brings the input mask: float32[m, 1, 8, 8]" in found.notes


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.UINT8, TensorProto.BOOL])
def test_the_graph_is_the_function_of_the_file(tmp_path, kind):
    file = written(tmp_path / "a.onnx", kind=kind)
    graph = vd.export(vd.model(file, bind={"mask": "input"}, task="tensors"), progress=False)
    random = np.random.default_rng(1)
    pixels = random.integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    mask = random.integers(0, 2, (3, 1, SIDE, SIDE)).astype(helper.tensor_dtype_to_np_dtype(kind))
    with OnnxRuntimeRunner(file, name="theirs") as theirs:
        right = theirs.infer({"pixel_values": pixels.transpose(0, 3, 1, 2).astype(np.float32) / 255, "mask": mask})
    with vd.compile(graph, "onnxruntime-cpu", progress=False).load() as predictor:
        found = predictor.outputs(list(pixels), [{"mask": each} for each in mask])
        np.testing.assert_allclose(found["logits"], right["logits"], rtol=1e-4, atol=1e-4)
        turned = (1 - mask.astype(np.uint8)).astype(mask.dtype)
        other = predictor.outputs(list(pixels), [{"mask": each} for each in turned])
        assert not np.allclose(other["logits"], right["logits"], rtol=0.01)


def test_a_graph_that_leaves_the_mask_out_is_not_the_same_function(tmp_path):
    """The negative control of the comparison at three batch sizes."""
    spec = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), mean=(0.0,) * 3, std=(1.0,) * 3)
    files = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for file, deaf in zip(files, (False, True), strict=True):
        save_graph(import_graph(written(file, deaf=deaf), bind=["mask=input"]).model, file)
    with OnnxRuntimeRunner(files[0], name="the original") as original:
        asked = ask(original, spec, None)
    assert [len(each.further["mask"]) for each in asked] == [1, 2, 5]
    assert max(row.max_relative_difference for row in check_graph(files[0], asked, spec)) == 0
    with pytest.raises(ExportError, match="not the same function"):
        check_graph(files[1], asked, spec)
    with (
        OnnxRuntimeRunner(files[1], name="deaf") as deaf,
        pytest.raises(ExportError, match="do not depend on the per-image input"),
    ):
        ask(deaf, spec, None)


@pytest.mark.parametrize(
    ("file", "bind", "error", "message", "expected"),
    [
        ({}, [], GraphError, "does not take one image", "one input, float32"),
        ({}, ["maks=input"], GraphError, "has no input 'maks'", "the name of an input"),
        ({}, ["mask=input", "pixel_values=input"], GraphError, "does not take one image", "one input besides"),
        ({"mask": (1, 1, SIDE, SIDE)}, ["mask=input"], GraphError, "cannot have a value per image", "[batch of"),
        ({"mask": ("n", 1, "h", SIDE)}, ["mask=input"], GraphError, "cannot have a value per image", "[batch of"),
        (
            {"kind": TensorProto.DOUBLE},
            ["mask=input"],
            GraphError,
            "cannot have a value per image",
            "float32 or uint8",
        ),
        ({}, ["mask=input:float32:1x4x4"], GraphError, "does not match --bind", "float32['batch', 1, 4, 4]"),
        ({}, ["mask=input:text"], InputError, "invalid type or shape of the input mask", "input:TYPE"),
    ],
)
def test_what_cannot_be_brought_by_an_image_is_refused(tmp_path, file, bind, error, message, expected):
    with pytest.raises(error, match=message) as refused:
        import_graph(written(tmp_path / "a.onnx", **file), bind=bind)
    assert expected in refused.value.expected and refused.value.found


def test_a_fixed_batch_is_that_of_both(tmp_path):
    file = written(tmp_path / "a.onnx", mask=(2, 1, SIDE, SIDE), batch=2)
    graph = vd.export(vd.model(file, bind={"mask": "input"}, task="tensors"), progress=False)
    with vd.compile(graph, "onnxruntime-cpu", batch=2, progress=False).load() as predictor:
        pixels = np.zeros((3, SIDE, SIDE, 3), np.uint8)
        found = predictor.outputs(list(pixels), [{"mask": np.zeros((1, SIDE, SIDE), np.float32)}] * 3)
    assert found["logits"].shape == (3, CLASSES)
