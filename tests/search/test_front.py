"""The Pareto front, against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from vitdeploy.search.front import pareto_front

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
