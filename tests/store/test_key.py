"""The key of an artifact: the same for ever for the same parts, another for any other part."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.store.key import Identity, canonical_json

PARTS = {
    "kind": "export",
    "config": {"opset": 20, "batch": None, "mean": [0.5, 0.1], "name": "zwölf"},
    "inputs": {"checkpoint": "ab" * 32},
    "tools": {"torch": "2.10.0", "onnx": "1.21.0"},
}


def test_the_key_of_a_fixed_input_never_changes():
    assert Identity(**PARTS).key == "f5d9d07b10662c367d1b7aa1d5224226f88dbde00b89eb3602998e2aa386afdb"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "compile"},
        {"config": {**PARTS["config"], "opset": 21}},
        {"config": {**PARTS["config"], "batch": 1}},
        {"config": {**PARTS["config"], "mean": [0.1, 0.5]}},
        {"config": {**PARTS["config"], "more": None}},
        {"inputs": {"checkpoint": "ac" * 32}},
        {"inputs": {"graph": "ab" * 32}},
        {"inputs": {}},
        {"tools": {"torch": "2.10.1", "onnx": "1.21.0"}},
        {"tools": {"torch": "2.10.0"}},
    ],
)
def test_the_key_depends_on_every_part(change):
    assert Identity(**{**PARTS, **change}).key != Identity(**PARTS).key


def test_the_order_of_fields_does_not_matter():
    turned = {name: dict(reversed(value.items())) for name, value in PARTS.items() if isinstance(value, dict)}
    assert Identity(**{**PARTS, **turned}).key == Identity(**PARTS).key


def test_what_stands_in_config_is_not_taken_for_an_input():
    one = Identity("export", {"a": "b"}, {}, {}).key
    other = Identity("export", {}, {"a": "b"}, {}).key
    assert one != other


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=4))
def test_equal_values_have_one_text(value):
    assert canonical_json(value) == canonical_json(dict(reversed(value.items())))
    assert canonical_json(value).isascii()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [-float("inf")]])
def test_a_number_that_is_none_has_no_key(value):
    with pytest.raises(ValueError, match="JSON compliant"):
        Identity("export", {"x": value}, {}, {})
