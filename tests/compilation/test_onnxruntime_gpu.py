"""Compiling for ONNX Runtime's GPU providers: real profiles of the CPU's provider are read, and refused by node."""

import copy

import numpy as np
import onnx_ir as ir
import pytest

from vitdeploy.compilation import onnxruntime_gpu
from vitdeploy.compilation.backend import CompileRequest
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.compilation.onnxruntime import blank, count_kernels
from vitdeploy.compilation.onnxruntime_gpu import shape_nodes
from vitdeploy.errors import CapabilityError
from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime import ort, ort_gpu
from vitdeploy.runtime.nvidia import find_driver
from vitdeploy.runtime.ort import run_profiled
from vitdeploy.runtime.ort_gpu import CUDA, SHAPE_NODES, TENSORRT

pytest.importorskip("onnxruntime", reason="pip install 'vitdeploy[onnxruntime]'")
PROVIDER = ort_gpu.PROVIDERS[CUDA]
LAYERS = 4 * 2 + 2


def quiet(text, done, total):
    """No progress is shown."""


def has_driver():
    try:
        find_driver()
    except CapabilityError:
        return False
    return True


def profiled(graph, batch=1):
    session = ort.open_session(graph, batch=batch, profile=graph.parent / "profile")
    inputs, _ = ort_gpu.tensors(session, batch)
    return run_profiled(session, blank(inputs))


@pytest.fixture
def graph(tmp_path, small_export):
    path = tmp_path / "graph.onnx"
    path.write_bytes((small_export / "model.onnx").read_bytes())
    return path


@pytest.fixture
def reshaped(tmp_path):
    """A graph with one product, and nodes that compute the shape of its input from that of another."""
    weight = ir.tensor(np.ones((4, 3), np.float32), name="weight")
    x = ir.val("x", ir.DataType.FLOAT, (2, 4))
    like = ir.val("like", ir.DataType.FLOAT, ("rows", "columns"))
    shape = ir.node("Shape", [like], name="shape")
    flat = ir.node("Reshape", [x, shape.outputs[0]], name="reshape")
    constant = ir.node("Constant", [], {"value": weight}, name="weight")
    product = ir.node("MatMul", [flat.outputs[0], constant.outputs[0]], name="product")
    product.outputs[0].name, product.outputs[0].dtype = "y", ir.DataType.FLOAT
    product.outputs[0].shape = ir.Shape(["rows", 3])
    nodes = [shape, flat, constant, product]
    model = ir.Model(
        ir.Graph([x, like], product.outputs, nodes=nodes, opset_imports={"": 20}, name="reshaped"), ir_version=10
    )
    save_graph(model, tmp_path / "reshaped.onnx")
    session = ort.open_session(tmp_path / "reshaped.onnx", profile=tmp_path / "profile")
    return run_profiled(session, {"x": np.ones((2, 4), np.float32), "like": np.ones((2, 4), np.float32)})


def moved(events, provider, operators):
    """The same events, those of some operators on another provider."""
    events = copy.deepcopy(events)
    for event in events:
        if event["args"]["op_name"] in operators:
            event["args"]["provider"] = provider
    return events


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_a_profile_whose_nodes_all_ran_on_the_provider_lists_none(graph):
    assert shape_nodes(profiled(graph), ort.CPU_PROVIDER) == []
    assert not list(graph.parent.glob("profile*"))


def test_a_profile_of_another_provider_is_refused_with_its_nodes(graph):
    events = profiled(graph)
    with pytest.raises(CapabilityError, match="ran on another provider") as caught:
        shape_nodes(events, PROVIDER)
    assert caught.value.found.count(f" on {ort.CPU_PROVIDER}") == onnxruntime_gpu.SHOWN_NODES
    assert caught.value.found.endswith(f", and {len(events) - onnxruntime_gpu.SHOWN_NODES} more")
    assert caught.value.expected == PROVIDER


def test_nodes_that_compute_shapes_may_stay_on_the_cpu_and_are_listed(reshaped):
    operators = {event["args"]["op_name"] for event in reshaped}
    assert {"Shape", "MatMul"} <= operators
    assert shape_nodes(moved(reshaped, PROVIDER, operators - {"Shape"}), PROVIDER) == ["shape"]


@pytest.mark.parametrize("left", ["MatMul", "Reshape"])
def test_one_node_that_computes_more_is_refused_by_name(reshaped, left):
    operators = {event["args"]["op_name"] for event in reshaped}
    with pytest.raises(CapabilityError) as caught:
        shape_nodes(moved(reshaped, PROVIDER, operators - {left}), PROVIDER)
    assert caught.value.found.startswith(f"{left} ")


@pytest.mark.parametrize(("kind", "precision"), [("float", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")])
def test_kernels_are_counted_by_the_type_they_read(graph, kind, precision):
    events = copy.deepcopy(profiled(graph))
    for event in events:
        for entry in event["args"].get("input_type_shape", []):
            if "float" in entry:
                entry[kind] = entry.pop("float")
    assert count_kernels(events) == {precision: LAYERS}


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [CUDA, TENSORRT])
def test_a_machine_without_a_driver_is_told_so_before_any_work(graph, tmp_path, target):
    if has_driver():
        pytest.skip("there is an NVIDIA driver")
    (tmp_path / "out").mkdir()
    with pytest.raises(CapabilityError, match="no NVIDIA driver") as caught:
        compile_engine(graph, tmp_path / "out", target=target, precision="fp32", batch=1, placed=0)
    assert "install NVIDIA's driver" in caught.value.fix


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The whole way, with the one provider that is here; it cannot refuse the CPU, so shape nodes are allowed."""
    monkeypatch.setitem(ort_gpu.PROVIDERS, CUDA, ort.CPU_PROVIDER)
    monkeypatch.setattr(ort_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(ort_gpu, "NO_FALLBACK", "session.x64quantprecision")
    monkeypatch.setattr(onnxruntime_gpu, "describe_gpu", lambda: {"gpu": "none"})


@pytest.mark.parametrize("batch", [1, 3])
def test_the_record_says_what_ran(graph, on_the_cpu, batch):
    engine = onnxruntime_gpu.compile_graph(CompileRequest(graph, CUDA, "fp32", batch, None, quiet))
    assert (engine.target, engine.precision, engine.batch, engine.dynamic_batch) == (CUDA, "fp32", batch, True)
    assert (engine.kernels, engine.options, engine.files) == ({"fp32": LAYERS}, {}, ("graph.onnx",))
    assert [tensor.shape for tensor in (*engine.inputs, *engine.outputs)] == [(batch, 32, 32, 1), (batch, 10)]
    assert engine.device["gpu"] == "none"
    assert engine.device["onnxruntime-gpu"]
    assert SHAPE_NODES not in engine.options


def test_an_engine_that_has_no_layer_in_the_precision_is_refused(graph, on_the_cpu):
    with pytest.raises(CapabilityError, match="did not run the graph in fp16") as caught:
        onnxruntime_gpu.compile_graph(CompileRequest(graph, CUDA, "fp16", 1, None, quiet))
    assert caught.value.found == str({"fp32": LAYERS})
