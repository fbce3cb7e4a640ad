"""Tokens counted by hand; what padding and length may and may not hide; intervals of sequences, not of tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.errors import DataError
from vitdeploy.tasks.sequence import compare_sequences
from vitdeploy.verification.intervals import wilson

PAD = 0


def tokens(*rows):
    return [np.array(row, np.int64) for row in rows]


def compare(artifact, reference, targets=None):
    return compare_sequences(artifact, reference, targets, pad=PAD, max_difference=0.25)


REFERENCE = tokens([5, 6, 7, 2], [5, 2, 0, 0], [8, 8, 2])
OURS = tokens([5, 6, 9, 2], [5, 2], [8, 8, 8, 8, 2])


def test_agreement_counts_positions_up_to_the_longer_sequence():
    found = compare(OURS, REFERENCE)
    # 3 of 4, 2 of 2, 2 of 5.
    assert (found.n, found.tokens, found.agreement) == (3, 11, pytest.approx(100 * 7 / 11))
    assert found.exact_agreement == pytest.approx(100 / 3)
    assert found.exact_agreement_ci95 == pytest.approx([100 * limit for limit in wilson(1, 3)])
    assert found.max_difference == 0.25
    assert (found.metric, found.value, found.drop, found.drop_ci95, found.exact_match) == (None,) * 5


def test_a_missing_end_is_a_difference():
    found = compare(tokens([5, 6]), tokens([5, 6, 2]))
    assert (found.agreement, found.exact_agreement) == (pytest.approx(100 * 2 / 3), 0.0)


def test_padding_is_not_an_agreement():
    few = compare(tokens([5, 6]), tokens([5, 7]))
    padded = compare(np.array([[5, 6, 0, 0, 0]]), np.array([[5, 7, 0, 0, 0]]))
    assert few == padded
    assert few.agreement == 50.0


def test_accuracy_and_exact_match_are_against_the_targets():
    targets = tokens([5, 6, 7, 2], [5, 2], [8, 9, 2])
    found = compare(OURS, REFERENCE, targets)
    # Ours: 3 of 4, 2 of 2, 1 of 5. The original's: 4 of 4, 2 of 2, 2 of 3.
    assert (found.metric, found.value, found.reference_value) == (
        "token accuracy",
        pytest.approx(100 * 6 / 11),
        pytest.approx(100 * 8 / 9),
    )
    assert found.drop == pytest.approx(found.reference_value - found.value)
    assert (found.exact_match, found.reference_exact_match) == (pytest.approx(100 / 3), pytest.approx(200 / 3))
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]


def test_equal_sequences_agree_in_full():
    found = compare(REFERENCE, REFERENCE, REFERENCE)
    assert (found.agreement, found.exact_agreement, found.drop, found.value, found.exact_match) == (
        100,
        100,
        0,
        100,
        100,
    )
    assert found.agreement_ci95[0] < 80  # nine tokens prove little
    assert found.drop_ci95[1] > 20


def test_many_equal_sequences_prove_more():
    many = compare(REFERENCE * 200, REFERENCE * 200, REFERENCE * 200)
    assert many.agreement_ci95[0] > 99
    assert many.drop_ci95[1] < 1


def test_the_interval_is_wider_where_whole_sequences_fail():
    """The same share of wrong tokens: in one sequence of four all, or in each sequence a quarter."""
    reference = [np.arange(1, 9)] * 100
    whole = [row + (i % 4 == 0) * 50 for i, row in enumerate(reference)]
    spread = [np.where(np.arange(8) % 4 == 0, 99, row) for row in reference]
    clustered, even = compare(whole, reference), compare(spread, reference)
    assert clustered.agreement == even.agreement == 75.0
    widths = [each.agreement_ci95[1] - each.agreement_ci95[0] for each in (clustered, even)]
    assert widths[0] > 2 * widths[1]
    # 100 independent sequences: about as wide as Wilson's interval of 75 of 100.
    low, high = wilson(75, 100)
    assert widths[0] == pytest.approx(100 * (high - low), rel=0.15)


def test_sequences_of_padding_agree_but_prove_nothing():
    found = compare(tokens([0, 0], []), tokens([0], [0]))
    assert (found.agreement, found.tokens, found.agreement_ci95) == (100.0, 0, (0.0, 100.0))


rows = st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), reference=rows)
def test_agreement_is_symmetric_and_intervals_hold_their_estimates(data, reference):
    ours = [data.draw(st.lists(st.integers(0, 3), max_size=5)) for _ in reference]
    there, back = compare(tokens(*ours), tokens(*reference)), compare(tokens(*reference), tokens(*ours))
    assert there == back
    assert 0 <= there.agreement_ci95[0] <= there.agreement <= there.agreement_ci95[1] <= 100
    same = compare(tokens(*ours), tokens(*ours))
    assert (same.agreement, same.exact_agreement) == (100.0, 100.0)


def test_targets_of_padding_are_refused():
    with pytest.raises(DataError, match="contain no tokens"):
        compare(REFERENCE, REFERENCE, tokens([0], [0], [0, 0]))


@pytest.mark.parametrize(("ours", "theirs", "targets"), [(1, 2, None), (0, 0, None), (2, 2, 1)])
def test_lists_that_do_not_belong_together_are_refused(ours, theirs, targets):
    with pytest.raises(ValueError, match="against"):
        compare(tokens([1]) * ours, tokens([1]) * theirs, targets and tokens([1]) * targets)
