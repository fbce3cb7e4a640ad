"""Classes of the data and of a model: by name, by position only where nothing speaks against it, never by a guess."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitdeploy.data.annotations import Category
from vitdeploy.data.classes import differing, match_categories, match_folders
from vitdeploy.errors import DataError

PETS = ("dog", "cat", "bird")
IMAGENET = ("tench, Tinca tinca", "goldfish, Carassius auratus", "great white shark, white shark", "hot dog, hotdog")
COCO = (Category(1, "person"), Category(2, "bicycle"), Category(13, "stop sign"))
NUMBERED = (Category(0, None), Category(2, None))


def folders(names, labels, classes=None, empty=()):
    found = match_folders(sorted(names), set(empty), labels, classes)
    return found.how, {name: found.index[name] for name in names if name in found.index}


# --- class folders ----------------------------------------------------------------------------------------------------


@given(st.permutations([f"class {i}" for i in range(12)]), st.integers(1, 12))
def test_whatever_the_order_of_the_labels_folders_are_found_by_their_names(labels, count):
    how, index = folders(labels[:count], labels)
    assert (how, index) == ("name", {name: i for i, name in enumerate(labels[:count])})


@pytest.mark.parametrize(
    ("names", "labels", "index"),
    [
        (["Dog", "CAT", "bird"], PETS, [0, 1, 2]),
        (["great_white_shark", "tench"], IMAGENET, [2, 0]),
        (["great-white-shark", "Tench,_Tinca_tinca"], IMAGENET, [2, 0]),
        (["hot_dog"], IMAGENET, [3]),
        (["n01440764", "n01443537"], ["n01443537 goldfish", "n01440764 tench, Tinca tinca"], [1, 0]),
        (["n01440764_tench", "n01443537-goldfish"], IMAGENET, [0, 1]),
        (["n02085620-Chihuahua"], ["basset", "Chihuahua"], [1]),
        (["n01443537_goldfish"], ["n01440764", "n01443537"], [1]),
        (["ＣＡＴ"], PETS, [1]),
        (["n02012849_crane", "n03126707_crane"], ["n03126707 crane", "n02012849 crane"], [1, 0]),
        (["01", "02", "10"], ["1", "10", "2"], [0, 2, 1]),
        (["CLASS_1_1", "class_11"], ["class 11", "class 1-1"], [1, 0]),
    ],
)
def test_a_name_is_known_by_its_spelling_its_first_synonym_and_its_wordnet_id(names, labels, index):
    assert folders(names, labels) == ("spelling", dict(zip(names, index, strict=True)))


def test_a_name_as_it_is_written_counts_before_its_spelling():
    assert folders(["maillot", "maillot, tank suit"], ["maillot, tank suit", "maillot"])[1]["maillot"] == 1
    assert folders(["Hot dog", "hot_dog"], ["hot_dog", "Hot dog"])[1] == {"Hot dog": 1, "hot_dog": 0}


@pytest.mark.parametrize(
    ("names", "labels", "found"),
    [
        (["crane"], ["crane", "tench", "crane"], "'crane' matches class 0 ('crane'), class 2 ('crane')"),
        (
            ["crane"],
            ["crane, bird", "crane, machine"],
            "'crane' matches class 0 ('crane, bird'), class 1 ('crane, machine')",
        ),
        (["Hot dog", "hot_dog"], ["hotdog", "cat"], "'Hot dog' and 'hot_dog' both match class 0 ('hotdog')"),
        (
            ["n01440764_goldfish"],
            ["n01440764 tench", "goldfish"],
            "matches class 0 ('n01440764 tench'), class 1 ('goldfish')",
        ),
    ],
)
def test_what_may_be_meant_in_two_ways_is_refused(names, labels, found):
    with pytest.raises(DataError, match="in more than one way") as caught:
        folders(names, labels)
    assert found in caught.value.found
    assert "rename the folders" in caught.value.fix


def test_some_that_are_labels_and_some_that_are_not_are_refused_with_the_nearest():
    with pytest.raises(DataError, match="some class folders are labels of the model, others are not") as caught:
        folders(["dogs", "cat", "zeppelin"], PETS)
    assert caught.value.found == "1 match; no match for: 'dogs' (nearest: 'dog'), 'zeppelin'"


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("n03126707_crane", "n02012849 crane"),  # two ids: the machine, the bird
        ("crane, bird", "crane, machine"),
        ("1_12", "11_2"),
        ("class_1_1", "class_11"),
    ],
)
def test_what_is_alike_in_a_part_alone_is_another_thing(name, label):
    with pytest.raises(DataError, match="others are not") as caught:
        folders([name, "dog"], [label, "dog"])
    assert caught.value.found.startswith(f"1 match; no match for: {name!r}")
    assert differing([name, "dog"], ["dog", label]) == f"class 1 is 'dog' in one model and {label!r} in the other"


def test_folders_without_images_need_no_label():
    assert folders(["dog", "rubbish"], PETS, empty=["rubbish"]) == ("name", {"dog": 0})
    assert "rubbish" in match_folders(["dog", "rubbish"], {"rubbish"}, PETS, 3).text
    with pytest.raises(DataError, match="others are not"):
        folders(["dog", "images"], PETS, empty=["dog"])


@pytest.mark.parametrize(
    ("names", "labels", "classes", "says"),
    [
        (["n01", "n02", "n03"], PETS, 3, "no folder has the name of a model label"),
        (["a", "b"], (), 2, "the model has no labels"),
        (["a", "b"], (), None, "the model has no labels"),
        ([str(i) for i in range(10)], (), 10, "the 10 folders in sorted order are classes 0 to 9"),
    ],
)
def test_position_counts_where_no_name_does_and_is_told(names, labels, classes, says):
    found = match_folders(sorted(names), (), labels, classes)
    assert (found.how, list(found.index.values())) == ("position", list(range(len(names))))
    # Where the model has words for its classes, nothing but their number speaks for it.
    assert [says in note for note in (found.warnings if labels else found.notes)] == [True]
    assert len(found.notes) + len(found.warnings) == 1


@pytest.mark.parametrize(("labels", "classes"), [((), 3), ((), None), (PETS, 3)])
def test_position_does_not_count_where_a_folder_may_be_a_class_or_not(labels, classes):
    with pytest.raises(DataError, match="folders without images") as caught:
        folders(["__MACOSX", "x", "y"], labels, classes, empty=["__MACOSX"])
    assert caught.value.found == "__MACOSX, next to x, y"
    assert folders(["__MACOSX", "x", "y"], ["__MACOSX", "x", "y"], empty=["__MACOSX"])[0] == "name"  # the fix
    assert folders(["x", "y"], (), 2)[0] == "position"  # the other one
    assert folders(["00", "01", "02"], labels, classes, empty=["00", "01"])[0] == "position"  # they say so themselves


def test_names_need_no_note_and_other_spellings_do():
    assert match_folders(["cat"], (), PETS, 3).notes == ()
    assert "1 of the data, 3 of the model" in match_folders(["Cat"], (), PETS, 3).notes[0]


@pytest.mark.parametrize(("labels", "classes"), [(PETS, 3), ((), 3)])
def test_another_number_of_folders_is_refused(labels, classes):
    with pytest.raises(DataError, match="do not match the model") as caught:
        folders(["x", "y"], labels, classes)
    assert caught.value.found.startswith("2 folders (x, y), 3 model outputs")
    assert "source.labels" in caught.value.fix


@pytest.mark.parametrize(
    "names",
    [[str(i) for i in range(11)], [f"class{i}" for i in range(12)], ["Zebra", "ape"]],
    ids=["0-10", "class", "Z"],
)
def test_an_order_that_tools_disagree_on_is_refused(names):
    with pytest.raises(DataError, match="the order of the class folders is ambiguous") as caught:
        folders(names, (), len(names))
    assert "torchvision" in caught.value.found
    assert "timm" in caught.value.found
    assert folders(names, names)[0] == "name"  # the fix


def test_numbers_of_one_length_have_one_order():
    assert folders([f"{i:02}" for i in range(11)], (), 11)[0] == "position"


# --- categories -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("categories", "labels", "how", "index"),
    [
        (COCO, ["bicycle", "stop sign", "cat", "person "], "name", {1: 3, 2: 0, 13: 1}),
        (COCO, ["bicycle", "STOP_SIGN", "cat", "person"], "spelling", {1: 3, 2: 0, 13: 1}),
        (COCO, ["a", "b", "c"], "position", {1: 0, 2: 1, 13: 2}),
        (NUMBERED, ["person", "bicycle", "car"], "number", {0: 0, 2: 2}),
        (NUMBERED, (), "number", {0: 0, 2: 2}),
    ],
)
def test_categories_are_found_by_name_then_position_and_numbers_by_number(categories, labels, how, index):
    found = match_categories(categories, {category.id for category in categories}, labels, None)
    assert (found.how, found.index) == (how, index)


def test_position_counts_beside_names_where_nearly_all_confirm_it():
    names = [f"thing {i}" for i in range(20)]
    categories = [Category(i, "couch" if i == 7 else name) for i, name in enumerate(names)]
    found = match_categories(categories, set(range(20)), names, 20)
    assert (found.how, found.index[7]) == ("position", 7)
    assert "19 of 20 names confirm it; the others: 'couch' as 'thing 7'" in found.notes[0]
    swapped = [names[1], names[0], *names[2:]]
    with pytest.raises(DataError, match="some categories are labels of the model, others are not"):
        match_categories(categories, set(range(20)), swapped, 20)


def test_a_category_that_no_object_is_of_needs_no_label():
    categories = (Category(0, "objects"), Category(1, "person"))
    assert match_categories(categories, {1}, ["cat", "person"], 2).index == {1: 1}
    with pytest.raises(DataError, match="some categories"):
        match_categories(categories, {0, 1}, ["cat", "person"], 2)


@pytest.mark.parametrize(
    ("categories", "labels", "classes", "message"),
    [
        (COCO, ["bicycle", "person", "bus"], 3, "some categories are labels of the model, others are not"),
        (COCO, ["person", "bike", "stop sign"], 3, "some categories are labels of the model, others are not"),
        (COCO, ["a", "b"], 2, "cannot be mapped to the model's"),
        (COCO, [f"class {i}" for i in range(14)], 14, "cannot be mapped to the model's"),
        (COCO, (), 91, "cannot be mapped to the model's"),
        (COCO, ["person", "person", "bicycle", "stop sign"], 4, "in more than one way"),
        ((Category(1, "cat"), Category(2, "cat")), ["cat"], 1, "in more than one way"),
        ((Category(1, "cat"), Category(2, " ")), ["cat", "dog"], 2, "some do not"),
        (NUMBERED, ["person", "bicycle"], 2, "class 2 of the data has no counterpart"),
        (NUMBERED, ["N/A", "person", "bicycle"], 3, "class 0 of the data has no counterpart"),
        (NUMBERED, (), 2, "class 2 of the data has no counterpart"),
    ],
)
def test_categories_that_do_not_fit_are_not_guessed(categories, labels, classes, message):
    with pytest.raises(DataError, match=message) as caught:
        match_categories(categories, {category.id for category in categories}, labels, classes)
    assert caught.value.fix


def test_a_mapping_is_known_by_its_digest():
    ours, same, other = (match_folders(["a", "b"], (), labels, 2) for labels in ("ab", "ab", "ba"))
    assert ours.digest == same.digest != other.digest


# --- two models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (PETS, PETS, None),
        (PETS, ("Dog", "CAT", "bird"), None),
        (PETS, ("x", "y", "z"), None),
        (PETS, (), None),
        (["crane", "tench", "crane"], ["crane", "tench", "crane"], None),
        (PETS, ("cat", "dog", "bird"), "class 0 is 'dog' in one model and 'cat' in the other"),
        (["N/A", "N/A"], ["a", "N/A"], None),
    ],
)
def test_two_models_with_their_classes_in_another_order_are_told(ours, theirs, says):
    assert differing(ours, theirs) == says
