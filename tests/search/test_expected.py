"""What is expected of many answers from few, against what happens to many."""

import math

import numpy as np
import pytest

from vitdeploy.search.frame import Expected, expected_loss
from vitdeploy.spec import Budget


def drawn(images, seed, noise, classes=20):
    """Logits whose softmax is the truth, and the same with noise: (expected, found, labels)."""
    generator = np.random.default_rng(seed)
    expected = generator.normal(0, 2, (images, classes))
    p = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    labels = (p.cumsum(axis=1) < generator.uniform(size=(images, 1))).sum(axis=1)
    return expected, expected + generator.normal(0, noise, expected.shape), labels


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
def test_few_images_foretell_many(noise):
    expected, found, labels = drawn(200_000, 0, noise)
    changed = expected.argmax(axis=1) != found.argmax(axis=1)
    drop = (expected.argmax(axis=1) == labels).mean() - (found.argmax(axis=1) == labels).mean()
    ours = expected_loss(*drawn(4000, 1, noise)[1::-1])
    assert 100 - ours.agreement == pytest.approx(100 * changed.mean(), rel=0.3)
    assert ours.drop == pytest.approx(100 * drop, abs=max(0.3, 30 * drop))


def test_the_same_answers_lose_nothing():
    expected, _, _ = drawn(10, 0, 0.1)
    ours = expected_loss(expected, expected)
    assert (ours.agreement, ours.drop) == (100, pytest.approx(0))


def test_one_class_is_always_right():
    assert expected_loss(np.zeros((3, 1)), np.ones((3, 1))) == Expected(100.0, 0.0)


def foretold(expected, found, share):
    """Image by image: five runners-up overtake the answer independently, each with Phi(-margin / deviation)."""
    kept, drops = [], []
    ranked = [sorted(range(len(row)), key=lambda c: -row[c])[:6] for row in expected]
    moves = [
        (found[i][a] - expected[i][a] - (found[i][c] - expected[i][c])) ** 2
        for i, (a, *others) in enumerate(ranked)
        for c in others
    ]
    deviation = math.sqrt(share * sum(moves) / len(moves))
    for row, (answer, *others) in zip(expected, ranked, strict=True):
        p = [math.exp(value) / sum(map(math.exp, row)) for value in row]
        over = [math.erfc((row[answer] - row[c]) / deviation / math.sqrt(2)) / 2 for c in others]
        kept.append(math.prod(1 - each for each in over))
        lost = sum(each * (p[answer] - p[c]) for each, c in zip(over, others, strict=True))
        drops.append(min(lost, p[answer]))
    return 100 * sum(kept) / len(kept), 100 * sum(drops) / len(drops)


@pytest.mark.parametrize("classes", [2, 3, 6, 12])
@pytest.mark.parametrize(("noise", "share"), [(0.3, 1.0), (0.3, 0.2), (30.0, 1.0)])
def test_it_is_what_the_margins_of_each_image_say(classes, noise, share):
    """With errors as large as the last, no answer can lose more than its own probability."""
    expected, found, _ = drawn(30, classes, noise, classes)
    ours = expected_loss(found, expected, share)
    assert (ours.agreement, ours.drop) == pytest.approx(foretold(expected.tolist(), found.tolist(), share))
    if share == 1:
        assert expected_loss(found, expected) == ours


@pytest.mark.parametrize(
    ("budget", "met"),
    [
        (Budget(), True),
        (Budget(min_agreement=99.0), True),
        (Budget(min_agreement=99.1), False),
        (Budget(max_drop=0.5), True),
        (Budget(max_drop=0.4), False),
        (Budget(min_agreement=99.0, max_drop=0.5), True),
        (Budget(min_agreement=99.1, max_drop=0.5), False),
        (Budget(min_agreement=99.0, max_drop=0.4), False),
    ],
)
def test_a_budget_is_met_where_each_of_its_bounds_is(budget, met):
    assert Expected(99.0, 0.5).meets(budget) == met
