"""Shards of a list of names: they hold all of it, and one name more or less changes few of them."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vitdeploy.data.folder import MOST, WINDOW, cut

numbers = st.sets(st.integers(0, 10**6), min_size=1, max_size=400)


def named(numbers):
    return [f"class{n % 7}/{n:07}.jpg" for n in sorted(numbers)]


def pieces(names, window=4, most=64):
    return [tuple(names[i] for i in shard) for shard in cut(names, window, most)]


@given(numbers)
@settings(max_examples=200, deadline=None)
def test_shards_hold_all_names_in_their_order_and_none_is_small_or_large(numbers):
    names = named(numbers)
    found = pieces(names, most=20)
    assert list(itertools.chain(*found)) == names
    assert all(4 < len(piece) <= 20 for piece in found[:-1])
    assert 4 <= len(found[-1]) <= 20 or found == [tuple(names)]


@given(numbers, st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_one_name_more_or_less_changes_three_shards_at_most(numbers, more):
    assume(more not in numbers)
    fewer, many = set(pieces(named(numbers))), set(pieces(named({*numbers, more})))
    assume(max(map(len, fewer | many)) < 32)  # no stretch was divided
    assert len(many - fewer) <= 3 and len(fewer - many) <= 3


def test_the_sizes_of_many_shards_are_about_as_promised():
    sizes = [len(shard) for shard in cut([f"{n:08}.png" for n in range(200_000)])]
    assert sum(sizes) == 200_000
    assert min(sizes) >= WINDOW and max(sizes) <= MOST
    assert np.mean(sizes) == pytest.approx(2 * WINDOW + 1, rel=0.05)


def test_cuts_are_the_same_on_every_machine():
    names = [f"n{n % 10:02}/{n:05}.JPEG" for n in range(3000)]
    assert [shard.stop for shard in cut(sorted(names))] == [257, 581, 1212, 1587, 2147, 3000]


def test_a_stretch_without_a_cut_is_divided_into_parts_that_are_no_smaller_than_a_quarter(monkeypatch):
    rising = np.arange(100, dtype=np.uint64)
    monkeypatch.setattr("vitdeploy.data.folder._hashes", lambda names: rising)
    assert [len(shard) for shard in cut([], 4, 20)] == [7, 19, 19, 14, 11, 8, 6, 16]


def test_few_names_are_one_shard_and_none_is_no_shard():
    assert cut(f"{n}.png" for n in range(2 * WINDOW)) == [range(2 * WINDOW)]
    assert cut(["x.png"]) == [range(1)]
    assert cut([]) == []


def test_a_name_that_is_no_utf8_has_its_place():
    assert cut(["caf\udce9.png", "b.png"]) == [range(2)]


def test_a_largest_size_near_the_least_is_refused():
    with pytest.raises(ValueError, match="shards of at most 10 names with windows of 4"):
        cut([], 4, 10)
