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
