"""Shape arithmetic is computed with a free batch, and leaves constants; nodes that change nothing go."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnxscript.optimizer import FOLDED_FROM_KEY

from tests.graph.builder import Builder, census, checked, difference, run, values
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.shapes import sizes
from vitdeploy.graph.shapes.sizes import UNKNOWN, FreeSize

INT64 = TensorProto.INT64


def normalised(proto):
    model = ir.from_proto(proto)
    normalise(model)
    return checked(model)


def constants(proto):
    return {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in proto.graph.initializer}


def same_function(before, after, *shapes, tolerance=1e-6):
    for seed, shape in enumerate(shapes):
        x = values(*shape, seed=seed)
        assert difference(run(after, x=x), run(before, x=x)) <= tolerance


# --- sizes ------------------------------------------------------------------------------------------------------------

extents = st.one_of(
    st.integers(-6, 12),
    st.builds(
        lambda f, n: FreeSize(f, tuple(sorted(n))),
        st.integers(1, 6),
        st.lists(st.sampled_from("bn"), min_size=1, max_size=2),
    ),
)


def value_of(size, names):
    return size if isinstance(size, int) else size.factor * int(np.prod([names[name] for name in size.names]))


OPERATIONS = {
    "plus": (sizes.plus, lambda a, b: a + b),
    "minus": (sizes.minus, lambda a, b: a - b),
    "times": (sizes.times, lambda a, b: a * b),
    "divided": (sizes.divided, lambda a, b: int(np.trunc(a / b)) if b else None),
    "modulo": (sizes.modulo, lambda a, b: a % b if b else None),
    "equal": (sizes.equal, lambda a, b: int(a == b)),
}


@given(st.sampled_from(sorted(OPERATIONS)), extents, extents, st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_what_is_known_of_a_size_is_right_for_every_value_of_its_names(operation, a, b, batch, windows):
    symbolic, plain = OPERATIONS[operation]
    result, names = symbolic(a, b), {"b": batch, "n": windows}
    if result is not UNKNOWN:
        assert value_of(result, names) == plain(value_of(a, names), value_of(b, names))


def test_windows_of_a_batch_can_be_split_off_again():
    windows = sizes.times(FreeSize(1, ("batch",)), 4)
    assert (str(windows), sizes.divided(windows, 4), sizes.modulo(windows, 2)) == (
        "4*batch",
        FreeSize(1, ("batch",)),
        0,
    )
    assert sizes.divided(windows, 3) is UNKNOWN


# --- reshapes ---------------------------------------------------------------------------------------------------------


def reshaped(target, opset=17, nodes=True):
    """x [batch, 6, 8] reshaped by `target`: numbers, or "batch" and "batch*6" computed from its shape."""
    b = Builder(opset, nodes)
    x = b.input("x", ["batch", 6, 8])
    batch = b.add("Gather", b.add("Shape", x), np.int64(0))
    parts = []
    for size in target:
        if isinstance(size, int):
            parts.append(b.constant(np.array([size], np.int64)))
        else:
            entry = batch if size == "batch" else b.add("Mul", batch, np.int64(6))
            parts.append(b.add("Unsqueeze", entry, np.array([0], np.int64)))
    return b.model(b.add("Reshape", x, b.add("Concat", *parts, axis=0)), rank=len(target))


@pytest.mark.parametrize(
    ("target", "constant"),
    [
        (["batch", 6, 2, 4], [-1, 6, 2, 4]),
        (["batch", -1, 4], [-1, 12, 4]),
        (["batch*6", 8], [-1, 8]),
        ([-1, 48], [-1, 48]),
        (["batch", 0, 2, -1], [-1, 6, 2, 4]),
    ],
)
def test_a_reshape_takes_a_constant_with_one_free_size(target, constant):
    before = reshaped(target)
    after = normalised(before)
    assert census(after) == {"Reshape": 1}
    assert list(constants(after).values()) == [constant]
    same_function(before, after, (1, 6, 8), (3, 6, 8))


def test_a_reshape_to_the_shape_that_is_there_goes():
    b = Builder(17)
    x = b.add("Relu", b.input("x", ["batch", 6, 8]))
    before = b.model(b.add("Neg", b.add("Reshape", x, np.array([-1, 6, 8], np.int64))))
    assert census(normalised(before)) == {"Relu": 1, "Neg": 1}


def test_two_free_sizes_are_kept_apart():
    b = Builder(17)
    x = b.input("x", ["batch", "tokens", 8])
    shape = b.add("Concat", b.add("Shape", x, start=0, end=2), np.array([2, 4], np.int64), axis=0)
    before = b.model(b.add("Reshape", x, shape))
    after = normalised(before)
    assert list(constants(after).values()) == [[-1, 0, 2, 4]] or census(after) == {
        "Reshape": 1,
        "Shape": 2,
        "Concat": 1,
    }
    same_function(before, after, (2, 5, 8), (3, 1, 8))


def test_two_free_sizes_that_change_places_keep_their_arithmetic():
    b = Builder(17)
    x = b.input("x", ["batch", "tokens", 8])
    shape = b.add("Concat", b.add("Shape", x, start=1, end=2), b.add("Shape", x, start=0, end=1), np.array([8]), axis=0)
    before = b.model(b.add("Reshape", x, shape))
    same_function(before, normalised(before), (2, 5, 8), (3, 4, 8))


def test_free_sizes_of_two_inputs_are_not_taken_for_equal():
    b = Builder(17)
    x, y = b.input("x", ["a", 4]), b.input("y", ["b", 4])
    before = b.model(b.add("Expand", b.add("Relu", x), b.add("Shape", y)))
    after = normalised(before)
    feeds = {"x": values(1, 4), "y": values(3, 4)}
    assert run(after, **feeds)[0].shape == run(before, **feeds)[0].shape == (3, 4)


@pytest.mark.parametrize("operator", ["Add", "Tile"])
def test_an_expand_that_broadcasting_does_not_do_stays(operator):
    b = Builder(17)
    x = b.input("x", ["batch", 4])
    target = b.add("Concat", b.add("Shape", x, start=0, end=1), np.array([4]), axis=0)
    constant = b.add("Expand", values(1, 4), target)
    if operator == "Add":  # the other operand is the same for all samples too
        y = b.add("Add", constant, b.add("ReduceMean", x, axes=[0]))
    else:  # the batch itself is repeated
        y = b.add("Tile", constant, np.array([2, 1]))
    before = b.model(y)
    after = normalised(before)
    feed = values(3, 4)
    np.testing.assert_array_equal(run(after, x=feed)[0], run(before, x=feed)[0])


def class_token(opset, how):
    """A token in front of x [batch, 4, 8], repeated for the batch as exporters do it."""
    b = Builder(opset, constants_as_nodes=True)
    x = b.input("x", ["batch", 4, 8])
    batch = b.add("Unsqueeze", b.add("Gather", b.add("Shape", x), np.int64(0)), np.array([0], np.int64))
    if how == "tile":
        repeats = b.add("Concat", batch, np.array([1, 1], np.int64), axis=0)
        token = b.add("Tile", values(1, 1, 8), repeats)
    elif how == "constant of shape":
        shape = b.add("Concat", batch, np.array([1, 8], np.int64), axis=0)
        from onnx import helper

        token = b.add("ConstantOfShape", shape, value=helper.make_tensor("v", TensorProto.FLOAT, [1], [0.5]))
    else:
        shape = b.add("Concat", batch, np.array([-1, -1], np.int64), axis=0)
        ones = b.add("ConstantOfShape", b.add("Shape", shape), value=numpy_helper.from_array(np.ones(1, np.int64)))
        unset = b.add("Equal", shape, b.add("Mul", ones, np.int64(-1)))
        token = b.add("Expand", values(1, 1, 8), b.add("Where", unset, ones, shape))
    return b.model(b.add("Concat", token, x, axis=1))


@pytest.mark.parametrize("how", ["expand", "tile", "constant of shape"])
def test_a_class_token_takes_the_batch_from_the_input(how):
    before = class_token(14, how)
    after = normalised(before)
    assert census(after) == {"Shape": 1, "Concat": 2, "Expand": 1}
    shape = next(node for node in after.graph.node if node.op_type == "Shape")
    assert shape.input == ["x"]
    same_function(before, after, (1, 4, 8), (3, 4, 8))


def test_two_tokens_share_one_chain():
    b = Builder(17)
    x = b.input("x", ["batch", 4, 8])
    parts = []
    for seed in range(2):
        batch = b.add("Shape", b.add("Relu", x), start=0, end=1)
        shape = b.add("Concat", batch, np.array([1, 8], np.int64), axis=0)
        parts.append(b.add("Expand", values(1, 1, 8, seed=seed), shape))
    after = normalised(b.model(b.add("Concat", *parts, x, axis=1)))
    assert census(after) == {"Shape": 1, "Concat": 2, "Expand": 2}


def test_windows_are_cut_and_merged_without_arithmetic():
    """Swin: [batch, 8, 8, 4] to [4*batch, 16, 4] and back, the batch recovered by a division."""
    b = Builder(14)
    x = b.input("x", ["batch", 8, 8, 4])
    zero = np.array([0], np.int64)
    batch = b.add("Unsqueeze", b.add("Gather", b.add("Shape", x), np.int64(0)), zero)
    cut = b.add("Reshape", x, b.add("Concat", batch, np.array([2, 4, 2, 4, 4], np.int64), axis=0))
    windows = b.add("Reshape", b.add("Transpose", cut, perm=[0, 1, 3, 2, 4, 5]), np.array([-1, 16, 4], np.int64))
    count = b.add("Gather", b.add("Shape", windows), np.int64(0))
    images = b.add("Unsqueeze", b.add("Div", count, np.int64(4)), zero)
    back = b.add(
        "Reshape", b.add("Neg", windows), b.add("Concat", images, np.array([2, 2, 4, 4, -1], np.int64), axis=0)
    )
    before = b.model(back, rank=6)
    after = normalised(before)
    assert census(after) == {"Reshape": 3, "Transpose": 1, "Neg": 1}
    same_function(before, after, (1, 8, 8, 4), (3, 8, 8, 4))


# --- what goes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operator",
    ["Identity", "Dropout", "Cast", "Transpose", "Slice", "Pad", "Concat", "Add", "Mul", "Sub", "Div", "Expand"],
)
def test_a_node_that_changes_nothing_goes(operator):
    b = Builder(17)
    x = b.add("Relu", b.input("x", ["batch", 6, 8]))
    ints = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    arguments = {
        "Slice": [ints(0, 0), ints(6, 2**62), ints(1, 2), ints(1, 1)],
        "Pad": [ints(0, 0, 0, 0, 0, 0)],
        "Add": [np.zeros((6, 1), np.float32)],
        "Sub": [0.0],
        "Mul": [np.ones((1, 1, 8), np.float32)],
        "Div": [1.0],
        "Expand": [ints(1, 6, 1)],
    }.get(operator, [])
    attributes = {"Cast": {"to": 1}, "Transpose": {"perm": [0, 1, 2]}, "Concat": {"axis": 1}}.get(operator, {})
    before = b.model(b.add("Neg", b.add(operator, x, *arguments, **attributes)))
    after = normalised(before)
    assert census(after) == {"Relu": 1, "Neg": 1}
    same_function(before, after, (3, 6, 8))


@pytest.mark.parametrize("case", ["backwards", "broadcast", "added one", "one over x", "negative", "transposed square"])
def test_a_node_that_changes_something_stays(case):
    b = Builder(17)
    x = b.add("Relu", b.input("x", ["batch", 6, 6]))
    ints = lambda *numbers: np.array(numbers, np.int64)  # noqa: E731
    y = {
        "backwards": lambda: b.add("Slice", x, ints(-1), ints(-(2**62)), ints(1), ints(-1)),
        "broadcast": lambda: b.add("Add", x, np.zeros((2, 1, 1, 1), np.float32)),
        "added one": lambda: b.add("Add", x, np.ones((6, 1), np.float32)),
        "one over x": lambda: b.add("Div", 1.0, b.add("Add", x, 1.0)),
        "negative": lambda: b.add("Sub", 0.0, x),
        "transposed square": lambda: b.add("Transpose", x, perm=[0, 2, 1]),
    }[case]()
    before = b.model(b.add("Neg", y))
    after = normalised(before)
    assert census(after) == census(before)
    same_function(before, after, (3, 6, 6))


def test_outputs_keep_their_names_when_the_node_before_them_goes():
    b = Builder(17)
    x = b.input("x", ["batch", 4])
    before = b.model(b.add("Identity", b.add("Relu", x)), b.add("Identity", x))
    after = normalised(before)
    assert [value.name for value in after.graph.output] == [value.name for value in before.graph.output]
    assert census(after) == {"Relu": 1, "Identity": 1}  # an input cannot be an output under another name
    same_function(before, after, (2, 4))


def test_a_mask_that_is_the_same_for_the_whole_batch_becomes_a_constant():
    b = Builder(17)
    x = b.input("x", ["batch", 1, 4, 4])
    shape = b.add("Concat", b.add("Shape", x, start=0, end=1), np.array([1, 4, 4], np.int64), axis=0)
    keep = b.add("Expand", np.ones((1, 1, 4, 1), bool), shape)
    before = b.model(b.add("Softmax", b.add("Add", x, b.add("Where", keep, 0.0, -1e38)), axis=-1))
    after = normalised(before)
    assert census(after) == {"Softmax": 1}
    same_function(before, after, (3, 1, 4, 4))


def test_large_results_are_not_computed():
    """A constant that would fill the memory stays a node."""
    b = Builder(17)
    x = b.input("x", [1, 4])
    large = b.add("Expand", np.ones((1, 1), np.float32), np.array([1 << 20, 1 << 20], np.int64))
    huge = b.add("Tile", np.ones((1, 1), np.float32), np.array([1 << 20, 1 << 20], np.int64))
    counted = b.add("Range", np.int64(0), np.int64(1 << 50), np.int64(1))
    before = b.model(
        *(b.add("Gather", y, np.int64(0)) for y in (large, huge)),
        *(b.add("Gather", counted, np.array([1], np.int64)), b.add("Relu", x)),
        types=[TensorProto.FLOAT, TensorProto.FLOAT, INT64, TensorProto.FLOAT],
        rank=1,
    )  # fmt: skip
    after = normalised(before)
    assert census(after)["Range"] == 1
    assert sum(len(tensor.raw_data) for tensor in after.graph.initializer) < 1000


def test_a_graph_in_canonical_form_is_not_changed_any_more():
    model = ir.from_proto(class_token(14, "expand"))
    normalise(model)
    first = ir.to_proto(model).SerializeToString()
    assert set(normalise(model).values()) == {0}
    assert ir.to_proto(model).SerializeToString() == first


CHAINS = {
    "Add": lambda b, y: b.add("Add", y, np.float32(1)),
    "Mul and Sub": lambda b, y: b.add("Sub", b.add("Mul", y, np.float32(1)), np.float32(-1)),
    "Transpose": lambda b, y: b.add("Add", b.add("Transpose", y, perm=[0]), np.float32(1)),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_constant_of_a_chain_does_not_list_all_of_it(chain):
    """Each would else hold the names of all before it: the square of the chain's length."""
    b = Builder(20)
    y = b.constant(np.zeros(3, np.float32))
    for _ in range(40):
        y = CHAINS[chain](b, y)
    model = ir.from_proto(b.model(b.add("Add", b.input("x", ["batch", 3]), y)))
    normalise(model)
    [folded] = model.graph.initializers.values()
    assert folded.const_value.numpy().tolist() == [40.0] * 3
    assert len(folded.meta.get(FOLDED_FROM_KEY, ())) <= 2
