"""What a file says of itself spares it neither the gate nor the canonical form."""

import onnx
import pytest
from onnx import TensorProto

from tests.graph.builder import Builder, values
from vitdeploy.errors import UnsafeGraphError
from vitdeploy.graph.io import METADATA_KEY, load_graph
from vitdeploy.graph.optimize import OptimizeOptions
from vitdeploy.pipeline.stages.files import is_ours
from vitdeploy.pipeline.stages.optimize import optimize


def of_others():
    """A graph in another form than ours: a Gemm with a transposed weight, a dead node, an old opset."""
    b = Builder(13)
    x = b.input("image", ["batch", 3, 4, 4])
    flat = b.add("Flatten", x)
    b.add("Relu", flat)
    return b.model(b.add("Gemm", flat, values(5, 48), values(5, seed=1), transB=1), rank=2)


def claimed(folder, proto):
    """The graph in a file that says that vitdeploy wrote it."""
    folder.mkdir()
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, '{"name": "ours", "task": "classification", "preprocess": null}'
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert is_ours(path)
    return path


def test_a_graph_that_claims_to_be_ours_is_brought_into_our_form(tmp_path):
    path, out = claimed(tmp_path / "in", of_others()), tmp_path / "out"
    out.mkdir()
    facts = optimize({"model": path}, OptimizeOptions(), out)
    assert [node.op_type for node in load_graph(out / "model.onnx").graph] == ["Reshape", "MatMul", "Add"]
    assert facts["rewrites"]["model"]["gemm"] == 1
    assert facts["difference"]["model"] <= 1e-5


def test_a_graph_that_claims_to_be_ours_passes_the_gate_first(tmp_path):
    proto, size = of_others(), 5 * 48 * 4
    weight = next(tensor for tensor in proto.graph.initializer if list(tensor.dims) == [5, 48])
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="secret.bin")
    (tmp_path / "elsewhere.bin").write_bytes(bytes(size))
    path = claimed(tmp_path / "in", proto)
    (path.parent / "secret.bin").hardlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(UnsafeGraphError, match="not a file of its own"):
        optimize({"model": path}, OptimizeOptions(), tmp_path)


def test_graphs_of_tokens_are_let_through(tmp_path):
    """Encoder and decoder of a sequence model take no images."""
    b = Builder(20)
    tokens = b.input("source", ["batch", "length"], TensorProto.INT64)
    model = b.model(b.add("Gather", values(7, 4), tokens), rank=3)
    path = tmp_path / "encoder.onnx"
    onnx.save(model, str(path))
    out = tmp_path / "out"
    out.mkdir()
    assert optimize({"encoder": path}, OptimizeOptions(), out)["difference"] == {"encoder": 0.0}
