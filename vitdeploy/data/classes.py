"""Maps the classes of the data to those of a model: by name if there are names, never by guessing.

A name is matched as written; then by its spelling (ignoring letter case, and spaces, hyphens and underscores except
between two digits), by the first of several synonyms ("tench, Tinca tinca"), and by its WordNet id ("n01440764_tench"),
which alone decides if both have one.
"""

import difflib
import hashlib
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitdeploy.data.annotations import UNUSED, Category
from vitdeploy.data.containers.listing import number_of, two_readings
from vitdeploy.errors import DataError

How = Literal["name", "spelling", "position", "number"]

LISTED_NAMES = 5
# The least share of names that must confirm a mapping by position: lists of COCO's classes differ in a few words
# ("sofa" and "couch"), but have the same order.
CONFIRMED = 0.9
WORDNET = re.compile(r"(n\d{8})(?:[\s_\-:.,]+(.+))?")
BY_HAND = (
    "list the model's class names in its order, one per line (source.labels of a recipe, labels.txt next to a graph), "
    "or use no labels (data.labels: none, --labels none)"
)
RENAME = f"rename the folders to the model's labels; or {BY_HAND}"
RENAME_CATEGORIES = (
    "rename the categories to the model's labels (YOLO: classes.txt next to the label files); or list the model's "
    "class names in its order, one per line (source.labels of a recipe, labels.txt next to a graph)"
)
LABELS = "labels of the data"
RENAME_LISTED = (
    "list the class names of the data in the order of their numbers, with the model's labels (classes.txt next to the "
    f"data); or {BY_HAND}"
)
NAME_YOLO = "list the class names of the data, one per line (YOLO: classes.txt next to the label files)"
NAME_NUMBERS = "list the class names of the data in order, one per line, in classes.txt next to the data"


@dataclass(frozen=True)
class ClassMap:
    """The mapping from the data's classes to the model's, and a line that describes it.

    index: the model's class for each class of the data in use: by its name, or by category id. doubtful: neither names
        nor numbers confirm it, although the model's classes have names.
    """

    how: How
    index: Mapping[Any, int]
    text: str
    doubtful: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the mapping, for the keys of stages that depend on it."""
        rows = sorted((index, str(name)) for name, index in self.index.items())
        return hashlib.sha256(repr(rows).encode()).hexdigest()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user to check the mapping. A mapping by name needs none; a doubtful mapping is a warning."""
        return () if self.how == "name" or self.doubtful else (self.text,)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A doubtful mapping, and how to settle it."""
        return (f"{self.text}; to make sure, {BY_HAND}",) if self.doubtful else ()


def match_folders(
    folders: Sequence[str], empty: Collection[str], labels: Sequence[str], classes: int | None
) -> ClassMap:
    """Return the model's class for each class folder.

    It maps by name if every folder with images is a label of the model; a subset of its classes is enough. It maps by
    position, in sorted order, if no folder is a label or the model has no labels, and there is a folder for each class,
    none of them empty (except folders named by their numbers).

    Args:
        folders: sorted names. `empty` are those without images.
        labels: the model's own, () without; `classes`: how many it has, None if unknown.

    Raises:
        DataError: a name matches several labels, or a label several folders; some folders are labels and some are not;
            no folder is a label, and the numbers differ, the order of the folders is ambiguous, or some folder may not
            be a class.
    """
    if (named := _all_named(folders, empty, labels, "class folders", RENAME)) is not None:
        return named
    count = len(labels) or classes
    if count not in (None, len(folders)):
        raise DataError(
            "the class folders do not match the model's classes",
            found=f"{len(folders)} folders ({_listed(folders)}), {count} model outputs"
            + (f" (labels {_listed(labels)})" if labels else " without labels"),
            expected="folders named like the model's labels, or one folder per model class, in order",
            fix=RENAME if labels else BY_HAND,
        )
    _check_order(folders)
    _check_filled(folders, empty, RENAME if labels else BY_HAND)
    why = "no folder has the name of a model label" if labels else "the model has no labels"
    return ClassMap(
        "position",
        {name: index for index, name in enumerate(folders)},
        f"class folders are mapped by position: {why}, so the {len(folders)} folders in sorted order are classes "
        f"0 to {len(folders) - 1}"
        + (f" ({folders[0]!r} as {labels[0]!r}, {folders[-1]!r} as {labels[-1]!r})" if labels else ""),
        doubtful=bool(labels) and not _numbered(folders),
    )


def match_words(names: Sequence[str], empty: Collection[str], labels: Sequence[str], classes: int | None) -> ClassMap:
    """Return the model's class for each name in the labels, as `match_folders`, but by name only: the order of the
    names is unknown.

    Raises:
        DataError: as `match_folders`; no name is a label of the model.
    """
    if (named := _all_named(names, empty, labels, LABELS, RENAME_LISTED)) is not None:
        return named
    raise DataError(
        "the classes of the data do not match the model's",
        found=f"{len(names)} names ({_listed(names)}), {len(labels) or classes or 'unknown'} model outputs"
        + (f" (labels {_listed(labels)})" if labels else " without labels"),
        expected="the model's labels as names, or a list of names in the order of the model's classes",
        fix=RENAME_LISTED,
    )


def match_listed(names: Sequence[str], empty: Collection[str], labels: Sequence[str], classes: int | None) -> ClassMap:
    """Return the model's class for each name of an ordered list, as `match_words`; if the model has no labels, entry n
    of the list is its class n.

    Raises:
        DataError: as `match_words`; or the class counts differ.
    """
    if labels or classes not in (None, len(names)):
        return match_words(names, empty, labels, classes)
    text = "classes are mapped by number: the model has no labels, so its class n is class n of the data"
    return ClassMap("number", {name: index for index, name in enumerate(names)}, text)


def match_numbers(
    numbers: Sequence[str], empty: Collection[str], labels: Sequence[str], classes: int | None
) -> ClassMap:
    """Return the model's class for each unnamed number: the class whose name is that number, else the same number.

    Raises:
        DataError: the model has no such class; a number is the name of one class, and the number of another.
    """
    return _by_number({number: number_of(number) or 0 for number in numbers if number not in empty}, labels, classes)


def match_categories(
    categories: Sequence[Category], used: Collection[int], labels: Sequence[str], classes: int | None
) -> ClassMap:
    """Return the model's class for each category id, as `match_folders` does for folders.

    Position is the order of the ids (COCO's 80 ids have gaps up to 90, and most models count 0..79). It is also used
    with names if nearly all of them confirm it. Categories without names are classes by number (YOLO files).

    Args:
        used: category ids that occur in objects; others may be unknown to the model.

    Raises:
        DataError: no such mapping, or more than one.
    """
    unnamed = [category.id for category in categories if not (category.name or "").strip()]
    if unnamed and len(unnamed) < len(categories):
        raise DataError(
            "some categories of the data have names and some do not",
            found=f"no name for {', '.join(map(str, unnamed[:LISTED_NAMES]))}",
            expected="names for all categories, or for none",
            fix=RENAME_CATEGORIES,
        )
    if unnamed:
        return _by_number({category.id: category.id for category in categories}, labels, classes, NAME_YOLO)
    names = {category.id: str(category.name).strip() for category in sorted(categories, key=lambda c: c.id)}
    _check_once(list(names.values()))
    known = [label if label.strip().casefold() != UNUSED else "" for label in labels]
    found, exact = _by_name(list(names.values()), known, "categories", RENAME_CATEGORIES)
    index = {id: found[name] for id, name in names.items() if name in found}
    unknown = [id for id in names if id in used and id not in index]
    if index and not unknown:
        text = _named(list(names.values()), found, len(labels), exact)
        return ClassMap("name" if exact else "spelling", index, text)
    count = len(labels) or classes
    position = {id: place for place, id in enumerate(names)}
    confirmed = all(position[id] == place for id, place in index.items()) and len(index) >= CONFIRMED * len(names)
    if count == len(names) and (not index or confirmed):
        text = _by_position_text(names, unknown, index, labels)
        return ClassMap("position", position, text, doubtful=bool(labels) and not index)
    if index:
        missing = [names[id] for id in unknown]
        raise _some_unknown("categories", missing, list(found), labels, RENAME_CATEGORIES)
    raise DataError(
        "the classes of the data cannot be mapped to the model's",
        found=f"{len(names)} categories ({_listed(list(names.values()))}), {count or 'unknown'} model classes"
        + (f" (labels {_listed(labels)})" if labels else " without labels"),
        expected="categories named like the model's labels, or one category per model class, in order",
        fix=RENAME_CATEGORIES if labels else BY_HAND,
    )


def match_some(names: Sequence[str], labels: Sequence[str], what: str) -> ClassMap | None:
    """Return the model's class for each name that is a label, by name only; None if no name is. The caller handles the
    others.

    Args:
        what: the kind of names, a plural noun.

    Raises:
        DataError: a name matches several labels, or a label several names.
    """
    found, exact = _by_name(names, labels, what, f"rename the {what} to the model's labels")
    return (
        ClassMap("name" if exact else "spelling", found, _named(list(found), found, len(labels), exact))
        if found
        else None
    )


def differing(ours: Sequence[str], theirs: Sequence[str]) -> str | None:
    """Return evidence that two models number their classes differently: a label with different positions."""
    others = _Labels(theirs)
    for index, label in enumerate(ours):
        there = others.fitting(label)
        if there and index not in there and label.strip().casefold() != UNUSED:
            return f"class {index} is {label!r} in one model and {theirs[index]!r} in the other"
    return None


def _all_named(
    names: Sequence[str], empty: Collection[str], labels: Sequence[str], what: str, fix: str
) -> ClassMap | None:
    """Return the mapping by name; None if no name is a label. Raises DataError if only some are, `empty` ones aside."""
    found, exact = _by_name(names, labels, what, fix)
    unknown = [name for name in names if name not in found and name not in empty]
    if found and unknown:
        raise _some_unknown(what, unknown, found, labels, fix)
    text = _named(names, found, len(labels), exact)
    return ClassMap("name" if exact else "spelling", found, text) if found else None


def _by_name(names: Sequence[str], labels: Sequence[str], what: str, fix: str) -> tuple[dict[str, int], bool]:
    """Return the class of each name that is a label, and whether all are spelled exactly like the labels."""
    known, found, exact = _Labels(labels), {}, True
    for name in names:
        same = [index for index, label in enumerate(labels) if label and label.strip() == name.strip()]
        fitting = same or known.fitting(name)
        if len(fitting) > 1:
            shown = ", ".join(f"class {index} ({labels[index]!r})" for index in fitting[:LISTED_NAMES])
            raise _ambiguous(what, f"{name!r} matches {shown}", fix)
        if fitting:
            found[name], exact = fitting[0], exact and bool(same)
    taken: dict[int, str] = {}
    for name, index in found.items():
        if index in taken:
            raise _ambiguous(what, f"{taken[index]!r} and {name!r} both match class {index} ({labels[index]!r})", fix)
        taken[index] = name
    return found, exact


class _Name(NamedTuple):
    """The keys of a name: its WordNet id, its spelling after the id, and that of its first synonym if it has
    several."""

    id: str
    whole: str
    first: str


class _Labels:
    """The labels of a model by the keys of each."""

    def __init__(self, labels: Sequence[str]) -> None:
        self._names = [_known(label) for label in labels]
        self._places: dict[tuple[str, str], list[int]] = {}
        for index, name in enumerate(self._names):
            for kind, form in zip(_Name._fields, name, strict=True):
                if form:
                    self._places.setdefault((kind, form), []).append(index)

    def fitting(self, text: str) -> list[int]:
        """Return the classes that a name may match. A first synonym is compared with whole names only: two synonym
        lists with the same start ("crane, bird" and "crane, machine") are different classes. If both have WordNet ids,
        only these decide."""
        own = _known(text)
        keys = (("id", own.id), ("whole", own.whole), ("first", own.whole), ("whole", own.first))
        found = {place for key in keys for place in self._places.get(key, ())}
        return sorted(place for place in found if not (own.id and self._names[place].id not in ("", own.id)))


def _known(name: str) -> _Name:
    text = unicodedata.normalize("NFKC", name).strip().casefold()
    match = WORDNET.fullmatch(text)
    id, text = (match[1], match[2] or "") if match else ("", text)
    first, comma, _ = text.partition(",")
    return _Name(id, _spelt(text), _spelt(first) if comma else "")


def _spelt(text: str) -> str:
    """Return the name without separators, except between two digits: 1_12 and 11_2 differ. Leading zeros of a number
    are dropped."""
    joined = re.sub(r"(?<!\d)_|_(?!\d)", "", re.sub(r"[\s_\-]+", "_", text))
    return (joined.lstrip("0") or "0") if joined.isdecimal() else joined


def _check_order(folders: Sequence[str]) -> None:
    """Reject an ambiguous order: tools sort names by characters (torchvision) or by numbers (timm)."""
    natural = sorted(folders, key=_natural)
    if list(folders) == natural:
        return
    place = next(i for i, (a, b) in enumerate(zip(folders, natural, strict=True)) if a != b)
    raise DataError(
        "the order of the class folders is ambiguous",
        found=f"class {place} is {folders[place]!r} sorted by characters (as torchvision does), "
        f"{natural[place]!r} sorted by numbers (as timm does)",
        expected="folders named like the model's labels",
        fix=f"list the folder names in the order used in training: {BY_HAND}",
    )


def _check_filled(folders: Sequence[str], empty: Collection[str], fix: str) -> None:
    """Reject empty folders in a mapping by position: a folder without images may not be a class (__MACOSX). Folders
    named 0, 1, 2 and so on are classes."""
    without = [name for name in folders if name in empty]
    if without and not _numbered(folders):
        raise DataError(
            "cannot tell whether folders without images are classes of the model",
            found=f"{_listed(without)}, next to {_listed([name for name in folders if name not in empty])}",
            expected="images in each folder, since classes are mapped by position",
            fix=f"remove folders that are not classes; or {fix}",
        )


def _numbered(folders: Sequence[str]) -> bool:
    """Whether folders are named by their positions."""
    return all(name.isdecimal() and int(name) == number for number, name in enumerate(folders))


def _natural(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name.lower())
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def _by_number(
    numbers: Mapping[Any, int], labels: Sequence[str], classes: int | None, fix: str = NAME_NUMBERS
) -> ClassMap:
    """Return the class for each number of the data. `numbers`: by the data's own key."""
    count, values = len(labels) or classes, [number_of(label.strip()) for label in labels]
    named = {key: values.index(number) for key, number in numbers.items() if values.count(number) == 1}
    outside = [
        number
        for number in numbers.values()
        if (count is not None and number >= count) or (labels and labels[number].strip().casefold() == UNUSED)
    ]
    if len(named) == len(numbers):
        other = next((key for key, place in named.items() if place != numbers[key]), None)
        if other is not None and not outside:
            place, number = named[other], numbers[other]
            raise two_readings(
                f"{other}: class {place}, whose name is {labels[place]!r}, or class {number}, whose name is "
                f"{labels[number]!r}"
            )
        return ClassMap("name", named, f"classes are mapped by name: {len(named)} numbers of the data are class names")
    if outside:
        raise DataError(
            f"class {outside[0]} of the data has no counterpart in the model",
            found=f"{count} model classes" + (f" (labels {_listed(labels)})" if labels else ""),
            expected="class numbers of the model, or names",
            fix=fix,
        )
    text = "classes are mapped by number: the data has no class names, so its class n is the model's class n"
    return ClassMap("number", dict(numbers), text)


def _check_once(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise _ambiguous("categories", f"several categories have the name {twice[0]!r}", RENAME_CATEGORIES)


def _named(names: Sequence[str], found: Mapping[str, int], labels: int, exact: bool) -> str:
    text = f"classes are mapped by {'name' if exact else 'spelling'}: {len(found)} of the data"
    if len(found) < labels:
        text += f", {labels:,} of the model"
    left = [name for name in names if name not in found]
    return text + (f"; not among the model's labels and without images: {_listed(left)}" if left else "")


def _by_position_text(
    names: Mapping[int, str], unknown: Sequence[int], index: Mapping[int, int], labels: Sequence[str]
) -> str:
    text = "categories are mapped by position, in the order of their ids: "
    if not index:
        why = "no category has the name of a model label" if labels else "the model has no labels"
        return f"{text}{why}, and both have {len(names)}"
    places = {id: place for place, id in enumerate(names)}
    taken = ", ".join(f"{names[id]!r} as {labels[places[id]]!r}" for id in unknown)
    return f"{text}{len(index)} of {len(names)} names confirm it; the others: {taken}"


def _some_unknown(
    what: str, unknown: Sequence[str], found: Collection[str], labels: Sequence[str], fix: str
) -> DataError:
    return DataError(
        f"some {what} are labels of the model, others are not",
        found=f"{len(found)} match; no match for: "
        f"{', '.join(_with_nearest(name, labels) for name in unknown[:LISTED_NAMES])}"
        + (f" and {len(unknown) - LISTED_NAMES} more" if len(unknown) > LISTED_NAMES else ""),
        expected=f"all of them named like labels of the model ({_listed(labels)})",
        fix=fix,
    )


def _with_nearest(name: str, labels: Sequence[str]) -> str:
    spelt = {form: label for label in labels for form in sorted(_known(label)) if form}
    for form in sorted(_known(name), key=len, reverse=True):
        if near := difflib.get_close_matches(form, spelt, 1, 0.6):
            return f"{name!r} (nearest: {spelt[near[0]]!r})"
    return repr(name)


def _ambiguous(what: str, found: str, fix: str) -> DataError:
    return DataError(
        f"the {what} match the model's labels in more than one way",
        found=found,
        expected="one label for each, without repeats",
        fix=fix,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED_NAMES]) + (
        f" and {len(names) - LISTED_NAMES} more" if len(names) > LISTED_NAMES else ""
    )
