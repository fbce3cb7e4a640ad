"""Lists of samples in containers: names, labels and classes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.held import Container, HeldImage, too_large
from vitdeploy.data.label_file import DECIMAL, Repairs, read_labels
from vitdeploy.errors import DataError, ImageError, MissingPackageError
from vitdeploy.extensions import lazy
from vitdeploy.paths import is_file
from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = lazy("pyarrow"), lazy("pyarrow.parquet")

# --- The images of a data set as columns, in little memory, and the classes of their labels ---------------------------


CLASSES_FILE = "classes.txt"
NO_LABELS = "use no labels (data.labels: none, --labels none)"
# Usual column headers, letters only. The first match counts; names come before numbers.
LABEL_COLUMNS = (
    *("classname", "labelname", "categoryname", "label", "cls", "class", "category", "target", "labels", "targets"),
    *("classes", "categories", "tag", "groundtruth", "classid", "labelid", "categoryid", "targetid", "classidx"),
    *("labelidx", "classindex", "labelindex"),
)
# "folders": sorted names of folders; "words": sorted names from the labels; "list": names in the order of their
# numbers; "numbers": unnamed numbers, in ascending order.
ClassKind = Literal["folders", "words", "list", "numbers"]


@dataclass(frozen=True)
class DataClasses:
    """The classes of labels; a label is an index into `names`. `notes`: repairs made while reading them."""

    names: tuple[str, ...] = ()
    kind: ClassKind = "folders"
    notes: tuple[str, ...] = field(default=(), compare=False)


class Holder(Protocol):
    """The locations of the bytes of all images of a listing."""

    def at(self, index: int, name: str) -> HeldImage | None:
        """Return the location of one image; None if it is a file with its name."""

    def picked(self, places: npt.NDArray[np.int64]) -> Holder:
        """Return the locations of these images only, in that order."""


@dataclass(frozen=True, eq=False)
class Places:
    """The container of each image, and two numbers for its position, from which `held` creates the location."""

    containers: Sequence[Container]
    which: npt.NDArray[np.int32]
    first: npt.NDArray[np.integer]
    second: npt.NDArray[np.integer]
    held: Callable[[Container, int, int], HeldImage]

    def at(self, index: int, name: str) -> HeldImage:
        return self.held(self.containers[self.which[index]], int(self.first[index]), int(self.second[index]))

    def picked(self, places: npt.NDArray[np.int64]) -> Places:
        return Places(self.containers, self.which[places], self.first[places], self.second[places], self.held)


class NameColumn:
    """Names, packed into one array of bytes."""

    def __init__(self) -> None:
        self._packed, self._ends = bytearray(), array("q", [0])

    def add(self, name: str) -> None:
        self._packed += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._packed))

    def encoded(self, index: int) -> bytes:
        return bytes(self._packed[self._ends[index] : self._ends[index + 1]])

    def __getitem__(self, index: int) -> str:
        return self.encoded(index).decode("utf-8", "surrogateescape")

    def __len__(self) -> int:
        return len(self._ends) - 1


@dataclass(frozen=True)
class Listing:
    """All images of a data set, in its order. `root`: the folder that names are relative to. `labels`: int32 [n]."""

    root: Path
    names: NameColumn
    labels: npt.NDArray[np.int32] | None
    classes: DataClasses
    holder: Holder


class LabelColumn:
    """Labels as read, numbers or names. `source`: the name of the data for messages; `repairs`: made by readers."""

    def __init__(self, source: Path) -> None:
        self._source, self.repairs = source, Repairs()
        self._codes = array("i")
        self._known: dict[int | str, int] = {}

    def add(self, label: int | str, name: str) -> None:
        """Add the label of the image `name`.

        Raises:
            DataError: it is negative, which means unknown.
        """
        number = number_of(label)
        if number is not None and not 0 <= number < 1 << 31:
            raise DataError(
                f"the label of {name} is not a class number",
                found=str(label)[:40],
                expected="a number >= 0, or a name (negative numbers mean an unknown class)",
                fix=f"use labelled images; or {NO_LABELS}",
            )
        self._codes.append(self._known.setdefault(label, len(self._known)))

    def finish(
        self, listed: Callable[[], tuple[str, ...] | None], numbered: bool = False
    ) -> tuple[npt.NDArray[np.int32] | None, DataClasses]:
        """Return the label of each image, int32 [n], and the classes; None and no classes if no label was added.

        Args:
            listed: returns the names that the data lists, in order; a label may be one of them, or its number.
                numbered: labels are always numbers.

        Raises:
            DataError: a label that is not in the list, or that is the name of one class and the number of another.
        """
        if not self._codes:
            return None, DataClasses(notes=self.repairs.notes)
        names, codes = listed(), np.frombuffer(self._codes, np.int32)
        values = {label: number_of(label) for label in self._known}
        for label, code in self._known.items():
            if isinstance(label, str) and "." in label and values[label] is not None:
                self.repairs.add(DECIMAL, label, int((codes == code).sum()))
        if names is not None:
            order, classes = self._places(values, names, numbered), DataClasses(names, "list", self.repairs.notes)
        else:
            only = None not in values.values()
            ordered = sorted(values, key=lambda label: (values[label], str(label)) if only else (0, str(label)))
            places = {label: place for place, label in enumerate(ordered)}
            order = [places[label] for label in self._known]
            classes = DataClasses(tuple(map(str, ordered)), "numbers" if only else "words", self.repairs.notes)
        return np.array(order, np.int32)[codes], classes

    def _places(self, values: Mapping[int | str, int | None], names: tuple[str, ...], numbered: bool) -> list[int]:
        by_number = [place if place is not None and place < len(names) else None for place in values.values()]
        there = {name: place for place, name in enumerate(names)}
        by_name = [None if numbered else there.get(str(label)) for label in values]
        if None not in by_name and None not in by_number and by_name != by_number:
            doubtful = next(label for label, a, b in zip(values, by_name, by_number, strict=True) if a != b)
            number = values[doubtful] or 0
            raise two_readings(
                f"{doubtful}: the class of that name, or number {number}, whose name is {names[number]!r}"
            )
        likely = max(by_name, by_number, key=lambda places: len(places) - places.count(None))
        chosen = [place for place in likely if place is not None]
        if len(chosen) == len(values):
            return chosen
        wrong = [*values][likely.index(None)]
        raise DataError(
            f"a label of {self._source} is not one of its classes",
            found=repr(wrong)[:80],
            expected=f"one of {len(names)} classes: {', '.join(names[:5])}" + (" ..." if len(names) > 5 else ""),
            fix=f"correct the label, or the list of names ({CLASSES_FILE}, or the features of the data set)",
        )


def column_of(row: Sequence[str], names: Sequence[str]) -> int | None:
    """Return the column with the first matching name."""
    low = [re.sub(r"[^a-z]", "", cell.lower()) for cell in row]
    return next((low.index(name) for name in names if name in low), None)


def number_of(label: int | str) -> int | None:
    """Return the number of a label, also if written as text; None for a name."""
    if isinstance(label, int):
        return label
    match = re.fullmatch(r"([+-]?[0-9]{1,18})(\.0*)?", label)
    return None if match is None else int(match[1])


def same_label(one: int | str, other: int | str) -> bool:
    """Whether two labels are equal, however their numbers are written."""
    return one == other or (number_of(one) is not None and number_of(one) == number_of(other))


def read_label(text: str) -> int | str:
    """Return the label in a text: a number if written canonically, else a name, which may consist of digits (03)."""
    text = text.strip()
    number = number_of(text)
    return text if number is None or str(number) != text else number


def two_readings(found: str) -> DataError:
    """Return the error for numbers that may be class names or class numbers."""
    return DataError(
        "numeric labels are ambiguous",
        found=found,
        expected="labels that mean the same class as a name and as a number",
        fix=f"if labels are names: write {CLASSES_FILE} next to the data with the lines 0, 1, 2 and so on, up to the "
        "largest; if they are class numbers of the model: give the classes non-numeric names, in order (source.labels "
        "of a recipe, labels.txt next to a graph)",
    )


def label_in_json(content: bytes, name: str) -> int | str | None:
    """Return the label in the JSON object of a sample; None without a label.

    Raises:
        DataError: not a JSON object; contradictory labels, or labels that are neither numbers nor names.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DataError(
            f"{name} is not a JSON object", found=repr(content[:60]), expected='an object such as {"label": 3}'
        )
    keys = [key for key in document if document[key] is not None]
    other = column_of(keys, LABEL_COLUMNS)
    usual = [key for key in ("cls", "label", "class") if key in keys]
    found = {key: document[key] for key in usual or ([] if other is None else [keys[other]])}
    for key, value in found.items():
        if isinstance(value, float) and value.is_integer():
            found[key] = f"{value:.1f}"
        elif isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise DataError(
                f"the label in {name} is neither a number nor a name",
                found=f"{key}: {str(value)[:60]}",
                expected="one class per image",
                fix=NO_LABELS,
            )
    labels = [read_label(value) if isinstance(value, str) else value for value in found.values()]
    if not all(same_label(label, labels[0]) for label in labels):
        raise DataError(f"{name} has contradictory labels", found=str(found)[:120], expected="one label")
    return labels[0] if labels else None


def listed_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names in classes.txt of the data's folder, in order; None without such a file.

    Raises:
        DataError: it is not UTF-8, has an empty line, or a name twice.
    """
    file = folder / CLASSES_FILE
    return check_names(read_labels(file), str(file)) if is_file(file) else None


def check_names(names: Iterable[str], source: str) -> tuple[str, ...]:
    """Return the names of a list; DataError unless they are unique and not empty."""
    found = tuple(str(name).strip() for name in names)
    twice = [name for name, count in Counter(found).items() if count > 1]
    if not found or "" in found or twice:
        raise DataError(
            f"invalid list of class names in {source}",
            found=f"{twice[0]!r} twice" if twice and twice[0] else "an empty name",
            expected="unique names, one per class",
        )
    return found


def joined(parts: Sequence[DataClasses], source: Path) -> DataClasses:
    """Return the classes of several parts of one data set.

    Raises:
        DataError: their class names differ.
    """
    kinds = {classes.kind for classes in parts}
    lists = {classes.names for classes in parts if classes.kind == "list"}
    if len(kinds) > 1 or len(lists) > 1:
        raise DataError(
            f"the parts of {source} have different classes",
            found="; ".join(f"{len(c.names)} as {c.kind}: {', '.join(c.names[:3])}" for c in parts),
            expected="the same list of classes for all",
            fix=f"put the same {CLASSES_FILE} next to each",
        )
    first = parts[0]
    if first.kind == "list":
        return first
    every = {name for classes in parts for name in classes.names}
    notes = tuple(dict.fromkeys(note for classes in parts for note in classes.notes))
    return replace(first, names=tuple(sorted(every, key=lambda name: (number_of(name) or 0, name))), notes=notes)


# --- Single images of Parquet and Arrow files. What was read for one is kept for those beside it ----------------------


PARQUET, ARROW = ".parquet", ".arrow"
# Row groups kept in memory per process, at least one.
KEPT_BYTES = 256 << 20


def require_pyarrow() -> None:
    """Raise MissingPackageError unless pyarrow is installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackageError("pyarrow", "data", "a data set in Parquet or Arrow files") from None


@contextlib.contextmanager
def whole(path: Path | str) -> Iterator[None]:
    """Convert errors of pyarrow to those of a damaged file."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise DataError(
            f"{path} is not a complete {'Arrow' if str(path).endswith(ARROW) else 'Parquet'} file",
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            expected="an intact file",
            fix="download or write it again",
        ) from None


@dataclass(frozen=True)
class Group:
    """Facts about a group of rows before reading: number of rows, rows without image bytes, and total bytes."""

    rows: int
    missing: int
    size: int


class ParquetTable:
    """A Parquet file. Errors of pyarrow propagate."""

    def __init__(self, container: Container) -> None:
        self._file = pq.ParquetFile(container.path)
        self.schema: pa.Schema = self._file.schema_arrow

    def groups(self, image: str) -> list[Group]:
        """Return its row groups, with the image column."""
        return [self._group(self._file.metadata.row_group(i), image) for i in range(self._file.num_row_groups)]

    def _group(self, group: Any, image: str) -> Group:
        columns = [group.column(i) for i in range(group.num_columns)]
        [found] = [column for column in columns if column.path_in_schema in (image, f"{image}.bytes")]
        known = found.statistics is not None and found.statistics.has_null_count
        return Group(group.num_rows, found.statistics.null_count if known else 0, found.total_uncompressed_size)

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        """Return a column of one group."""
        return self._file.read_row_group(group, columns=[name]).column(name)


class ArrowTable:
    """An Arrow file of `datasets` with the same interface: one group, whose bytes stay on disk until needed."""

    def __init__(self, container: Container) -> None:
        with pa.memory_map(container.path) as source:
            self._table = pa.ipc.open_stream(source).read_all()
        for column in self._table.columns:
            column.validate(full=True)  # offsets of a damaged file may be invalid
        self.schema: pa.Schema = self._table.schema

    def groups(self, image: str) -> list[Group]:
        missing = 0
        for chunk in self._table.column(image).chunks:
            inner = chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk
            missing += inner.null_count + (chunk.null_count if inner is not chunk else 0)
        return [Group(self._table.num_rows, missing, 0)]

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        return self._table.column(name)


def open_table(container: Container) -> ParquetTable | ArrowTable:
    """Return the open file. Errors of pyarrow and of `Container.open` propagate."""
    container.open().close()
    return ArrowTable(container) if container.path.endswith(ARROW) else ParquetTable(container)


class _Kept:
    """A cache of the last used row groups."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Container, str, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def group(self, container: Container, column: str, index: int) -> Any:
        """Return the image column of one row group."""
        key = (container, column, index)
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
            else:
                self._groups[key] = open_table(container).column(index, column)
                while len(self._groups) > 1 and self._bytes() > KEPT_BYTES:
                    self._groups.popitem(last=False)
            return self._groups[key]

    def _bytes(self) -> int:
        """Bytes in memory: the contents of an Arrow file stay on disk."""
        return sum(
            found.nbytes for (container, _, _), found in self._groups.items() if not container.path.endswith(ARROW)
        )


_kept = _Kept()


@dataclass(frozen=True)
class TableRow(HeldImage):
    """A row of a table; in a Parquet file, within one of its row groups."""

    container: Container
    group: int
    row: int
    column: str

    def read(self, name: str) -> bytes:
        require_pyarrow()
        self.container.open().close()  # still the listed file
        with whole(self.container.path):
            value = _kept.group(self.container, self.column, self.group)[self.row]
            if pa.types.is_struct(value.type) and value.is_valid:
                value = value["bytes"]
            content = value.as_buffer() if value.is_valid else None
        if content is None:
            raise ImageError(
                f"{name} has no image bytes",
                found="an empty cell, or the path of another file",
                expected="image bytes in the data set",
                fix="embed the images: save_to_disk and push_to_hub of datasets do so",
            )
        if content.size > MAX_FILE_BYTES:
            raise too_large(name, content.size)
        return bytes(content)

    @property
    def within(self) -> tuple[Container, str]:
        return self.container, f"{self.column}:{self.group}:{self.row}"

    @property
    def beside(self) -> tuple[str, int]:
        return self.container.path, self.group


# --- Which of many names stands there twice, in little memory ---------------------------------------------------------


def first_repeated(names: Iterable[bytes]) -> int | None:
    """Return the index of the first repeated name; None if all are unique. Compared by 128 bits of BLAKE2b."""
    packed = b"".join(hashlib.blake2b(name, digest_size=16).digest() for name in names)
    found, counts = np.unique(np.frombuffer(packed, "V16"), return_counts=True)
    if not (counts > 1).any():
        return None
    again = found[counts > 1][0]
    return int(np.flatnonzero(np.frombuffer(packed, "V16") == again)[1])
