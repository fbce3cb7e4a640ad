"""Records of images: whatever the pieces and their order, joined they are the records of the set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.verification.changes import joined
from vitdeploy.verification.records import ImageRows, Records


def table_of(rows):
    """One row of floats for each number that an image has."""
    return ImageRows.of(
        [{"value": np.array(each, np.float64), "twice": 2 * np.array(each, np.float32)} for each in rows]
    )


def records_of(rows):
    """Records of images with so many numbers each."""
    sums = ImageRows.each(count=np.array([len(each) for each in rows], np.int64))
    return Records(len(rows), {"numbers": table_of(rows), "images": sums})


def content(records):
    """All of them as plain values, with dtypes."""
    return records.n, {
        name: (table.image.tolist(), {key: (str(each.dtype), each.tolist()) for key, each in table.columns.items()})
        for name, table in records.tables.items()
    }


numbers = st.lists(st.lists(st.floats(0, 1, width=32), max_size=4), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(numbers, st.data())
def test_pieces_in_any_order_are_the_set(rows, data):
    n = len(rows)
    places = np.array(data.draw(st.permutations(range(n))), np.int64)
    ends = sorted(data.draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    pieces = data.draw(st.permutations(np.split(places, ends)))
    found = joined([records_of([rows[i] for i in piece]) for piece in pieces], [3 * piece + 7 for piece in pieces])
    assert content(found) == content(records_of(rows))


def test_a_file_of_records_says_all_of_them(tmp_path):
    found = records_of([[0.5], [], [0.25, 1.0]])
    found.save(tmp_path / "records.npz")
    assert content(Records.load(tmp_path / "records.npz")) == content(found)
    assert found["numbers"].where(found["numbers"]["value"] > 0.4).image.tolist() == [0, 2]


def test_pieces_that_do_not_fit_together_are_refused():
    one = records_of([[1.0]])
    with pytest.raises(ValueError, match="two images with the same place"):
        joined([one, one], [np.array([4]), np.array([4])])
    with pytest.raises(ValueError, match="images, but"):
        joined([one], [np.array([0, 1])])
    with pytest.raises(ValueError, match="different tables"):
        joined([one, one.with_tables(more=table_of([[1.0]]))], [np.array([0]), np.array([1])])
