"""Planted errors are found where they were planted, on the runtimes that ship, in few runs; and none is made up."""

import math

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.graph.small_graphs import Builder
from vitdeploy.compile.engine import compile_engine
from vitdeploy.errors import DataError
from vitdeploy.graph.cuts import single_cuts
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io import save_graph
from vitdeploy.graph.linears import count_int8
from vitdeploy.quantize.error import range_of
from vitdeploy.quantize.observers import observe
from vitdeploy.quantize.placement import choose, place
from vitdeploy.quantize.prepare import prepare
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.bisect import HALF, STANDS_OUT, bisect
from vitdeploy.search.mend import find_mend
from vitdeploy.search.splice import Splice
from vitdeploy.search.yardstick import Yardstick
from vitdeploy.spec import TARGETS, PreprocessSpec

PREPROCESS = PreprocessSpec(4, (4, 4), "bicubic", (0.5,), (0.5,))
BLOCKS, WIDTH, HIDDEN, BATCH = 6, 16, 32, 4
LAYERS = [f"blocks.{i}.fc{j}" for i in range(BLOCKS) for j in (1, 2)]
PIXELS = np.random.default_rng(0).integers(0, 256, (10, 4, 4, 1), dtype=np.uint8)
# Halving the cuts, then the whole part, its weights alone, and halving what is in it.
RUNS = 1 + math.ceil(math.log2(BLOCKS)) + 1 + 2 + 1


def mlps(seed=0):
    """x + fc2(gelu(fc1(x))), BLOCKS times, on an image of WIDTH pixels."""
    b = Builder(seed)
    generator = np.random.default_rng(seed)
    x = b.op("Reshape", "image", b.ints(-1, WIDTH))

    def linear(x, inside, outside, name):
        weight = b.constant(generator.normal(size=(inside, outside)).astype(np.float32) / inside**0.5)
        return b.linear(x, inside, outside, name, weight=weight)

    for i in range(BLOCKS):
        hidden = b.op("Gelu", linear(x, WIDTH, HIDDEN, f"blocks.{i}.fc1"), name=f"blocks.{i}/Gelu")
        x = b.op("Add", x, linear(hidden, HIDDEN, WIDTH, f"blocks.{i}.fc2"), name=f"blocks.{i}/Add")
    return b.model({"image": ["batch", 1, 4, 4]}, x)


def with_outlier(model, layer, reach, channel=5):
    """One hidden channel of a block is moved up by a bias, which the next bias takes back."""
    editor = Editor(model)
    linears = {linear.name: linear for linear in editor.linears}
    first, second = linears[layer.replace("fc2", "fc1")], linears[layer]
    bias = first.bias.copy()
    bias[channel] += reach
    editor.set_linear(first, bias=bias)
    editor.set_linear(second, bias=second.bias - reach * second.weight[channel])
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
            yardstick = Yardstick(runner, PIXELS, PREPROCESS, "classification", batch=engine.batch)
        return Splice(graph, placement, engine, yardstick)

    return splice


def assert_consistent(found, model):
    """Parts cover the graph, and their shares add up to all."""
    cuts = single_cuts(model)
    ends = {str(model.graph.outputs[0].name), *cuts}
    assert {part.end for part in found.parts} <= ends
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    assert [p.share for p in found.parts] == sorted((p.share for p in found.parts), reverse=True)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(block=st.integers(0, BLOCKS - 1), channel=st.integers(0, HIDDEN - 1))
def test_an_outlier_channel_is_found_at_the_input_that_it_spoils(splice, target, block, channel):
    layer = f"blocks.{block}.fc2"
    model = with_outlier(mlps(), layer, 300, channel)
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert (found.culprit.kind, found.culprit.layers) == ("input", (layer,))
    assert found.parts[0].share > 0.5
    assert found.culprit.share > HALF
    assert cut.runs <= RUNS
    assert list(found.culprit.facts.outliers) == [channel]
    assert found.culprit.facts.high == pytest.approx(300, abs=10)
    assert found.culprit.facts.median_channel < 10


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("target", TARGETS)
def test_an_error_that_enters_everywhere_is_said_to(splice, target):
    model = mlps()
    cut = splice(model, plain(model, target), target)
    found = bisect(cut)
    assert_consistent(found, model)
    assert found.culprit is None
    assert found.parts[0].share < STANDS_OUT
    assert find_mend(found, cut) is None


@pytest.mark.parametrize("target", TARGETS)
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
    mend = find_mend(found, cut)
    assert (mend.kind, mend.enough) == ("compile", True)
    assert mend.after < 1e-9 < mend.before


@pytest.mark.parametrize("quantized", [True, False], ids=["int8", "fp32"])
@pytest.mark.parametrize("target", TARGETS)
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
    mend = find_mend(found, cut)
    assert mend.enough
    assert math.isfinite(mend.after)


@pytest.mark.parametrize("target", TARGETS)
def test_the_float_graph_itself_has_no_error(splice, target):
    model = mlps()
    cut = splice(model, copy(model), target)
    found = bisect(cut)
    assert (found.same, found.parts, found.culprit, cut.runs) == (True, (), None, 1)
    assert find_mend(found, cut) is None


@pytest.mark.parametrize("target", TARGETS)
def test_folded_graphs_are_cut_where_both_are_the_same(splice, target):
    """Hidden channels that were dealt to copies have other sizes; the layers around them are named together."""
    model = with_outlier(mlps(), "blocks.2.fc2", 40)
    placement = copy(model)
    statistics = observe(model, [PIXELS], PREPROCESS)
    prepared = prepare(placement, statistics, choose(placement, target).int8)
    place(placement, prepared.ranges, target, (), prepared.weights)
    spoil(placement, "blocks.2.fc1.weight.int8", np.zeros_like)
    found = bisect(splice(model, placement, target))
    assert_consistent(found, model)
    assert found.culprit.kind == "weight"
    assert "blocks.2.fc1" in found.culprit.layers


@pytest.mark.parametrize("target", TARGETS)
def test_quantizing_again_mends_what_folds_can_and_float_what_they_cannot(splice, target):
    model = with_outlier(mlps(), "blocks.2.fc2", 300)
    cut = splice(model, plain(model, target), target)
    before = cut.runs
    found = bisect(cut)
    mend = find_mend(found, cut)
    assert mend.enough
    assert mend.kind == "quantize"
    assert mend.ignore in ((), ("blocks.2.fc2",))
    assert mend.after < 0.5 * mend.before == 0.5 * found.distance
    assert cut.runs - before <= RUNS + 2


def test_answers_of_the_float_graph_that_are_not_finite_are_refused(splice):
    model = mlps()
    broken = copy(model)
    spoil(broken, "blocks.5.fc2.bias", lambda bias: bias * np.nan)
    with pytest.raises(DataError, match="the float graph's own answers are not finite"):
        splice(broken, model, "onnxruntime-cpu")
