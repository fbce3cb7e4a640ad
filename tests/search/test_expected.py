"""What is expected of many answers from few, against what happens to many."""

import numpy as np
import pytest

from vitdeploy.search.expected import expected_loss


def drawn(images, seed, noise, classes=20):
    """Logits whose softmax is the truth, and the same with noise: (wanted, found, labels)."""
    generator = np.random.default_rng(seed)
    wanted = generator.normal(0, 2, (images, classes))
    p = np.exp(wanted) / np.exp(wanted).sum(axis=1, keepdims=True)
    labels = (p.cumsum(axis=1) < generator.uniform(size=(images, 1))).sum(axis=1)
    return wanted, wanted + generator.normal(0, noise, wanted.shape), labels


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.4])
def test_few_images_foretell_many(noise):
    wanted, found, labels = drawn(200_000, 0, noise)
    changed = wanted.argmax(axis=1) != found.argmax(axis=1)
    drop = (wanted.argmax(axis=1) == labels).mean() - (found.argmax(axis=1) == labels).mean()
    ours = expected_loss(*drawn(4000, 1, noise)[1::-1])
    assert 100 - ours.agreement == pytest.approx(100 * changed.mean(), rel=0.3)
    assert ours.drop == pytest.approx(100 * drop, abs=max(0.3, 30 * drop))


def test_the_same_answers_lose_nothing():
    wanted, _, _ = drawn(10, 0, 0.1)
    ours = expected_loss(wanted, wanted)
    assert (ours.agreement, ours.drop) == (100, pytest.approx(0))


def test_one_class_is_always_right():
    assert expected_loss(np.zeros((3, 1)), np.ones((3, 1))).agreement == 100
