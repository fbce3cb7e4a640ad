"""Calibration: the ranges are those of numpy over all values, whatever the order of the batches."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import load_graph
from vitdeploy.quantization.observer import Observer, covariance_pays, spread_of
from vitdeploy.quantization.observers import Observation, observe
from vitdeploy.quantization.probe import estimate, find_nonfinite
from vitdeploy.quantization.ranges import FIELDS, load_statistics, save_statistics
from vitdeploy.spec import PreprocessSpec

PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def model(small_export):
    return load_graph(small_export / "model.onnx")


@pytest.fixture(scope="module")
def images(digits):
    """Five batches of four images, and one of two."""
    samples = split(digits, "folders", calibration=22, evaluation=1, seed=0).calibration
    return list(batches(samples, PREPROCESS, 4))


@pytest.fixture(scope="module")
def statistics(model, images):
    return observe(model, images, PREPROCESS)


def test_statistics_are_those_of_numpy_over_all_rows(small_export, images, statistics):
    """The same tensors, fetched from ONNX Runtime without any of our code."""
    names = sorted(statistics)
    proto = onnx.load(str(small_export / "model.onnx"))
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    outputs = [session.run(names, {"image": batch}) for batch in images]
    convolved = next(linear.input.name for linear in find_linears(ir.from_proto(proto)) if linear.kind == "conv")
    for i, name in enumerate(names):
        axis = 1 if name == convolved else -1
        rows = np.concatenate([np.moveaxis(each[i], axis, -1).reshape(-1, each[i].shape[axis]) for each in outputs])
        rows, found = rows.astype(np.float64), statistics[name]
        np.testing.assert_allclose(found.low, rows.min(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.high, rows.max(axis=0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-3, atol=1e-4)
        expected = np.cov(rows, rowvar=False, bias=True)
        np.testing.assert_allclose(found.covariance, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
        assert found.rows == len(rows)
        assert found.upper == pytest.approx(np.quantile(np.abs(rows), 0.999), rel=0.1)


def test_the_input_of_every_layer_is_observed_and_nothing_else(model, statistics):
    assert set(statistics) == {linear.input.name for linear in find_linears(model)}
    assert len(statistics) == 10


def bounds(found):
    return {name: (each.low.tolist(), each.high.tolist()) for name, each in found.items()}


def test_the_order_of_the_batches_does_not_matter_for_bounds(model, images, statistics):
    assert bounds(observe(model, images[::-1], PREPROCESS)) == bounds(statistics)


def test_more_images_only_widen_the_bounds(model, images, statistics):
    few = observe(model, images[:2], PREPROCESS)
    assert all((statistics[n].low <= few[n].low).all() and (statistics[n].high >= few[n].high).all() for n in few)
    assert bounds(few) != bounds(statistics)


def test_statistics_are_read_back_as_they_were_written(statistics, tmp_path):
    save_statistics(statistics, tmp_path / "statistics.npz")
    again = load_statistics(tmp_path / "statistics.npz")
    assert list(again) == list(statistics)
    for name, found in statistics.items():
        for field in FIELDS:
            expected = np.asarray(getattr(found, field))
            expected = expected.astype(np.float32) if field == "covariance" else expected  # half the file
            np.testing.assert_array_equal(getattr(again[name], field), expected)


def test_progress_counts_the_images(model, images):
    counts = []
    observe(model, images, PREPROCESS, counts.append)
    assert counts == [4, 4, 4, 4, 4, 2]


def test_the_graph_is_not_changed(model, images):
    before = ir.to_proto(model)
    observe(model, images[:1], PREPROCESS)
    assert ir.to_proto(model) == before


def test_an_observer_keeps_the_extremes_of_all_batches_and_the_moments_of_some():
    observer = Observer(-1)
    for batch in ([[1.0, 2.0]], [[-3.0, 0.0]], [[2.5, -1.0]]):
        observer.update(np.array(batch, np.float32))
    found = observer.statistics()
    assert (found.low.tolist(), found.high.tolist()) == ([-3.0, -1.0], [2.5, 2.0])
    assert found.rows == 3
    many = np.zeros((5000, 2), np.float32)
    observer.update(many, moments=True)
    observer.update(many + 9, moments=False)
    found = observer.statistics()
    assert (found.high.tolist(), found.rows) == ([9.0, 9.0], 5003)


@pytest.mark.parametrize(("rows", "images", "spread"), [
    (197, 128, 4), (197, 10_000, 4), (197, 127, 3), (197, 63, 1), (197, 8, 1), (197, None, 1), (63, 128, 1),
    (1, 128, 1),
])  # fmt: skip
def test_moments_are_of_a_share_of_the_rows_of_as_many_more_images(rows, images, spread):
    assert spread_of(rows, images) == spread


@pytest.mark.parametrize("axis", [-1, 1])
def test_each_row_has_its_turn_in_the_moments(axis):
    x = np.random.default_rng(0).standard_normal((8, 40, 3)).astype(np.float32)
    observer = Observer(axis, spread=4)
    for number, batch in enumerate(x):
        observer.update(batch if axis == -1 else batch.T[None], number)
    rows = np.concatenate([batch[number % 4 :: 4] for number, batch in enumerate(x)]).astype(np.float64)
    found, again = observer.statistics(), Observer.restore(axis, observer.state())
    np.testing.assert_allclose(found.covariance, np.cov(rows, rowvar=False, bias=True), atol=1e-6)
    np.testing.assert_array_equal(found.high, x.max(axis=(0, 1)))  # bounds are of all rows
    assert (found.rows, again.spread) == (80, 4)


def test_a_mean_far_from_zero_does_not_drown_the_covariance():
    """A channel at 1000 +- 1, as residual streams have: float32 sums of squares would keep nothing of the 1."""
    x = np.random.default_rng(0).standard_normal((40, 50, 3)).astype(np.float32) + np.array([1000, -50, 0], np.float32)
    x[..., 2] += x[..., 0] - 1000
    for covariance in (True, False):
        observer = Observer(-1, covariance=covariance)
        for batch in x:
            observer.update(batch)
        rows = x.reshape(-1, 3).astype(np.float64)
        expected = np.cov(rows, rowvar=False, bias=True) if covariance else rows.var(axis=0)
        np.testing.assert_allclose(observer.statistics().covariance, expected, atol=1e-3)
        np.testing.assert_allclose(observer.statistics().mean, rows.mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize(("rows", "channels", "images", "pays"), [
    (197, 192, None, True),
    (197, 768, 128, True),
    (197, 768, 31, False),
    (197, 3072, 128, False),  # 32 images give 6,304 rows, and 24,576 would be needed
    (1, 192, 128, False),  # a class token alone
    (1, 192, None, True),
    (1, 768, None, False),
])  # fmt: skip
def test_covariances_are_kept_where_there_will_be_rows_enough_to_round_by_them(rows, channels, images, pays):
    assert covariance_pays(rows, channels, images) is pays


def test_what_is_kept_and_held_is_what_the_estimate_says(model, images):
    """The head reads one row an image; its covariance would never be used."""
    with Observation(model, PREPROCESS, total=64) as observation:
        observation.update(images[0])
        found = observation.statistics()
    covariances = [each.covariance for each in found.values() if each.covariance.ndim == 2]
    assert 0 < len(covariances) < len(found)
    assert 2 * sum(each.nbytes for each in covariances) == estimate(model, 4, 64).covariances
    more = estimate(model, 8, 64).activations - estimate(model, 4, 64).activations
    assert estimate(model, 4, 64).activations == more
    assert more > sum(4 * 4 * each.rows // 4 * len(each.low) for each in found.values())


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=1, max_size=40))
@settings(max_examples=30)
def test_the_upper_end_is_near_the_quantile_of_the_values(values):
    x = np.repeat(np.array(values, np.float32)[:, None], 13, axis=1)  # each value is counted once
    observer = Observer(-1)
    observer.update(x)
    expected = np.sort(np.abs(x[:, 0]))[-1]  # of so few, 99.9 % is the largest
    assert observer._upper() == pytest.approx(expected, rel=0.13, abs=1e-37)


def test_a_tensor_is_described_by_its_outlier():
    x = np.random.default_rng(0).standard_normal((5000, 8)).astype(np.float32)
    x[7, 5] = -216
    observer = Observer(-1)
    observer.update(x)
    found = observer.statistics()
    assert (found.low.min(), found.reach.max(), found.reach.argmax()) == (-216, 216, 5)
    assert 3 < np.median(found.reach) < 5
    assert 3 < found.upper < 4
    assert found.high.max() == x.max()


def test_an_observation_goes_on_from_its_state(model, images, statistics):
    with Observation(model, PREPROCESS) as first:
        for pixels in images[:3]:
            first.update(pixels)
    state = first.state()
    with Observation(model, PREPROCESS) as second:
        second.restore(state)
        for pixels in images[3:]:
            second.update(pixels)
    assert (second.images, second.batches) == (22, 6)
    assert second.checks.images == 22
    found = second.statistics()
    assert list(found) == list(statistics)
    for name, each in found.items():
        for field in (*FIELDS, "upper"):
            np.testing.assert_array_equal(getattr(each, field), getattr(statistics[name], field))


BRIGHT, DARK = np.full((1, 2, 2, 1), 255, np.uint8), np.zeros((1, 2, 2, 1), np.uint8)
TINY_IMAGE = PreprocessSpec(2, (2, 2), "bicubic", (0.5,), (0.5,))


def linear_model():
    """image -> linear -> ReLU -> linear: what it gives reaches as far as the image does."""
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"], name="flat/Flatten"),
        helper.make_node("MatMul", ["flat", "weight1"], ["first"], name="first/MatMul"),
        helper.make_node("Relu", ["first"], ["active"], name="active/Relu"),
        helper.make_node("MatMul", ["active", "weight2"], ["logits"], name="head/MatMul"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 2, 2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    weights = [np.eye(4, dtype=np.float32), np.ones((4, 3), np.float32)]
    weights = [numpy_helper.from_array(weight, f"weight{i}") for i, weight in enumerate(weights, 1)]
    graph = helper.make_graph(nodes, "linear", [image], [logits], weights)
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


def standing_out(*images, state=None):
    with Observation(linear_model(), TINY_IMAGE) as observation:
        if state:
            observation.restore(state)
        for image in images:
            observation.update(np.array(image, np.uint8).reshape(1, 2, 2, 1))
    return observation.standing_out(), observation.state()


@pytest.mark.parametrize("interrupted", [0, 3, 6])
def test_an_image_that_alone_makes_the_ranges_wider_stands_out(interrupted):
    grey = [[100, 120, 140, 155 - i] for i in range(8)]
    images = [*grey[:4], [0, 255, 0, 255], *grey[4:]]
    state = standing_out(*images[:interrupted])[1] if interrupted else None
    [(number, times)] = standing_out(*images[interrupted:], state=state)[0].items()
    assert number == 4
    assert times == pytest.approx((255 / (155 - 100) + (255 - 127.5) / (155 - 127.5)) / 2, rel=0.01)


def test_of_two_images_that_reach_as_far_neither_stands_out():
    assert standing_out([100, 120, 140, 155], [0, 255, 0, 255], [255, 0, 255, 0])[0] == {}
    assert standing_out([100, 120, 140, 155], [100, 120, 140, 160])[0] == {}


# --- values that are not finite ---------------------------------------------------------------------------------------


def root_model():
    """image -> sqrt -> linear: dark pixels, negative once normalised, become NaN."""
    nodes = [
        helper.make_node("Sqrt", ["image"], ["root"], name="root/Sqrt"),
        helper.make_node("Flatten", ["root"], ["flat"], name="flat/Flatten"),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"], name="head/MatMul"),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 2, 2])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    weight = numpy_helper.from_array(np.ones((4, 3), np.float32), "weight")
    graph = helper.make_graph(nodes, "root", [image], [logits], [weight])
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


@pytest.mark.parametrize(
    "order",
    [[DARK], [DARK, BRIGHT], [BRIGHT, DARK], [BRIGHT, DARK, BRIGHT]],
    ids=["only", "first", "last", "between"],
)
def test_a_nan_in_any_batch_is_an_error_that_names_the_node_and_the_image(order):
    with pytest.raises(DataError, match="not finite") as caught:
        observe(root_model(), order, TINY_IMAGE)
    number = next(i for i, each in enumerate(order, 1) if each is DARK)
    assert caught.value.found == f"NaN from the node root/Sqrt (Sqrt), on image {number}"


def graph_of(*nodes, **constants):
    """x [2, 3] -> these nodes -> y, which a linear reads."""
    nodes = [helper.make_node(*node, name=f"node{i}") for i, node in enumerate(nodes)]
    weights = {"weight": np.ones((3, 2), np.float32), **constants}
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["y", "weight"], ["logits"], name="head")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 2])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


ONES = np.ones((2, 3), np.float32)
MASK = np.array([0, -np.inf, 0], np.float32)


@pytest.mark.parametrize(("nodes", "constants", "x", "culprit"), [
    ([("Log", ["x"], ["y"])], {}, -ONES, "NaN from the node node0 (Log)"),
    ([("Exp", ["x"], ["a"]), ("Neg", ["a"], ["y"])], {}, 99 * ONES, "infinity from the node node0 (Exp)"),
    ([("Exp", ["x"], ["a"]), ("Sub", ["a", "a"], ["y"])], {}, 99 * ONES, "infinity from the node node0 (Exp)"),
    ([("Mul", ["x", "w"], ["y"])], {"w": ONES[0] * np.nan}, ONES, "NaN in the weights w"),
    # A mask of infinities is meant; that the softmax has nothing left to choose from is not.
    ([("Add", ["x", "mask"], ["a"]), ("Softmax", ["a"], ["b"]), ("Log", ["b"], ["y"])], {"mask": MASK}, ONES,
     "infinity from the node node2 (Log)"),
    ([("Add", ["x", "mask"], ["a"]), ("Softmax", ["a"], ["y"])], {"mask": MASK - np.inf}, ONES,
     "NaN from the node node1 (Softmax)"),
    # What lies beside the way to the tensor is not asked.
    ([("Log", ["x"], ["beside"]), ("Sqrt", ["x"], ["y"])], {}, -ONES, "NaN from the node node1 (Sqrt)"),
])  # fmt: skip
def test_the_node_that_makes_a_value_not_finite_is_found(nodes, constants, x, culprit):
    constants = {name: array.astype(np.float32) for name, array in constants.items()}
    assert find_nonfinite(graph_of(*nodes, **constants), "y", {"x": x}) == culprit


def test_the_node_is_found_behind_any_number_of_others():
    chain = [("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(40)]
    nodes = [("Abs", ["x"], ["t0"]), *chain, ("Neg", ["t40"], ["a"]), ("Sqrt", ["a"], ["b"]), ("Neg", ["b"], ["y"])]
    assert find_nonfinite(graph_of(*nodes), "y", {"x": ONES}) == "NaN from the node node42 (Sqrt)"


def test_a_graph_that_takes_floats_is_fed_normalised_pixels():
    found = observe(root_model(), [BRIGHT], TINY_IMAGE)
    assert bounds(found) == {"flat": ([1.0] * 4, [1.0] * 4)}
