"""Numbers in generation_config.json, which anybody may have written."""

from types import SimpleNamespace

import pytest

from vitdeploy.errors import CheckpointError
from vitdeploy.models.model_folder.folder import searched

GIVEN = {"decoder_start_token_id": 1, "eos_token_id": 2, "max_length": 8}


def config(**values):
    return SimpleNamespace(to_diff_dict=lambda: GIVEN | values)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_beams", 2.5, "an integer"),
        ("max_length", True, "an integer"),
        ("max_new_tokens", 1 << 40, "an integer"),
        ("pad_token_id", "0", "an integer"),
        ("length_penalty", float("nan"), "a number"),
        ("length_penalty", [1.0], "a number"),
    ],
)
def test_a_value_that_is_no_such_number_is_named(key, value, expected):
    with pytest.raises(CheckpointError, match="does not support the model's generation settings") as caught:
        searched(config(**{key: value}), 16)
    assert (caught.value.found, caught.value.expected) == (f"{key} {value!r}", f"{key}: {expected}")


def test_numbers_are_taken_as_they_are():
    spec, notes = searched(config(num_beams=3, length_penalty=2), 16)
    assert (spec.start, spec.end, spec.max_length, spec.search.beams, notes) == (1, 2, 7, 3, ())
