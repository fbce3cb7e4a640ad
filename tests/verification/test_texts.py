"""Character accuracy: against torchmetrics, and what its intervals and changes say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.references import reference
from vitdeploy.errors import DataError
from vitdeploy.tasks.image_to_text import compare_texts, edit_distance, text_changes

TEXTS = st.text("ABC 1é猫", max_size=12)


@given(TEXTS, TEXTS)
def test_the_distance_is_a_distance(a, b):
    found = edit_distance(a, b)
    assert found == edit_distance(b, a)
    assert (found == 0) == (a == b)
    assert abs(len(a) - len(b)) <= found <= max(len(a), len(b))


def test_the_distance_and_the_accuracy_are_torchmetrics():
    text = reference("torchmetrics").functional.text
    generator = np.random.default_rng(0)
    pairs = [["".join(generator.choice([*"ABCDE "], size)) for size in generator.integers(0, 20, 2)] for _ in range(60)]
    assert [edit_distance(a, b) for a, b in pairs] == [
        int(each) for each in text.edit_distance(*zip(*pairs, strict=True), reduction="none")
    ]
    found = compare_texts(
        [a for a, _ in pairs], [b for _, b in pairs], [b for _, b in pairs], cut=3, max_difference=0.5
    )
    expected = 100 * (1 - float(text.char_error_rate([a for a, _ in pairs], [b for _, b in pairs])))
    assert found.value == pytest.approx(max(expected, 0), abs=1e-4)
    assert (found.reference_value, found.reference_line_accuracy, found.metric) == (100, 100, "character accuracy")
    assert (found.cut, found.max_difference, found.characters) == (3, 0.5, sum(len(b) for _, b in pairs))


def test_a_drop_has_the_interval_of_the_images():
    written = ["ABCDEFGH"] * 40
    ours = ["ABCDEFGH"] * 30 + ["ABCDEFG"] * 10
    found = compare_texts(ours, written, written, cut=0, max_difference=0)
    assert found.drop == pytest.approx(100 * 10 / 320)
    assert found.drop_ci95[0] < found.drop < found.drop_ci95[1]
    assert (found.line_accuracy, found.agreement) == (75, 75)
    assert found.agreement_ci95[0] < 75 < found.agreement_ci95[1]


def test_more_mistakes_than_characters_are_no_less_than_nothing():
    found = compare_texts(["XXXXXXXX"], ["A"], ["A"], cut=0, max_difference=0)
    assert (found.value, found.drop) == (0, 100)


def test_without_labels_there_is_agreement_alone():
    found = compare_texts(["AB", "C"], ["AB", "D"], None, cut=0, max_difference=0)
    assert (found.metric, found.value, found.agreement, found.agreement_of) == (
        None, None, 50, "images with the same text",
    )  # fmt: skip
    assert found.character_agreement == pytest.approx(100 * 2 / 3)


def test_texts_of_nothing_are_refused():
    with pytest.raises(DataError, match="contain no characters") as caught:
        compare_texts(["A"], ["A"], [""], cut=0, max_difference=0)
    assert caught.value.found == "1 empty texts"
    with pytest.raises(ValueError, match="0 texts against 1"):
        compare_texts([], ["A"], None, cut=0, max_difference=0)


def test_what_became_wrong_is_worse_than_what_became_right():
    found = text_changes(["AB", "XY", "AB"], ["AB", "AB", "A"], ["AB", "AB", "AB"])
    assert found.changed.tolist() == [False, True, True]
    assert (found.lost.tolist(), found.gained.tolist()) == ([False, True, False], [False, False, True])
    assert found.severity[1] > found.severity[2] > found.severity[0] == 0
