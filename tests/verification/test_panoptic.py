"""Panoptic quality against torchmetrics, and against values worked out by hand where there is VOID or a crowd."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.references import reference
from vitdeploy.data.masks import PanopticMap
from vitdeploy.errors import DataError
from vitdeploy.tasks.panoptic import Quality, compare_panoptic, quality, segments_of, tally

CLASSES, THINGS = 5, (0, 1, 2)


def drawn(rows, classes, crowd=()):
    return PanopticMap(np.array(rows, np.int32), classes, frozenset(crowd))


def counts(found, truth, *, forgive=True, classes=CLASSES):
    return tally(*(segments_of(each, classes) for each in (found, truth)), classes, forgive=forgive).counts


def compare(artifact, reference, truth=None):
    return compare_panoptic(artifact, reference, truth, classes=CLASSES, things=THINGS, max_difference=0.0)


def blocks(generator, height=24, width=32, step=4):
    """A map of 4x4 blocks in random segments of random classes, with some VOID; stuff classes are one segment each."""
    grid = generator.integers(0, 9, (height // step, width // step))
    classes = {i: int(generator.integers(0, len(THINGS))) for i in range(1, 6)} | {6: 3, 7: 4, 8: 3}
    grid[grid == 8] = 6
    return PanopticMap(grid.repeat(step, 0).repeat(step, 1).astype(np.int32), classes)


def changed(cut, generator, rate=0.06):
    """The same map with single pixels of other segments, and a segment or two of another class."""
    ids = np.where(
        generator.random(cut.ids.shape) < rate, generator.permutation(cut.ids.ravel()).reshape(cut.ids.shape), cut.ids
    )
    other = {
        i: (c + 1) % len(THINGS) if c in THINGS and generator.random() < 0.2 else c for i, c in cut.classes.items()
    }
    return PanopticMap(ids, other)


# --- against torchmetrics ---------------------------------------------------------------------------------------------


def torchmetrics_pq(found, truth):
    """float32 [classes, 3]: PQ, SQ, RQ of each class, of which all must occur."""
    import torch

    metric = reference("torchmetrics.detection").PanopticQuality(
        things=set(THINGS), stuffs=set(range(CLASSES)) - set(THINGS), allow_unknown_preds_category=True,
        return_per_class=True, return_sq_and_rq=True,
    )  # fmt: skip

    def colours(cut):
        kinds = np.vectorize(lambda i: cut.classes.get(i, CLASSES + 3))(cut.ids)
        return torch.from_numpy(np.stack([kinds, np.where(kinds < len(THINGS), cut.ids, 0)], axis=-1).astype(np.int64))

    for a, b in zip(found, truth, strict=True):
        metric.update(colours(a)[None], colours(b)[None])
    return metric.compute().numpy().reshape(CLASSES, 3)


@pytest.mark.parametrize("seed", range(8))
def test_qualities_are_those_of_torchmetrics(seed):
    """With VOID in the truth only: torchmetrics forgives it in what was found too, COCO does not."""
    generator = np.random.default_rng(seed)
    truth = [blocks(generator) for _ in range(3)]
    found = [changed(t, generator) for t in truth]
    found = [PanopticMap(np.where(f.ids == 0, 1, f.ids).astype(np.int32), f.classes) for f in found]
    theirs = torchmetrics_pq(found, truth)
    total = np.stack([counts(a, b) for a, b in zip(found, truth, strict=True)])
    for c in range(CLASSES):
        ours = quality(total, np.arange(CLASSES) == c)
        np.testing.assert_allclose([ours.pq, ours.sq, ours.rq], 100 * theirs[c], rtol=1e-6)
    result = compare(found, truth, truth)
    assert result.value == pytest.approx(100 * theirs[:, 0].mean())
    assert result.things == Quality(*(pytest.approx(100 * v) for v in theirs[:3].mean(axis=0)))
    assert result.stuff == Quality(*(pytest.approx(100 * v) for v in theirs[3:].mean(axis=0)))
    assert 10 < result.value < 95


# --- by hand ----------------------------------------------------------------------------------------------------------

TRUTH = drawn([[1, 1, 1, 1], [2, 2, 3, 3]], {1: 3, 2: 0, 3: 0})


def test_a_matched_a_missed_and_a_wrong_segment():
    # Segment 1: IoU 4/5. Segment 2: found by 8 with IoU 1/2, which is not above 1/2. Segment 3: found with IoU 1.
    found = drawn([[7, 7, 7, 7], [7, 8, 9, 9]], {7: 3, 8: 0, 9: 0})
    expected = np.zeros((CLASSES, 4))
    expected[3] = 4 / 5, 1, 0, 0
    expected[0] = 1, 1, 1, 1
    np.testing.assert_allclose(counts(found, TRUTH), expected)
    assert quality(expected[None], np.arange(CLASSES) == 0) == Quality(50.0, 100.0, 50.0)
    result = compare([found], [TRUTH], [TRUTH])
    assert (result.value, result.reference_value) == (pytest.approx(65.0), 100.0)
    assert result.pixel_agreement == 100 * 7 / 8


def test_a_segment_of_the_wrong_class_is_missed_and_wrong():
    found = drawn(TRUTH.ids, {1: 3, 2: 1, 3: 0})
    expected = np.zeros((CLASSES, 4))
    expected[3], expected[0], expected[1] = (1, 1, 0, 0), (1, 1, 0, 1), (0, 0, 1, 0)
    np.testing.assert_array_equal(counts(found, TRUTH), expected)


def test_pixels_of_void_count_for_no_union():
    truth = drawn([[0, 0, 1, 1, 1]], {1: 0})
    found = drawn([[4, 4, 4, 4, 0]], {4: 0})
    # Without the two pixels on VOID: 2 common, 3 together. With them: 2 of 5, no match.
    np.testing.assert_allclose(counts(found, truth)[0], [2 / 3, 1, 0, 0])
    np.testing.assert_allclose(counts(found, truth, forgive=False)[0], [0, 0, 1, 1])


@pytest.mark.parametrize(("row", "wrong"), [([5, 5, 5, 0, 0], 0), ([0, 5, 5, 5, 0], 0), ([0, 0, 5, 5, 5], 1)])
def test_a_segment_mostly_on_void_is_not_wrong(row, wrong):
    truth = drawn([[0, 0, 0, 1, 1]], {1: 1})
    assert counts(drawn([row], {5: 0}), truth)[0].tolist() == [0, 0, wrong, 0]


def test_a_segment_of_which_one_half_is_on_void_is_wrong():
    truth = drawn([[0, 0, 1, 1]], {1: 1})
    assert counts(drawn([[0, 5, 5, 0]], {5: 0}), truth)[0].tolist() == [0, 0, 1, 0]


def test_crowds_are_not_to_be_found_and_excuse_segments_of_their_class_only():
    truth = drawn([[1, 1, 1, 1, 2, 2]], {1: 0, 2: 1}, crowd=[1])
    found = drawn([[3, 3, 4, 4, 5, 5]], {3: 0, 4: 1, 5: 1})
    result = counts(found, truth)
    assert result[0].tolist() == [0, 0, 0, 0]
    assert result[1].tolist() == [1, 1, 1, 0]
    assert counts(found, drawn(truth.ids, truth.classes))[0].tolist() == [0, 0, 1, 1]


def test_void_and_crowd_add_up_to_an_excuse():
    truth = drawn([[0, 0, 1, 1, 2, 2, 2]], {1: 0, 2: 1}, crowd=[1])
    found = drawn([[0, 3, 3, 3, 3, 3, 0]], {3: 0})
    assert counts(found, truth)[0].tolist() == [0, 0, 0, 0]


def test_a_perfect_match_of_a_crowd_is_no_match():
    truth = drawn([[1, 1]], {1: 0}, crowd=[1])
    assert not counts(truth, truth).any()


# --- comparisons ------------------------------------------------------------------------------------------------------


def test_equal_maps_agree_in_full():
    maps = [blocks(np.random.default_rng(i)) for i in range(4)]
    result = compare(maps, maps, maps)
    assert (result.agreement, result.pixel_agreement, result.drop, result.value) == (100.0, 100.0, 0.0, 100.0)
    assert (result.n, result.metric, result.segments) == (4, "PQ", sum(len(np.unique(m.ids)) - 1 for m in maps))
    assert result.agreement_ci95[0] < 95
    assert result.drop_ci95[0] < 0 < result.drop_ci95[1]


def test_names_of_segments_do_not_matter():
    cut = blocks(np.random.default_rng(0))
    other = PanopticMap(np.where(cut.ids > 0, 70_000 - cut.ids, 0), {70_000 - i: c for i, c in cut.classes.items()})
    assert compare([other], [cut]).agreement == 100.0


def test_what_the_original_leaves_void_is_no_excuse_for_the_artifact():
    nothing, something = drawn([[0, 0]], {}), drawn([[1, 1]], {1: 0})
    assert compare([something], [nothing]).agreement == 0.0
    assert compare([nothing], [nothing]).agreement == 100.0
    assert compare([nothing], [nothing]).agreement_ci95 == (0.0, 100.0)


def test_without_labels_there_is_agreement_but_no_quality():
    cut = blocks(np.random.default_rng(0))
    result = compare([cut], [cut])
    assert (result.metric, result.value, result.drop, result.drop_ci95, result.all, result.stuff) == (None,) * 6


def test_things_without_a_segment_have_no_quality():
    cut = drawn([[1, 1]], {1: 3})
    result = compare([cut], [cut], [cut])
    assert (result.things, result.stuff) == (None, Quality(100.0, 100.0, 100.0))


def test_images_in_another_order_have_the_same_numbers():
    generator = np.random.default_rng(5)
    truth = [blocks(generator) for _ in range(5)]
    ours, theirs = ([changed(t, generator, rate) for t in truth] for rate in (0.2, 0.02))
    one, other = compare(ours, theirs, truth), compare(ours[::-1], theirs[::-1], truth[::-1])
    for name in ("value", "reference_value", "drop", "agreement", "pixel_agreement"):
        assert getattr(one, name) == pytest.approx(getattr(other, name))
    assert one.drop > 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), rate=st.floats(0, 0.5))
def test_agreement_is_symmetric_and_intervals_hold_their_estimates(seed, rate):
    generator = np.random.default_rng(seed)
    truth = [blocks(generator) for _ in range(3)]
    found = [changed(t, generator, rate) for t in truth]
    result, back = compare(found, truth, truth), compare(truth, found)
    assert result.agreement == pytest.approx(back.agreement)
    for each in (result.value, result.all.sq, result.all.rq, result.agreement, result.pixel_agreement):
        assert 0 <= each <= 100 + 1e-9
    assert result.all.pq <= min(result.all.sq, result.all.rq) + 1e-9
    assert result.drop_ci95[0] <= result.drop <= result.drop_ci95[1]
    assert result.agreement_ci95[0] <= result.agreement <= result.agreement_ci95[1] + 1e-9


def test_maps_are_read_one_at_a_time():
    cut, held = blocks(np.random.default_rng(0)), []

    def stream(name):
        for i in range(4):
            held.append((i, name))
            yield cut

    compare(stream("a"), stream("b"), stream("t"))
    assert held == [(i, name) for i in range(4) for name in "abt"]


def test_labels_without_a_segment_are_refused():
    cut = drawn([[1, 1]], {1: 0}, crowd=[1])
    with pytest.raises(DataError, match="so PQ is undefined"):
        compare([cut], [cut], [cut])


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        ([], [], "no image"),
        ([TRUTH], [TRUTH, TRUTH], "zip"),
        ([drawn([[1]], {1: 0})], [TRUTH], "1 pixels, labels with 8"),
        ([drawn([[1]], {})], [drawn([[1]], {1: 0})], "have classes"),
        ([drawn([[1]], {1: 5})], [drawn([[1]], {1: 0})], "have classes"),
    ],
)
def test_maps_that_cannot_be_compared_are_refused(ours, theirs, message):
    with pytest.raises(ValueError, match=message):
        compare(ours, theirs)
