"""Second-order saliencies against least squares that refits from the rows themselves."""

import itertools

import numpy as np
import pytest

from vitdeploy.quantization.ranges import Statistics
from vitdeploy.search import pruning as saliency
from vitdeploy.search.pruning import compensated, removal_order

ROWS, WIDTH, OUT = 500, 12, 5


@pytest.fixture
def undamped(monkeypatch):
    monkeypatch.setattr(saliency, "DAMPING", 0.0)


def moments_of(x):
    return Statistics(x.min(0), x.max(0), x.mean(0), np.cov(x.T, bias=True), ROWS)


def case(seed, width=WIDTH):
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((ROWS, width)) @ generator.standard_normal((width, width)) + generator.random(width)
    weight = generator.standard_normal((width, OUT))
    return x, weight, moments_of(x)


def refitted(x, weight, bias, kept):
    """(weight, bias, mean squared error) of the best linear of these columns, from numpy's own least squares."""
    rows = np.column_stack([x[:, kept], np.ones(len(x))])
    target = x @ weight + bias
    found, *_ = np.linalg.lstsq(rows, target, rcond=None)
    return found[:-1], found[-1], float(((rows @ found - target) ** 2).sum(1).mean())


@pytest.mark.parametrize("seed", range(3))
def test_what_stays_makes_up_as_least_squares_does(undamped, seed):
    x, weight, moments = case(seed)
    bias, kept = np.arange(OUT) / 3, np.array([0, 2, 3, 7, 11])
    ours, moved = compensated(moments, weight, bias, kept)
    theirs, offset, _ = refitted(x, weight, bias, kept)
    np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(moved, offset, rtol=1e-7, atol=1e-9)


def test_damping_pulls_towards_the_weights_as_they_were(monkeypatch):
    _, weight, moments = case(1)
    kept = np.array([1, 4, 5])
    monkeypatch.setattr(saliency, "DAMPING", 1e12)
    ours, _ = compensated(moments, weight, None, kept)
    np.testing.assert_allclose(ours, weight[kept], rtol=1e-6)
    whole, bias = compensated(moments, weight, None, np.arange(WIDTH))
    np.testing.assert_allclose(whole, weight, rtol=1e-9)
    np.testing.assert_allclose(bias, 0, atol=1e-9)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("block", [2, 64])
def test_the_cheapest_goes_first_each_time(undamped, monkeypatch, size, block):
    """Cheapest by refitting from the rows. With blocks of 2, C^-1 and W are made anew five times on the way."""
    monkeypatch.setattr(saliency, "BLOCK", block)
    for seed in range(4):
        x, weight, moments = case(seed)
        structures = np.random.default_rng(seed).permutation(WIDTH).reshape(-1, size)
        left, expected = list(range(len(structures))), []
        while len(left) > 1:
            errors = {
                each: refitted(x, weight, 0.0, np.sort(structures[[one for one in left if one != each]].ravel()))[2]
                for each in left
            }
            expected.append(min(errors, key=errors.get))
            left.remove(expected[-1])
        assert removal_order(moments, weight, structures) == expected


def test_of_two_channels_that_are_the_same_only_one_is_cheap(undamped):
    """Each alone costs nothing, both together a lot: saliencies that are not brought up to date fail."""
    x, weight, _ = case(5)
    x[:, 3] = x[:, 8] + 1e-4 * np.random.default_rng(0).standard_normal(ROWS)
    weight[[3, 8]] *= 10
    order = removal_order(moments_of(x), weight, np.arange(WIDTH)[:, None])
    assert order[0] in (3, 8)
    assert not {3, 8} <= set(order[:6])


def test_channels_that_are_always_zero_go_first():
    x, weight, _ = case(6)
    x[:, [1, 10]] = 0
    order = removal_order(moments_of(x), weight, np.arange(WIDTH)[:, None])
    assert set(order[:2]) == {1, 10}


def test_blocks_of_channels_agree_with_single_ones():
    """More channels than BLOCK, the same way as one by one through `_blocks`."""
    _, weight, moments = case(7, width=90)
    structures = np.arange(90)[:, None]
    inverse = np.linalg.inv(saliency.damped(moments))
    assert removal_order(moments, weight, structures) == saliency._blocks(inverse, weight, structures)
    assert list(itertools.islice(removal_order(moments, weight, structures), 3)) != [0, 1, 2]
