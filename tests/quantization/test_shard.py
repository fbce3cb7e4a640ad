"""Shards of the calibration images: in any order and grouping they merge to the bytes of all images in one row."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.quantization.test_observers import BRIGHT, DARK, PREPROCESS, TINY_IMAGE, root_model
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.errors import DataError
from vitdeploy.graph.io.files import load_graph
from vitdeploy.quantization.observer import BOUNDS, Bounds
from vitdeploy.quantization.observers import Observation, Shard, in_order, observe_shard
from vitdeploy.quantization.prepare import ImageChecks
from vitdeploy.quantization.probe import Probe

# Of 72 images the moments are of every second row of 64.
IMAGES, HEAD = 72, 64
FINITE = st.floats(-9, 9, width=32)  # with 0 and -0


def same(found, expected):
    """Whether two folders of arrays have the same bytes."""
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert (array.dtype, array.shape) == (found[name].dtype, found[name].shape), name
        assert array.tobytes() == found[name].tobytes(), name


@st.composite
def groupings(draw, count):
    """Some numbers in groups of any size, in any order."""
    order = draw(st.permutations(range(count)))
    ends = sorted(draw(st.sets(st.integers(1, count - 1), max_size=5)))
    return [order[start:end] for start, end in zip([0, *ends], [*ends, count], strict=True)]


# --- bounds, and checks of images -------------------------------------------------------------------------------------


@given(arrays.arrays(np.float32, (7, 3, 2), elements=FINITE), groupings(7))
@settings(max_examples=100, deadline=None)
def test_bounds_merge_to_the_same_bytes_in_any_order_and_grouping(values, groups):
    each = [Bounds.of(values[i : i + 1], i) for i in range(7)]
    expected = functools.reduce(Bounds.merged, each)
    merged = [functools.reduce(Bounds.merged, (each[i] for i in group)) for group in groups]
    found = functools.reduce(Bounds.merged, merged)
    same({name: getattr(found, name) for name in BOUNDS}, {name: getattr(expected, name) for name in BOUNDS})
    np.testing.assert_array_equal(found.low, values.min(axis=(0, 2)))
    np.testing.assert_array_equal(found.high, values.max(axis=(0, 2)))
    for side, reaches in enumerate((-values.min(axis=(1, 2)), values.max(axis=(1, 2)))):
        assert found.reach[side].tolist() == sorted(reaches.tolist())[:-3:-1]
        furthest = np.flatnonzero(reaches == reaches.max())
        assert found.holder[side] == (furthest[0] if len(furthest) == 1 else -1)


def test_what_is_not_finite_stays_so_in_any_order():
    good, bad = Bounds.of(np.ones((1, 2, 1), np.float32), 0), Bounds.of(np.full((1, 2, 1), np.nan, np.float32), 1)
    assert good.finite
    assert not good.merged(bad).finite and not bad.merged(good).finite


@given(arrays.arrays(np.uint8, (6, 2, 2, 3), elements=st.sampled_from([0, 7, 255])), groupings(6))
@settings(max_examples=50, deadline=None)
def test_checks_merge_to_the_same_bytes_in_any_order_and_grouping(images, groups):
    def checked(pixels):
        checks = ImageChecks(PREPROCESS_OF_COLOURS)
        checks.update(pixels)
        return checks

    found = ImageChecks(PREPROCESS_OF_COLOURS)
    for group in groups:
        found.join(checked(images[group]), np.array(group))
    same(found.state(), checked(images).state())


PREPROCESS_OF_COLOURS = TINY_IMAGE.__class__(2, (2, 2), "bicubic", (0.5,) * 3, (0.5,) * 3)


# --- a graph ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(small_export):
    return load_graph(small_export / "model.onnx")


@pytest.fixture(scope="module")
def images(digits):
    samples = split(digits, "folders", calibration=IMAGES, evaluation=1, seed=0).calibration
    return list(batches(samples, PREPROCESS, 1))


def shown(model, images, **options):
    with Observation(model, PREPROCESS, IMAGES, **options) as observation:
        for pixels in images:
            observation.update(pixels)
        return observation


@pytest.fixture(scope="module")
def whole(model, images):
    return shown(model, images).state()


@pytest.fixture(scope="module")
def head(model, images):
    return shown(model, images[:HEAD])


@pytest.fixture(scope="module")
def probe(model):
    with Probe(model, PREPROCESS) as probe:
        yield probe


def shard_of(probe, head, images, places):
    until = head.keeps_until(IMAGES)
    kept = [[name for name, end in until.items() if place < end] for place in places]
    pixels = [functools.partial(images.__getitem__, place) for place in places]
    return observe_shard(probe, pixels, [str(place) for place in places], kept)


@given(groupings(IMAGES))
@settings(max_examples=15, deadline=None)
def test_shards_in_any_order_and_grouping_leave_what_showing_all_images_in_order_leaves(
    model, images, whole, head, probe, groups
):
    with Observation(model, PREPROCESS, IMAGES) as observation:
        observation.restore({name: array.copy() for name, array in head.state().items()})
    shards = [(shard_of(probe, head, images, group), np.array(group)) for group in groups]
    observation.join(shards, 1)
    same(observation.state(), whole)


def test_only_tensors_of_few_rows_are_kept_and_only_until_they_have_enough(head):
    """The last linear reads one row an image, those before it 17, and 4,096 are expected; pixels are more than that."""
    rows = {name: observer.rows for name, observer in head.observers.items()}
    assert sorted(set(rows.values())) == [HEAD, 17 * HEAD, 512 * HEAD]
    until = head.keeps_until(10**6)
    assert {until[name] for name in rows if rows[name] == HEAD} == {4096}
    assert {until[name] for name in rows if rows[name] == 17 * HEAD} == {241}  # 240 images have 4,080 rows
    assert set(until) == {name for name, found in rows.items() if found < 4096}
    assert set(head.keeps_until(IMAGES).values()) == {IMAGES}


def test_images_are_shown_first_until_tensors_of_many_rows_have_enough(head):
    assert head.images_for(17) == 241 and head.images_for(18) == 0


def test_several_runs_at_a_time_give_the_same_shard(model, images, head, probe):
    with Probe(model, PREPROCESS, threads=1, at_once=3) as three, Probe(model, PREPROCESS, threads=1) as one:
        found, expected = (shard_of(each, head, images, range(9)).to_arrays() for each in (three, one))
    same(found, expected)


def test_a_shard_is_read_back_as_it_was_written(images, head, probe):
    shard = shard_of(probe, head, images, range(9))
    assert shard.kept
    again = Shard.from_arrays(shard.to_arrays(), PREPROCESS)
    same(again.to_arrays(), shard.to_arrays())


def test_an_image_that_makes_a_tensor_not_finite_is_named():
    pixels = [lambda: BRIGHT, lambda: DARK, lambda: BRIGHT]
    names, expected = ["a.png", "dark.png", "b.png"], "not finite on the calibration images"
    with (
        Probe(root_model(), TINY_IMAGE, threads=1, at_once=2) as probe,
        pytest.raises(DataError, match=expected) as caught,
    ):
        observe_shard(probe, pixels, names, [(), (), ()])
    assert caught.value.found == "NaN from the node root/Sqrt (Sqrt), on dark.png"


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_results_are_in_order_and_no_more_are_begun_than_asked_for(at_once):
    begun = []

    def square(number):
        begun.append(number)
        return number**2

    found = in_order(square, range(7), at_once)
    assert next(found) == 0
    assert len(begun) <= 2 * at_once
    assert list(found) == [1, 4, 9, 16, 25, 36]
