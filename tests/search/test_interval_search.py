"""Finding the steepest step of a line in few measurements."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.search.bisect import gain, largest_increases

SHARE = 0.25


class Line:
    """Measures a list, and counts how often. What is None there cannot be measured."""

    def __init__(self, values):
        self.values, self.asked = values, []

    def __call__(self, position):
        assert position not in self.asked
        assert 0 < position < len(self.values) - 1
        self.asked.append(position)
        return self.values[position]

    def rises(self, share=SHARE):
        return largest_increases(self, len(self.values) - 1, first=self.values[0], total=self.values[-1], share=share)


def line_of(steps):
    values = [0.0]
    for step in steps:
        values.append(values[-1] + step)
    return Line(values)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_of_a_line_that_never_falls_the_steepest_step_is_found_or_none_has_the_share(steps):
    line = line_of(steps)
    total = line.values[-1]
    rises = line.rises()
    assert sorted((rise.low, rise.high) for rise in rises)[0][0] == 0
    assert sum(rise.high - rise.low for rise in rises) == len(steps)
    assert rises == sorted(rises, key=lambda rise: -rise.gain)
    for rise in rises:
        assert rise.gain == line.values[rise.high] - line.values[rise.low]
    steepest = max(b - a for a, b in zip(line.values[:-1], line.values[1:], strict=True))
    if rises[0].high - rises[0].low == 1:
        assert rises[0].gain >= steepest
    else:
        assert steepest <= rises[0].gain < SHARE * total
    assert len(line.asked) <= math.ceil(math.log2(len(steps))) / SHARE


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.data())
def test_one_step_that_has_it_all_takes_no_more_than_the_logarithm(count, data):
    most_sensitive = data.draw(st.integers(0, count - 1))
    line = line_of([1.0 if i == most_sensitive else 1e-6 for i in range(count)])
    rise = line.rises()[0]
    assert (rise.low, rise.high) == (most_sensitive, most_sensitive + 1)
    assert len(line.asked) <= math.ceil(math.log2(count))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.data())
def test_the_first_place_without_bounds_is_found(count, data):
    most_sensitive = data.draw(st.integers(0, count - 1))
    line = Line([0.1 * i if i <= most_sensitive else math.inf for i in range(count + 1)])
    rise = line.rises()[0]
    assert (rise.low, rise.high, rise.gain) == (most_sensitive, most_sensitive + 1, math.inf)
    assert len(line.asked) <= math.ceil(math.log2(count))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40))
def test_a_line_that_also_falls_ends_and_what_is_said_was_measured(steps):
    line = line_of(steps)
    rises = line.rises()
    assert len(line.asked) < len(steps) or len(steps) == 1
    for rise in rises:
        assert rise.gain == line.values[rise.high] - line.values[rise.low]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=3, max_size=40), st.data())
def test_places_that_cannot_be_measured_are_left_out(measurable, data):
    most_sensitive = data.draw(st.integers(0, len(measurable) - 2))
    values = [0.0 if i <= most_sensitive else 1.0 for i in range(len(measurable))]
    inner = [value if able else None for value, able in zip(values[1:-1], measurable[1:-1], strict=True)]
    rise = Line([values[0], *inner, values[-1]]).rises()[0]
    assert rise.gain == 1
    assert rise.low <= most_sensitive < rise.high
    assert not any(measurable[rise.low + 1 : rise.high])


def test_a_gain_between_two_infinities_is_none():
    assert gain(math.inf, math.inf) == 0
    assert gain(1.0, math.inf) == math.inf
    assert gain(1.0, 3.0) == 2
