"""What so many images can prove: by the intervals that judge, and by agreement where labels prove less."""

import numpy as np
import pytest

from vitdeploy.spec import Budget
from vitdeploy.tasks.features import compare_features
from vitdeploy.verification.agreement import compare
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import (
    accuracy_gate,
    criterion_to_prove,
    drop_by_agreement,
    drop_gate,
    drop_to_judge,
    images_for_agreement,
    images_for_drop,
    provable_agreement,
    provable_drop,
    unprovable,
)

DIGITS, RIGHT = 640, 629  # of the original in `make demo`


def logits(n, right, classes=10):
    """Answers of which the first `right` are those of the labels, and the labels."""
    labels = np.arange(n) % classes
    answers = np.where(np.arange(n) < right, labels, (labels + 1) % classes)
    return np.eye(classes, dtype=np.float32)[answers] * 8, labels


def perfect(n, right, labelled=True):
    answers, labels = logits(n, right)
    return compare(answers, answers, labels if labelled else None)


def test_the_bounds_are_those_of_the_comparison_that_judges():
    found = perfect(DIGITS, RIGHT)
    assert found.drop_ci95[1] == pytest.approx(provable_drop(DIGITS, RIGHT / DIGITS))
    assert found.agreement_ci95[0] == pytest.approx(provable_agreement(DIGITS))


@pytest.mark.parametrize("accuracy", [0.5, 0.69, RIGHT / DIGITS, 1.0])
@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_the_number_that_is_named_proves_it_and_a_few_less_do_not(accuracy, bound):
    needed = images_for_drop(bound, accuracy)
    assert provable_drop(needed, accuracy) <= bound < provable_drop(needed - 1, accuracy)
    assert all(provable_drop(n, accuracy) <= bound for n in range(needed, 3 * needed, needed // 5))


def test_the_number_for_an_agreement_passes_its_gate_and_one_less_does_not():
    needed = images_for_agreement(99.5)
    for n, status in ((needed, "pass"), (needed - 1, "undecided")):
        assert accuracy_gate(perfect(n, n, labelled=False), Budget(min_agreement=99.5)).status == status
    assert images_for_agreement(100) is None
    assert images_for_drop(0, 0.9) is None


def test_what_cannot_be_proven_is_said_with_what_can_and_with_how_many():
    budget = Budget(max_drop=0.5, min_agreement=99.5)
    assert unprovable(perfect(DIGITS, RIGHT), budget) == [
        "640 images are too few: even if all answers match, they prove only "
        "a drop below 0.66 points (budget: 0.5); about 837 are needed",
        "640 images are too few: even if all answers match, they prove only "
        "99.40 % agreement (budget: 99.5 %); about 765 are needed",
    ]
    assert unprovable(perfect(837, 823), Budget(max_drop=0.5)) == []
    assert unprovable(perfect(DIGITS, RIGHT), Budget(max_latency=1)) == []
    assert "; more are needed" in unprovable(perfect(DIGITS, RIGHT), Budget(min_agreement=100))[0]


def test_without_labels_agreement_bounds_the_drop():
    found = perfect(DIGITS, RIGHT, labelled=False)
    assert drop_by_agreement(found) == (pytest.approx(-0.5966, abs=1e-4), pytest.approx(0.5966, abs=1e-4))
    assert unprovable(found, Budget(max_drop=0.6)) == []
    assert unprovable(found, Budget(max_drop=0.5)) == [
        "640 images are too few: even if all answers match, they prove only "
        "a drop below 0.60 points (budget: 0.5); about 765 are needed"
    ]


@pytest.mark.parametrize(
    ("found", "max_drop", "criterion"),
    [
        (perfect(DIGITS, RIGHT), 1.0, "labels"),
        (perfect(DIGITS, RIGHT), 0.62, "agreement"),
        (perfect(DIGITS, RIGHT), 0.5, "labels"),
        (perfect(DIGITS, RIGHT, labelled=False), 0.5, "agreement"),
    ],
)
def test_which_bound_judges_is_settled_by_the_original_alone(found, max_drop, criterion):
    assert criterion_to_prove(found, max_drop) == criterion


def test_what_is_judged_is_the_interval_of_the_way_that_was_settled():
    answers, labels = logits(DIGITS, RIGHT)
    ours, _ = logits(DIGITS, RIGHT - 4)
    found = compare(ours, answers, labels)
    assert drop_to_judge(found, "labels") == (found.drop, found.drop_ci95)
    drop, (low, high) = drop_to_judge(found, "agreement")
    assert (drop, high) == (pytest.approx(0.625), 100 - found.agreement_ci95[0])
    assert low < 0 < found.drop < high
    for bound in (high, high - 0.01, 0.0):
        status = drop_gate(DIGITS, drop, (low, high), bound).status
        assert status == ("pass" if bound == high else "undecided")
    assert drop_to_judge(compare(ours, answers, None), "labels") is None
    assert drop_to_judge(compare_features(ours, answers, None), "agreement") is None


@pytest.mark.parametrize("true", [0.005, 0.02, 0.1])
def test_the_bound_by_agreement_holds_the_true_drop_as_often_as_it_says(true):
    """All images whose answers differ may have been right: then the drop is the disagreement, its worst case."""
    n, held = 1000, 0
    differing, times = np.unique(np.random.RandomState(0).binomial(n, true, 4000), return_counts=True)
    for count, often in zip(differing, times, strict=True):
        answers, labels = logits(n, n)
        ours, _ = logits(n, n - count)
        low, high = drop_by_agreement(compare(ours, answers, labels))
        held += often * (low <= 100 * true <= high)
    assert held / 4000 >= 0.97  # one side of an interval of 95 %


def test_agreement_bounds_no_metric_but_top1():
    features = np.random.RandomState(0).randn(40, 8).astype(np.float32)
    neighbours = compare_features(features, features, None)
    assert drop_by_agreement(neighbours) is None
    assert criterion_to_prove(neighbours, 1.0) == "labels"
    assert unprovable(neighbours, Budget(max_drop=1.0)) == ["max_drop needs labels, and the images have none"]
    some = Comparison(
        n=30, metric="mAP", value=40.0, reference_value=40.0, drop=0.0, drop_ci95=(-2.0, 2.0),
        agreement=100.0, agreement_ci95=(97.0, 100.0), agreement_of="objects", max_difference=0.0,
    )  # fmt: skip
    assert unprovable(some, Budget(max_drop=1.0, min_agreement=98)) == [
        "30 images are too few: even if all answers match, they prove only "
        "a drop below 2.00 points (budget: 1); more are needed",
        "30 images are too few: even if all answers match, they prove only "
        "97.00 % agreement (budget: 98 %); more are needed",
    ]
