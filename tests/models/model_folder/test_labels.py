"""Class names of config files: one per class, in the order of the classes, whatever the order and form of the file."""

import json
import math

import pytest

from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.model_folder.folder import labels_for

UNNAMED = "numbers are not class numbers"


def names(count):
    return tuple(f"name {number}" for number in range(count))


@pytest.mark.parametrize(
    ("config", "classes", "labels"),
    [
        # As text "10" comes before "2".
        ({"id2label": {str(i): f"name {i}" for i in sorted(range(12), key=str)}}, 12, names(12)),
        ({"label2id": {f"name {i}": i for i in reversed(range(12))}}, 12, names(12)),
        ({"id2label": {"1": "dog", "0": "cat"}}, 2, ("cat", "dog")),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, 2, ()),
        ({"id2label": {"0": "LABEL_0", "1": "person"}}, 2, ("LABEL_0", "person")),
        ({"label2id": {"dog": "1", "cat": "0"}}, 2, ("cat", "dog")),
        ({"id2label": {"0": "LABEL_0"}, "label2id": {"cat": 0}}, 1, ("cat",)),
        ({"label2id": {"LABEL_0": 0}}, 1, ()),
        ({"id2label": {}}, 2, ()),
        ({"id2label": None, "label_names": None, "pretrained_cfg": None}, 2, ()),
        ({"id2label": ["cat"]}, 1, ()),
        ({"label_names": ["cat", "dog"], "num_classes": 2}, 2, ("cat", "dog")),
        ({"pretrained_cfg": {"label_names": ["cat", "dog"], "num_classes": 2}}, 2, ("cat", "dog")),
        ({"pretrained_cfg": {"labels": ["cat", "dog"]}}, 2, ("cat", "dog")),
        ({"label_names": {str(i): f"name {i}" for i in sorted(range(12), key=str)}}, 12, names(12)),
        ({"label_names": [1, 2], "id2label": {"0": "cat"}}, 1, ("cat",)),
        ({"num_classes": 2, "architecture": "vit_tiny_patch16_224"}, 2, ()),
        ({"id2label": {"0": "cat"}}, None, ()),
        ({}, 2, ()),
    ],
)
def test_labels_are_in_the_order_of_the_classes(config, classes, labels):
    assert labels_for(config, classes) == (labels, ())


def test_wordnet_ids_keep_their_descriptions():
    config = {
        "label_names": ["n01440764", "n01443537", "n01484850"],
        "label_descriptions": {"n01443537": "goldfish, Carassius auratus", "n01440764": "tench, Tinca tinca"},
    }
    expected = ("n01440764 tench, Tinca tinca", "n01443537 goldfish, Carassius auratus", "n01484850")
    assert labels_for(config, 3)[0] == labels_for({"pretrained_cfg": config}, 3)[0] == expected


@pytest.mark.parametrize("key", ["id2label", "label_names"])
def test_a_class_without_a_name_keeps_its_place(key):
    labels, notes = labels_for({key: {"0": "cat", "3": "owl"}}, 4)
    assert labels == ("cat", "LABEL_1", "LABEL_2", "owl")
    assert notes == (f"{key} has no name for 2 of 4 classes: using LABEL_1, LABEL_2",)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"id2label": {"1": "cat", "2": "dog"}}, "2 names, for classes 1 to 2"),
        ({"id2label": {"0": "cat"}}, "1 names, for classes 0 to 0"),
        ({"label_names": ["cat", "dog", "owl"]}, "3 names, for classes 0 to 2"),
        ({"label2id": {"cat": 0, "dog": 7}}, "2 names, for classes 0 to 7"),
    ],
)
def test_names_of_other_classes_than_the_models_are_refused(config, found):
    with pytest.raises(CheckpointError, match="does not match the classes of the weights") as caught:
        labels_for(config, 2)
    assert (caught.value.found, caught.value.expected) == (found, "2 names, for classes 0 to 1")
    [key] = config
    assert labels_for({name: value for name, value in config.items() if name != key}, 2) == ((), ())  # the fix


@pytest.mark.parametrize(
    "config",
    [
        {"id2label": {"0": "cat", "00": "dog"}},
        {"id2label": {"cat": "0"}},
        {"label2id": {"cat": None}},
        {"label2id": {"cat": math.inf}},
    ],
    ids=str,
)
def test_what_cannot_be_read_is_said(config):
    labels, notes = labels_for(config, 2)
    assert labels == ()
    assert [note for note in notes if UNNAMED in note]


def test_two_tables_that_contradict_each_other_are_said_and_the_one_of_transformers_counts():
    labels, notes = labels_for({"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 1, "dog": 0}}, 2)
    assert labels == ("cat", "dog")
    assert ["contradict each other" in note for note in notes] == [True]


def test_labels_are_those_that_transformers_writes():
    transformers = reference("transformers")
    config = transformers.ViTConfig(id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    assert labels_for(json.loads(config.to_json_string()), 2) == (("cat", "dog"), ())
    assert labels_for(transformers.ViTConfig(num_labels=5).to_dict(), 5) == ((), ())


@pytest.mark.parametrize(
    ("label", "line"),
    [
        ("tabby,\ntabby cat", "tabby, tabby cat"),
        ("a\r\nb\tc", "a b c"),
        (" wide \u3000 space\u00a0", "wide space"),
        ("sep\u2028a\u2029b\x85c\x1cd", "sep a b c d"),
        ("bell\x07, null\x00", "bell , null"),
        ("half a pair \ud83d", "half a pair"),
        ("می‌خواهم", "می‌خواهم"),
        ("\n", ""),
    ],
)
def test_a_label_is_one_line(label, line, tmp_path):
    found, _ = labels_for({"label_names": [label, "next"]}, 2)
    assert found == (line, "next")
    (tmp_path / "labels.txt").write_text("".join(f"{name}\n" for name in found), encoding="utf-8")
    assert (tmp_path / "labels.txt").read_text(encoding="utf-8").splitlines() == [line, "next"]
