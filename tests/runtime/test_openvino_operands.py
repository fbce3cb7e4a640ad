"""Operands that are exchanged so that OpenVINO's kernels for AMX give right answers."""

import numpy as np
import pytest

from tests.graph.builder import Builder, run, values
from tests.known_bad.graphs import masked
from vitdeploy.compilation.openvino import write_ir
from vitdeploy.runtime.openvino import OpenVinoRunner, put_vectors_first

openvino = pytest.importorskip("openvino")


def read(proto):
    return openvino.Core().read_model(proto.SerializeToString())


def answers(file, feeds, hint="f32"):
    with OpenVinoRunner(file, name="x", batch=1, options={"INFERENCE_PRECISION_HINT": hint}) as runner:
        return next(iter(runner.infer(feeds).values()))


@pytest.mark.parametrize("hint", ["f32", "bf16"])
def test_a_mask_of_keys_gives_the_answers_of_onnxruntime(hint, tmp_path):
    """On a CPU without AMX this holds with any order; on one with it the plugin is wrong without the exchange."""
    if hint == "bf16" and "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no BF16")
    proto, [feeds] = masked(False)
    (tmp_path / "graph.onnx").write_bytes(proto.SerializeToString())
    [expected] = run(proto, **feeds)
    assert np.abs(answers(tmp_path / "graph.onnx", feeds, hint) - expected).max() < (0.02 if hint == "bf16" else 1e-4)


def test_the_file_that_is_written_has_them_exchanged(tmp_path):
    proto, [feeds] = masked(False)
    (tmp_path / "graph.onnx").write_bytes(proto.SerializeToString())
    write_ir(tmp_path / "graph.onnx")
    assert put_vectors_first(read(proto)) == 1
    assert put_vectors_first(openvino.Core().read_model(str(tmp_path / "model.xml"))) == 0
    [expected] = run(proto, **feeds)
    assert np.abs(answers(tmp_path / "model.xml", feeds) - expected).max() < 1e-4


def product(b, left=(1, 2, 6, 4), right=(1, 2, 4, 5)):
    return b.add("MatMul", b.input("x", list(left)), b.input("y", list(right)))


def sum_of(shape, operator="Add", behind=()):
    """How many operands are exchanged in a product of activations, `behind` what comes of it, and a vector."""
    b = Builder()
    scores = product(b)
    for each in behind:
        scores = b.add(each[0], scores, *each[1:])
    vector = b.constant(values(*shape))
    proto = b.model(b.add(operator, scores, vector), rank=4)
    return put_vectors_first(read(proto))


@pytest.mark.parametrize(
    ("shape", "count"),
    [((5,), 1), ((1, 1, 1, 5), 1), ((1, 1, 6, 5), 0), ((1, 2, 1, 5), 0), ((1, 1, 6, 1), 0), ((1,), 0)],
)
def test_only_vectors_along_the_last_axis_are_exchanged(shape, count):
    assert sum_of(shape) == count
    assert sum_of(shape, operator="Mul") == count


def test_the_scale_of_scores_and_another_sum_lie_between():
    assert sum_of((5,), behind=[("Mul", 0.5)]) == 1
    assert sum_of((5,), behind=[("Add", values(1, 1, 6, 5))]) == 1
    assert sum_of((5,), behind=[("Relu",)]) == 0


def test_the_bias_of_a_linear_stays_where_it_is():
    b = Builder()
    linear = b.add("MatMul", b.input("x", [1, 6, 4]), values(4, 5))
    assert put_vectors_first(read(b.model(b.add("Add", linear, values(5))))) == 0


def test_names_of_outputs_and_values_are_kept():
    b = Builder()
    proto = b.model(b.add("Mul", b.add("Add", product(b), values(5)), values(5, seed=2)), rank=4)
    feeds = {"x": values(1, 2, 6, 4), "y": values(1, 2, 4, 5, seed=3)}
    model = read(proto)
    before = [port.get_any_name() for port in model.outputs]
    assert put_vectors_first(model) == 2
    assert [port.get_any_name() for port in model.outputs] == before
    found = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(feeds)[0]
    np.testing.assert_allclose(found, run(proto, **feeds)[0], rtol=1e-5, atol=1e-6)
