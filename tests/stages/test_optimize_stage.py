"""What a file says of itself spares it neither the gate nor the canonical form."""

import json

import onnx
import pytest
from onnx import TensorProto

from tests.graph.builder import Builder, values
from vitdeploy.errors import GraphError, UnsafeGraphError
from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.io.files import METADATA_KEY, load_graph
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.graph.values import dim
from vitdeploy.stages.optimize import optimize
from vitdeploy.stages.step import is_ours


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
    with pytest.raises(UnsafeGraphError, match="not a regular file without hard links"):
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


def test_tokens_are_merged_after_the_comparison(small_export, tmp_path):
    """Of the exact rewrites a difference is known; what merging costs is not said here."""
    file, outs = small_export / "model.onnx", [tmp_path / "plain", tmp_path / "merged"]
    for out in outs:
        out.mkdir()
    plain = optimize({"model": file}, OptimizeOptions(), outs[0])
    merged = optimize({"model": file}, OptimizeOptions(token_merging=((0, 12),)), outs[1])
    assert merged["difference"] == plain["difference"]
    assert merged["rewrites"] == plain["rewrites"]
    assert merged["nodes"]["model"][1] > plain["nodes"]["model"][1]
    written = json.loads((outs[1] / "optimize.json").read_text())
    assert written["token_merging"] == {"model": {"tokens": 17, "remaining": {"0": 12}}}
    assert "token_merging" not in plain
    tokens = [dim(each.softmax.outputs[0], -1) for each in find_attentions(load_graph(outs[1] / "model.onnx"))]
    assert tokens == [17, 12]


def test_a_schedule_that_does_not_fit_the_graph_is_refused(small_export, tmp_path):
    with pytest.raises(GraphError, match="8 tokens cannot remain in block 0") as caught:
        optimize({"model": small_export / "model.onnx"}, OptimizeOptions(token_merging=((0, 8),)), tmp_path)
    assert caught.value.found == "17 tokens before the merge, 1 of them not patches"
    assert caught.value.expected.startswith("9 to 16")
