"""The Pareto front, against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from vitdeploy.search.frame import pareto_front, undominated

POINTS = st.lists(st.tuples(*[st.integers(0, 6).map(float)] * 2), max_size=12)


@given(POINTS)
def test_a_point_is_on_the_front_where_no_other_dominates_it(points):
    front = pareto_front(points, lambda point: point)
    assert front == sorted(set(front))

    def dominated(point):
        return any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)

    assert set(front) == {point for point in points if not dominated(point)}


def test_of_equal_items_the_first_one_stays():
    assert pareto_front(["first", "second"], lambda item: (1.0, 2.0)) == ["first"]


def test_items_are_sorted_by_what_is_measured_of_them():
    measures = {"a": (3.0, 1.0), "b": (1.0, 3.0), "c": (2.0, 4.0), "d": (2.0, 2.0)}
    assert pareto_front(["a", "b", "c", "d"], measures.get) == ["b", "d", "a"]


@given(POINTS, st.sets(st.integers(0, 6).map(float)))
def test_where_only_some_differences_of_time_are_proven_no_other_item_is_left_out(points, proven):
    """`proven` are the times that were measured well enough to lose."""
    items = list(enumerate(points))
    kept = undominated(items, lambda item: item[1][0], lambda a, b: a[1][1] < b[1][1] and b[1][1] in proven)
    assert kept == sorted(kept, key=lambda item: item[1][0])
    for item in items:
        better = [a for a in points if a[0] <= item[1][0] and a[1] < item[1][1]]
        assert (item in kept) == (not better or item[1][1] not in proven)
