"""What the gate lets through: whole models, weights inside or beside the file."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.graph.builder import Builder, difference, run, values
from vitdeploy.errors import GraphError
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.admit import admit


def small(opset=17):
    b = Builder(opset)
    x = b.input("x", ["batch", 3, 8, 8])
    y = b.add("Conv", x, values(8, 3, 4, 4), values(8, seed=1), kernel_shape=[4, 4], strides=[4, 4])
    return b.model(b.add("MatMul", b.add("Reshape", y, np.array([-1, 32], np.int64)), values(32, 16, seed=2)), rank=2)


def saved(tmp_path, proto, **options):
    path = tmp_path / "model.onnx"
    onnx.save(proto, str(path), **options)
    return path


@pytest.mark.parametrize("opset", [11, 17, 20, 23])
def test_a_model_is_admitted_as_it_is(tmp_path, opset):
    proto = small(opset)
    admitted = ir.to_proto(admit(saved(tmp_path, proto)))
    assert [node.op_type for node in admitted.graph.node] == ["Conv", "Reshape", "MatMul"]
    assert list(admitted.graph.initializer) == list(proto.graph.initializer)
    assert admitted.opset_import == proto.opset_import
    x = values(2, 3, 8, 8)
    np.testing.assert_array_equal(run(admitted, x=x), run(proto, x=x))


def test_weights_beside_the_file_stay_on_disk_until_they_are_read(tmp_path):
    proto = small()
    reference = onnx.ModelProto()
    reference.CopyFrom(proto)
    path = saved(tmp_path, proto, save_as_external_data=True, location="weights.bin", size_threshold=100)
    model = admit(path)
    external = [
        v.const_value for v in model.graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)
    ]
    assert len(external) == 2
    x = values(2, 3, 8, 8)
    normalise(model)
    ir.external_data.load_to_model(model)
    assert difference(run(ir.to_proto(model), x=x), run(reference, x=x)) <= 1e-6


def test_weights_may_lie_in_a_folder_beside_the_file(tmp_path):
    (tmp_path / "data").mkdir()
    path = saved(tmp_path, small(), save_as_external_data=True, location="data/weights.bin", size_threshold=0)
    values_read = [value.const_value.numpy() for value in admit(path).graph.initializers.values()]
    assert sum(array.size for array in values_read) == 8 * 48 + 8 + 2 + 32 * 16


def test_a_claim_about_an_inner_shape_is_not_believed(tmp_path):
    proto = small()
    proto.graph.value_info.append(
        helper.make_tensor_value_info(proto.graph.node[0].output[0], TensorProto.FLOAT, [7, 7, 7, 7])
    )
    model = admit(saved(tmp_path, proto))
    assert model.graph[0].outputs[0].shape is None
    normalise(model)
    assert [str(size) for size in model.graph[0].outputs[0].shape] == ["batch", "8", "2", "2"]


def test_branches_are_admitted(tmp_path):
    b = Builder(17)
    x = b.input("x", [1, 3, 8, 8])
    branch = helper.make_graph(
        [helper.make_node("Relu", [x], ["relu"])], "branch", [],
        [helper.make_tensor_value_info("relu", TensorProto.FLOAT, [1, 3, 8, 8])],
    )  # fmt: skip
    y = b.add("If", np.bool_(True), then_branch=branch, else_branch=branch)
    assert [node.op_type for node in admit(saved(tmp_path, b.model(y))).graph] == ["If"]


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (TensorProto.FLOAT16, np.float16),
        (TensorProto.INT8, np.int8),
        (TensorProto.BOOL, np.bool_),
        (TensorProto.DOUBLE, np.float64),
        (TensorProto.UINT64, np.uint64),
        (TensorProto.COMPLEX64, np.complex64),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_every_way_to_store_a_tensor_is_counted_right(tmp_path, dtype, stored, raw):
    array = np.array([[1, 0, 1], [0, 1, 1]]).astype(stored)
    proto = small()
    if raw:
        tensor = numpy_helper.from_array(array, "extra")
    else:
        tensor = helper.make_tensor("extra", dtype, array.shape, array.ravel().tolist())
    proto.graph.initializer.append(tensor)
    assert np.array_equal(admit(saved(tmp_path, proto)).graph.initializers["extra"].const_value.numpy(), array)


def test_four_bit_tensors_and_text_are_counted_right(tmp_path):
    proto = small(21)
    proto.ir_version = 10
    proto.graph.initializer.append(helper.make_tensor("four", TensorProto.INT4, [3], [1, 2, 3]))
    proto.graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [2], [b"a", b"bc"]))
    assert {"four", "text"} <= set(admit(saved(tmp_path, proto)).graph.initializers)


@pytest.mark.parametrize("dtype", [TensorProto.UINT8, TensorProto.FLOAT16])
def test_pixels_and_half_precision_are_images(tmp_path, dtype):
    b = Builder(17)
    y = b.add("Cast", b.input("x", ["batch", 8, 8, 3], dtype), to=TensorProto.FLOAT)
    admit(saved(tmp_path, b.model(y)))


def test_the_error_of_a_graph_that_onnx_rejects_is_passed_on(tmp_path):
    proto = small()
    proto.graph.node[1].input[0] = "nowhere"
    with pytest.raises(GraphError, match="not a valid ONNX file") as caught:
        admit(saved(tmp_path, proto))
    assert "nowhere" in caught.value.found
