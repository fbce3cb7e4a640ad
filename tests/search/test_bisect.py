"""Planted errors are found where they were planted, on the runtimes that ship, in few runs; and none is made up."""

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import Builder
from tests.targets import CPU_TARGETS
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.prunable import single_cuts
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import save_graph
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.placement import choose, place
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.ranges import range_of
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.bisect import bisect, find_fix
from vitdeploy.search.frame import ReferenceOutputs
from vitdeploy.search.graphs import Splice
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(8, (8, 8), "bicubic", (0.5,), (0.5,))
BLOCKS, TOKENS, WIDTH, HIDDEN, BATCH = 6, 4, 16, 32, 4
LAYERS = [f"blocks.{i}.fc{j}" for i in range(BLOCKS) for j in (1, 2)]
PIXELS = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
# The whole, halving the cuts, the part alone, its weights alone, and halving what is in it.
RUNS = 1 + math.ceil(math.log2(BLOCKS)) + 1 + 1 + 1


def mlps(*, named=True):
    """x + fc2(gelu(fc1(norm(x)))), BLOCKS times, over the quarters of an image.

    Args:
        named: whether the dynamic size of inner tensors is known to be the batch, as exporters know it.
    """
    b = Builder()
    generator = np.random.default_rng(0)
    x = b.op("Reshape", "image", b.ints(-1, TOKENS, WIDTH), name="tokens")

    def linear(x, inside, outside, name):
        weight = b.constant(generator.normal(size=(inside, outside)).astype(np.float32) / inside**0.5)
        return b.linear(x, inside, outside, name, weight=weight)

    for i in range(BLOCKS):
        hidden = linear(b.norm(x, f"blocks.{i}.norm", WIDTH), WIDTH, HIDDEN, f"blocks.{i}.fc1")
        hidden = b.op("Gelu", hidden, name=f"blocks.{i}/Gelu")
        x = b.op("Add", x, linear(hidden, HIDDEN, WIDTH, f"blocks.{i}.fc2"), name=f"blocks.{i}/Add")
    model = b.model({"image": ["batch", 1, 8, 8]}, b.op("Reshape", x, b.ints(-1, TOKENS * WIDTH), name="logits"))
    for node in model.graph if named else ():
        for value in node.outputs:
            value.shape = ir.Shape(["batch", *value.shape[1:]])
    return model


def with_outlier(model, layer, reach, channel=5, weight=0.0):
    """One hidden channel of a block is moved far up by a bias, and its weights behind that are multiplied by `weight`:
    with zero it spoils the range alone."""
    editor = Editor(model)
    linears = {linear.name: linear for linear in editor.linears}
    first, second = linears[layer.replace("fc2", "fc1")], linears[layer]
    rows = np.arange(HIDDEN)
    editor.set_linear(first, bias=np.where(rows == channel, reach, first.bias))
    editor.set_linear(second, second.weight * np.where(rows == channel, weight, 1)[:, None])
    return model


def plain(model, target):
    """Quantized without folds: what every layer reads from its smallest to its largest value."""
    ranges = {name: range_of(found) for name, found in observe(model, [PIXELS], PREPROCESS).items()}
    model = copy(model)
    place(model, ranges, target)
    return model


def copy(model):
    return ir.from_proto(ir.to_proto(model))


def spoil(model, constant, change):
    value = model.graph.initializers[constant]
    array = value.const_value.numpy()
    value.const_value = ir.tensor(change(array).astype(array.dtype), name=constant)


@pytest.fixture
def splice(tmp_path_factory):
    def splice(graph, placement, target):
        folder = tmp_path_factory.mktemp("engine")
        save_graph(copy(graph), folder / "float.onnx")
        save_graph(copy(placement), folder / "placed.onnx")
        (folder / "out").mkdir()
        placed = count_int8(placement)
        precision = "int8" if placed else "fp32"
        engine = compile_engine(
            folder / "placed.onnx", folder / "out", target=target, precision=precision, batch=BATCH, placed=placed
        )
        with OnnxRuntimeRunner(folder / "float.onnx", name="float") as runner:
            reference_outputs = ReferenceOutputs(runner, PIXELS, PREPROCESS, "classification", batch=engine.batch)
        return Splice(graph, placement, engine, reference_outputs)

    return splice


def assert_consistent(found, model):
    """Parts cover the graph, and their shares add up to all."""
    cuts = single_cuts(model)
    ends = {str(model.graph.outputs[0].name), *cuts}
    assert {part.end for part in found.parts} <= ends
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    assert [p.share for p in found.parts] == sorted((p.share for p in found.parts), reverse=True)


@pytest.mark.parametrize("target", CPU_TARGETS)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block=st.integers(0, BLOCKS - 1), channel=st.integers(0, HIDDEN - 1))
def test_an_outlier_channel_is_found_at_the_input_that_it_spoils(splice, target, block, channel):
    layer = f"blocks.{block}.fc2"
    model = with_outlier(mlps(), layer, 300, channel)
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert (found.culprit.kind, found.culprit.layers) == ("input", (layer,))
    assert found.parts[0].share > 0.5
    assert found.located is found.culprit
    assert cut.runs <= RUNS
    assert list(found.culprit.facts.outliers) == [channel]
    assert found.culprit.facts.high == pytest.approx(300, abs=10)
    assert found.culprit.facts.median_channel < 10


def test_a_graph_without_a_place_to_cut_is_searched_by_its_quantized_inputs(splice):
    model, target = with_outlier(mlps(named=False), "blocks.4.fc2", 300), "onnxruntime-cpu"
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert (found.cuts, [(part.start, part.end) for part in found.parts]) == (0, [("image", "logits")])
    assert (found.culprit.kind, found.culprit.layers) == ("input", ("blocks.4.fc2",))
    assert cut.runs <= 3 + math.ceil(math.log2(len(LAYERS)))


@pytest.mark.parametrize("target", CPU_TARGETS)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layer=st.sampled_from(LAYERS), change=st.sampled_from(["scale", "zero"]))
def test_broken_weights_are_found_in_their_layer(splice, target, layer, change):
    model = mlps()
    placement = plain(model, target)
    if change == "scale":
        spoil(placement, f"{layer}.weight.scale", lambda scales: 2 * scales)
    else:
        spoil(placement, f"{layer}.weight.int8", np.zeros_like)
    cut = splice(model, placement, target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert (found.culprit.kind, found.culprit.layers) == ("weight", (layer,))
    assert cut.runs <= RUNS


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_an_error_that_enters_everywhere_is_said_to(splice, target):
    model = mlps()
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert found.located is None
    assert find_fix(found, cut) is None


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_a_layer_of_a_float_engine_that_differs_is_found_by_its_node(splice, target):
    model = mlps()
    placement = copy(model)
    editor = Editor(placement)
    [linear] = [each for each in editor.linears if each.name == "blocks.4.fc1"]
    editor.set_linear(linear, linear.weight * 1.1)
    cut = splice(model, placement, target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert (found.culprit.kind, found.culprit.tensors) == ("node", ("blocks.4.fc1/MatMul",))
    assert (found.parts[0].start, found.parts[0].end) == ("blocks.3/Add", "blocks.4/Add")
    assert found.parts[0].share == pytest.approx(1, abs=1e-3)
    fix = find_fix(found, cut)
    assert (fix.kind, fix.enough) == ("compile", True)
    assert fix.after < 1e-9 < fix.before


@pytest.mark.parametrize("quantized", [True, False], ids=["int8", "fp32"])
@pytest.mark.parametrize("target", CPU_TARGETS)
def test_the_first_tensor_that_is_not_finite_is_found(splice, target, quantized):
    model = mlps()
    placement = plain(model, target) if quantized else copy(model)
    spoil(placement, "blocks.3.fc2.bias", lambda bias: np.where(np.arange(WIDTH) == 3, np.inf, bias))
    cut = splice(model, placement, target)
    found = bisect(cut)
    assert math.isinf(found.distance)
    assert (found.parts[0].start, found.parts[0].end, found.parts[0].share) == ("blocks.2/Add", "blocks.3/Add", 1)
    if quantized:
        assert (found.culprit.kind, found.culprit.layers) == ("weight", ("blocks.3.fc2",))
    else:
        assert found.culprit.tensors == ("blocks.3.fc2/Add",)
    fix = find_fix(found, cut)
    assert fix.enough
    assert math.isfinite(fix.after)


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_the_float_graph_itself_has_no_error(splice, target):
    model = mlps()
    cut = splice(model, copy(model), target)
    found = bisect(cut)
    assert (found.same, found.parts, found.culprit, cut.runs) == (True, (), None, 1)
    assert find_fix(found, cut) is None


@pytest.mark.parametrize("target", CPU_TARGETS)
def test_folded_graphs_are_cut_where_both_are_the_same(splice, target):
    """Hidden channels that were split into copies have other sizes; the layers around them are named together."""
    model = with_outlier(mlps(), "blocks.2.fc2", 40)
    placement = copy(model)
    statistics = observe(model, [PIXELS], PREPROCESS)
    prepared = prepare(placement, statistics, choose(placement, target))
    place(placement, prepared.ranges, target, (), prepared.weights)
    spoil(placement, "blocks.2.fc1.weight.int8", np.zeros_like)
    found = bisect(splice(model, placement, target))
    assert_consistent(found, model)
    assert found.culprit.kind == "weight"
    assert "blocks.2.fc1" in found.culprit.layers


@pytest.mark.parametrize(("weight", "ignore"), [(0.01, ()), (0.0, ("blocks.2.fc2",))], ids=["scaled", "float"])
@pytest.mark.parametrize("target", CPU_TARGETS)
def test_quantizing_again_mends_what_scales_can_and_float_what_they_cannot(splice, target, weight, ignore):
    """A channel that nothing is made of has no scale."""
    model = with_outlier(mlps(), "blocks.2.fc2", 300, weight=weight)
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert (found.culprit.kind, found.culprit.layers) == ("input", ("blocks.2.fc2",))
    before = cut.runs
    fix = find_fix(found, cut)
    assert (fix.kind, fix.ignore, fix.enough) == ("quantize", ignore, True)
    assert fix.after < 0.5 * fix.before == 0.5 * found.distance
    assert cut.runs - before == 1 + len(ignore)


def test_answers_of_the_float_graph_that_are_not_finite_are_refused(splice):
    model = mlps()
    broken = copy(model)
    spoil(broken, "blocks.5.fc2.bias", lambda bias: bias * np.nan)
    with pytest.raises(DataError, match="the outputs of the float graph are not finite"):
        splice(broken, model, "onnxruntime-cpu")
