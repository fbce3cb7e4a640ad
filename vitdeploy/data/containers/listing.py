"""The images of a data set as columns, in little memory, and the classes that their labels are of."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.held import Held
from vitdeploy.data.label_file import read_labels
from vitdeploy.errors import DataError
from vitdeploy.paths import is_file

CLASSES_FILE = "classes.txt"
NO_LABELS = "leave labels out (data.labels: none, --labels none)"
# "folders": sorted names of folders; "words": sorted names, as labels have them; "list": names in the order of their
# numbers; "numbers": numbers that nothing names, in ascending order.
ClassKind = Literal["folders", "words", "list", "numbers"]


@dataclass(frozen=True)
class Classes:
    """The classes that labels are of; a label is an index of `names`."""

    names: tuple[str, ...] = ()
    kind: ClassKind = "folders"


class Holder(Protocol):
    """Knows where the bytes of all images of a listing lie."""

    def at(self, index: int, name: str) -> Held | None:
        """Of one image; None if it is the file of its name."""

    def picked(self, places: npt.NDArray[np.int64]) -> Holder:
        """The same of these images alone, in that order."""


class Names:
    """Names, packed into one array of bytes."""

    def __init__(self) -> None:
        self.packed, self._ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self.packed += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self.packed))

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """int64 [n + 1]: where each begins, and the last ends."""
        return np.frombuffer(self._ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1


@dataclass(frozen=True)
class Listing:
    """All images of a data set, in its order. `root`: the folder that names are below. `labels`: int32 [n]."""

    root: Path
    names: Names
    labels: npt.NDArray[np.int32] | None
    classes: Classes
    holder: Holder


class LabelColumn:
    """Labels as they are read, numbers or names. `source`: what messages call the data."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._codes = array("i")
        self._known: dict[int | str, int] = {}

    def add(self, label: int | str, name: str) -> None:
        """The label of the image `name`.

        Raises:
            DataError: it is below zero, which says that it is unknown.
        """
        if isinstance(label, int) and not 0 <= label < 1 << 31:
            raise DataError(
                f"the label of {name} is no number of a class",
                found=str(label)[:40],
                wanted="a number from 0 on, or a name; below zero it says that nobody knows the class",
                fix=f"take images with labels; or {NO_LABELS}",
            )
        self._codes.append(self._known.setdefault(label, len(self._known)))

    def __len__(self) -> int:
        return len(self._codes)

    def finish(self, names: tuple[str, ...] | None) -> tuple[npt.NDArray[np.int32], Classes]:
        """The label of each image, int32 [n], and the classes. `names`: those that the data lists, in their order.

        Raises:
            DataError: numbers and names are mixed; a label that is not in the list.
        """
        kinds = Counter(type(each) for each in self._known)
        if len(kinds) > 1:
            number = next(each for each in self._known if isinstance(each, int))
            name = next(each for each in self._known if isinstance(each, str))
            raise DataError(
                f"some labels of {self._source} are numbers and some are names",
                found=f"{number} and {name!r}",
                wanted="one or the other",
                fix="write all of them in one way",
            )
        if names is not None:
            order, classes = [self._place(each, names) for each in self._known], Classes(names, "list")
        else:
            ordered = sorted(self._known)
            places = {each: place for place, each in enumerate(ordered)}
            order = [places[each] for each in self._known]
            classes = Classes(tuple(map(str, ordered)), "numbers" if int in kinds else "words")
        return np.array(order, np.int32)[np.frombuffer(self._codes, np.int32)], classes

    def _place(self, label: int | str, names: tuple[str, ...]) -> int:
        if isinstance(label, int) and label < len(names):
            return label
        if isinstance(label, str) and label in names:
            return names.index(label)
        raise DataError(
            f"a label of {self._source} is none of its classes",
            found=repr(label)[:80],
            wanted=f"one of {len(names)} classes: {', '.join(names[:5])}" + (" ..." if len(names) > 5 else ""),
            fix=f"mend the label, or the list of names ({CLASSES_FILE}, or the features of the data set)",
        )


def read_label(text: str) -> int | str:
    """A label as a text says it: digits are a number, all else is a name."""
    text = text.strip()
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text) else text


def label_in_json(content: bytes, name: str) -> int | str | None:
    """The label in the JSON object of a sample; None if it has none.

    Raises:
        DataError: no JSON object; labels that differ, or are neither numbers nor names.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DataError(f"{name} is no JSON object", found=repr(content[:60]), wanted='an object such as {"label": 3}')
    found = {key: document[key] for key in ("cls", "label", "class") if document.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise DataError(
                f"the label in {name} is neither a number nor a name",
                found=f"{key}: {str(value)[:60]}",
                wanted="one class of one image",
                fix=NO_LABELS,
            )
    distinct = {read_label(value) if isinstance(value, str) else value for value in found.values()}
    if len(distinct) > 1:
        raise DataError(f"{name} has labels that differ", found=str(found)[:120], wanted="one of them")
    return distinct.pop() if distinct else None


def listed_names(folder: Path) -> tuple[str, ...] | None:
    """The names in classes.txt of the folder that the data lies in, in their order; None without such a file.

    Raises:
        DataError: it is not UTF-8, has an empty line, or a name twice.
    """
    file = folder / CLASSES_FILE
    return check_names(read_labels(file), str(file)) if is_file(file) else None


def check_names(names: Iterable[str], source: str) -> tuple[str, ...]:
    """The names of a list, each of them once; DataError if they are not."""
    found = tuple(str(name).strip() for name in names)
    twice = [name for name, count in Counter(found).items() if count > 1]
    if not found or "" in found or twice:
        raise DataError(
            f"the class names of {source} are no such list",
            found=f"{twice[0]!r} twice" if twice and twice[0] else "an empty name",
            wanted="one name for each class, and another one for another",
        )
    return found


def joined(parts: Sequence[Classes], source: Path) -> Classes:
    """The classes of several parts of one data set.

    Raises:
        DataError: they name their classes in different ways.
    """
    kinds = {classes.kind for classes in parts}
    lists = {classes.names for classes in parts if classes.kind == "list"}
    if len(kinds) > 1 or len(lists) > 1:
        raise DataError(
            f"the parts of {source} do not have the same classes",
            found="; ".join(f"{len(c.names)} as {c.kind}: {', '.join(c.names[:3])}" for c in parts),
            wanted="one list of classes for all",
            fix=f"put one {CLASSES_FILE} beside each",
        )
    first = parts[0]
    if first.kind == "list":
        return first
    every = {name for classes in parts for name in classes.names}
    return replace(first, names=tuple(sorted(every, key=int if first.kind == "numbers" else None)))
