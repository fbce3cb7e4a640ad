"""The ONNX files that probes write: the onnx package reads what was meant, and ONNX Runtime computes it."""

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets import CPU_TARGETS  # noqa: F401  (onnxruntime is one of them)
from vitdeploy.benchmark.onnxruntime import Node, onnx_model
from vitdeploy.runtime.ort import open_session

DTYPES = st.sampled_from([np.float32, np.uint8, np.int8])
SHAPES = st.lists(st.integers(1, 300), min_size=0, max_size=3).filter(lambda shape: np.prod(shape, initial=1) < 3000)


@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 9))
def test_a_written_model_is_read_as_it_was_meant(shape, dtype, seed):
    constant = np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)
    image = np.zeros([2, *shape], np.float32)
    nodes = [Node("Neg", ("x",), "y"), Node("Abs", ("y",), "z" * 200)]
    model = onnx.load_from_string(onnx_model(nodes, {"x": image}, "z" * 200, {"c": constant}))
    assert [(node.op_type, list(node.input), list(node.output), node.name) for node in model.graph.node] == [
        ("Neg", ["x"], ["y"], "y"),
        ("Abs", ["y"], ["z" * 200], "z" * 200),
    ]
    (found,) = model.graph.initializer
    array = onnx.numpy_helper.to_array(found)
    assert (found.name, array.dtype) == ("c", constant.dtype)
    assert np.array_equal(array, constant)
    (entry,) = model.graph.input
    assert [size.dim_value for size in entry.type.tensor_type.shape.dim] == list(image.shape)
    assert entry.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    assert [value.name for value in model.graph.output] == ["z" * 200]
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 17)]


def test_a_written_model_passes_the_checker_and_runs():
    generator = np.random.default_rng(0)
    x, weight = (generator.standard_normal(shape, dtype=np.float32) for shape in ((4, 8), (8, 3)))
    model = onnx_model([Node("MatMul", ("x", "w"), "y")], {"x": x}, "y", {"w": weight})
    inferred = onnx.shape_inference.infer_shapes(onnx.load_from_string(model))
    onnx.checker.check_model(inferred, full_check=True)
    (found,) = open_session(model).run(None, {"x": x})
    np.testing.assert_allclose(found, x @ weight, rtol=1e-5, atol=1e-5)
