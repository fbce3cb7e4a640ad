"""The numbers of a comparison against values worked out by hand, and against scipy."""

import functools
import itertools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import rel_entr, softmax

from vitdeploy.verification.agreement import Tally, compare, kl_divergence, tally
from vitdeploy.verification.intervals import paired_difference, wilson

# Four images, six classes. Answers of the original: 0, 1, 2, 3; of the artifact: 0, 1, 2, 5.
REFERENCE = np.array(
    [
        [9, 1, 2, 3, 4, 5],
        [1, 9, 2, 3, 4, 5],
        [1, 2, 9, 3, 4, 5],
        [1, 2, 3, 9, 4, 5],
    ],
    np.float32,
)
OURS = REFERENCE.copy()
OURS[3, 5] = 10.0
LABELS = np.array([0, 1, 5, 3])


@pytest.fixture(scope="module")
def found():
    return compare(OURS, REFERENCE, LABELS)


def test_top1_and_top5_are_those_counted_by_hand(found):
    # Right at first: images 0, 1 (and 3 for the original). Label 5 of image 2 is second, so it is among the best five.
    assert (found.n, found.top1, found.reference_top1) == (4, 50.0, 75.0)
    assert (found.top5, found.reference_top5) == (100.0, 100.0)


def test_a_label_outside_the_best_five_is_not_counted():
    # The worst class of images 0, 1, 2, 3 is 1, 0, 0, 0: only the first label of these is among the best five.
    assert compare(OURS, REFERENCE, np.array([2, 0, 0, 0])).top5 == 25.0


def test_agreement_counts_the_answers_of_the_original_not_the_labels(found):
    assert found.agreement == 75.0
    assert found.agreement_ci95 == pytest.approx([100 * limit for limit in wilson(3, 4)])


def test_a_loss_of_accuracy_is_a_positive_drop(found):
    assert found.drop == 25.0
    low, high = paired_difference(2, 1, 0, 1)
    assert found.drop_ci95 == pytest.approx((100 * low, 100 * high))
    assert found.drop_ci95[0] <= found.drop <= found.drop_ci95[1]


def test_a_gain_of_accuracy_is_a_negative_drop_with_the_interval_mirrored(found):
    gain = compare(REFERENCE, OURS, LABELS)
    assert gain.drop == -25.0
    assert gain.drop_ci95 == pytest.approx((-found.drop_ci95[1], -found.drop_ci95[0]))


def test_largest_difference_is_relative_to_the_largest_logit_of_the_original(found):
    assert found.max_difference == pytest.approx(5 / 9)


def test_cosine_is_that_of_the_logits_by_image(found):
    a, b = OURS[3].astype(float), REFERENCE[3].astype(float)
    worst = a @ b / np.sqrt((a @ a) * (b @ b))
    assert found.cosine_min == pytest.approx(worst)
    assert found.cosine_mean == pytest.approx((3 + worst) / 4)


def test_kl_is_the_mean_of_scipys_relative_entropy_from_the_original_to_the_artifact(found):
    p, q = (softmax(logits.astype(np.float64), axis=1) for logits in (REFERENCE, OURS))
    assert found.kl == pytest.approx(rel_entr(p, q).sum(axis=1).mean(), rel=1e-9)
    assert found.kl != pytest.approx(rel_entr(q, p).sum(axis=1).mean(), rel=1e-2)


logits = hnp.arrays(np.float64, (3, 5), elements=st.floats(-30, 30))


@given(p=logits, q=logits)
@settings(max_examples=100, deadline=None)
def test_kl_equals_scipys_and_is_never_negative(p, q):
    ours = kl_divergence(p, q)
    theirs = rel_entr(softmax(p, axis=1), softmax(q, axis=1)).sum(axis=1)
    np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12)
    assert (ours >= 0).all()


def test_kl_of_huge_logits_does_not_overflow():
    divergence = kl_divergence(np.array([[1e4, 0.0]]), np.array([[0.0, 1e4]]))
    assert divergence == pytest.approx([1e4])


def test_an_artifact_that_equals_the_original_loses_nothing():
    same = compare(REFERENCE, REFERENCE, LABELS)
    assert (same.drop, same.agreement, same.kl, same.max_difference) == (0.0, 100.0, 0.0, 0.0)
    assert same.cosine_min == pytest.approx(1.0)
    assert same.agreement_ci95[1] == pytest.approx(100.0)


def test_without_labels_there_is_agreement_but_no_accuracy():
    found = compare(OURS, REFERENCE, None)
    assert (found.top1, found.reference_top1, found.top5, found.reference_top5) == (None, None, None, None)
    assert (found.drop, found.drop_ci95) == (None, None)
    assert found.agreement == 75.0


def test_a_model_of_fewer_than_five_classes_has_every_label_among_its_best_five():
    few = compare(OURS[:, :3], REFERENCE[:, :3], np.array([2, 2, 2, 2]))
    assert few.top5 == 100.0


def test_logits_of_zeros_do_not_divide_by_zero():
    zeros = np.zeros((2, 3), np.float32)
    found = compare(zeros, zeros, None)
    assert (found.max_difference, found.kl, found.agreement) == (0.0, 0.0, 100.0)


@pytest.mark.parametrize(("ours", "reference"), [((2, 3), (2, 4)), ((2, 3), (3, 3)), ((0, 3), (0, 3))], ids=str)
def test_arrays_that_cannot_be_compared_are_refused(ours, reference):
    with pytest.raises(ValueError, match="against"):
        compare(np.zeros(ours, np.float32), np.zeros(reference, np.float32), None)


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 60), max_size=5, unique=True), st.randoms(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_pieces_of_any_size_in_any_order_give_the_bytes_of_the_whole(seed, cuts, order, labelled):
    random = np.random.default_rng(seed)
    ours, reference = random.normal(0, 3, (2, 61, 7)).astype(np.float32)
    labels = random.integers(0, 7, 61) if labelled else None
    bounds = [0, *sorted(cuts), 61]
    pieces = [
        tally(ours[a:b], reference[a:b], None if labels is None else labels[a:b]) for a, b in itertools.pairwise(bounds)
    ]
    order.shuffle(pieces)
    assert functools.reduce(operator.add, pieces).agreement() == compare(ours, reference, labels)
    read = [Tally.from_dict(json.loads(json.dumps(piece.to_dict()))) for piece in pieces]
    assert read == pieces
