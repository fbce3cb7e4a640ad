"""Images in Parquet files, and in the Arrow files of a data set that Hugging Face's `datasets` saved to disk.

One column contains the bytes of each image, alone or as {bytes, path}, the layout of `datasets`' Image feature; another
one its label. Class names are in the schema if `datasets` wrote them (ClassLabel). Files are read by pyarrow.
"""

from __future__ import annotations

import functools
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitdeploy.data.containers.held import Container
from vitdeploy.data.containers.listing import (
    CLASSES_FILE,
    LABEL_COLUMNS,
    NO_LABELS,
    ArrowTable,
    Group,
    LabelColumn,
    Listing,
    NameColumn,
    ParquetTable,
    Places,
    TableRow,
    check_names,
    column_of,
    listed_names,
    open_table,
    read_label,
    require_pyarrow,
    whole,
)
from vitdeploy.errors import DataError
from vitdeploy.extensions import lazy
from vitdeploy.limits import bounded
from vitdeploy.publish import storage_errors

if TYPE_CHECKING:
    import pyarrow as pa
else:
    pa = lazy("pyarrow")
# Files that `datasets` writes next to one data set, and next to several parts of one.
STATE, PARTS_FILE = "state.json", "dataset_dict.json"
IMAGE_NAMES = ("image", "img")
# Bytes of images in one row group, which is read as a whole.
MAX_GROUP = 1 << 30
MAX_FEATURES = 16 << 20


@dataclass(frozen=True)
class _Columns:
    """The columns of one file, and its class names if the schema has them."""

    image: str
    label: str | None
    names: tuple[str, ...] | None


def list_tables(paths: Sequence[Path], root: Path, labelled: bool) -> Listing:
    """Return the images of some files, in the order of their rows.

    Args:
        root: the folder that names are relative to: "val-00000-of-00001.parquet/17".
        labelled: read the label of each.

    Raises:
        MissingPackageError: no pyarrow.
        DataError: a damaged file; no image or label column, or several; images without bytes; files with different
            columns or classes.
        LimitError: reading exceeds a limit.
    """
    require_pyarrow()
    names, labels = NameColumn(), LabelColumn(root if len(paths) > 1 else paths[0])
    containers, which, groups, rows = list[Container](), array("i"), array("i"), array("i")
    first: _Columns | None = None
    for number, path in enumerate(paths):
        with storage_errors(path), bounded(f"read {path.name}", path.stat().st_size), whole(path):
            container = Container.of(path)
            file = open_table(container)
            columns = _columns(file.schema, path, labelled)
            first = first or columns
            if columns != first:
                raise _unlike(paths[0], path, first, columns)
            containers.append(container)
            below, row = path.relative_to(root).as_posix(), 0
            for index, group in enumerate(file.groups(columns.image)):
                _check_group(group, index, path)
                for inside in range(group.rows):
                    names.add(f"{below}/{row + inside}")
                which.extend([number] * group.rows)
                groups.extend([index] * group.rows)
                rows.extend(range(group.rows))
                if columns.label is not None:
                    for label in _labels(file, index, columns.label, f"{path}, starting at row {row}"):
                        labels.add(label, str(path))
                row += group.rows
    assert first is not None
    known = first
    container_of, group_of, row_of = (np.array(values, np.int32) for values in (which, groups, rows))
    places = Places(containers, container_of, group_of, row_of, functools.partial(TableRow, column=known.image))
    finished = labels.finish(lambda: _class_names(known, root), numbered=known.names is not None)
    return Listing(root, names, *finished, places)


def has_labels(path: Path) -> bool:
    """Whether a file has a label column; errors as `list_tables`, also if it is ambiguous which column it is."""
    require_pyarrow()
    with storage_errors(path), whole(path):
        schema = open_table(Container.of(path)).schema
        if _label_candidates(schema, _features(schema, path)):
            return True
        if any(map(_holds_labels, schema)):
            _columns(schema, path, labelled=True)  # an error: the label column is ambiguous
        return False


def _class_names(columns: _Columns, root: Path) -> tuple[str, ...] | None:
    """Return the names in the schema, or in classes.txt next to the files."""
    listed = listed_names(root)
    if None not in (listed, columns.names) and listed != columns.names:
        raise DataError(
            f"{root / CLASSES_FILE} and the data set's schema have different class names",
            found=f"{', '.join((listed or ())[:3])} and {', '.join((columns.names or ())[:3])}",
            expected="one list",
            fix=f"remove {CLASSES_FILE} if the schema is right",
        )
    return columns.names or listed


def _columns(schema: pa.Schema, path: Path, labelled: bool) -> _Columns:
    features = _features(schema, path)
    twice = len(schema.names) != len(set(schema.names))
    if twice:
        raise DataError(
            f"{path} has duplicate columns", found=", ".join(schema.names)[:200], expected="unique column names"
        )
    stated = [name for name in schema.names if _type(features, name) == "Image"]
    image = _only(stated or [f.name for f in schema if _holds_images(f)], IMAGE_NAMES)
    if image is None or not _holds_images(schema.field(image)):
        raise DataError(
            f"{path} has no unambiguous image column",
            found="; ".join(f"{field.name}: {field.type}" for field in schema)[:300],
            expected="one column `image` of bytes, or of {bytes, path} as in Hugging Face's datasets",
            fix="rename the image column to `image`, or remove the other candidates",
        )
    if not labelled:
        return _Columns(image, None, None)
    candidates = _label_candidates(schema, features)
    place = column_of(candidates, LABEL_COLUMNS)
    label = candidates[place] if place is not None else _only(candidates, ())
    if label is None:
        raise DataError(
            f"{path} has no unambiguous label column",
            found="; ".join(f"{field.name}: {field.type}" for field in schema)[:300],
            expected="one column `label` of integers or names",
            fix=f"rename the label column to `label`; or {NO_LABELS}",
        )
    if not _holds_labels(schema.field(label)):
        raise DataError(
            f"the column {label!r} of {path} does not contain classes",
            found=str(schema.field(label).type),
            expected="integers, or names",
            fix=f"write one class per image; or {NO_LABELS}",
        )
    stated_names = features.get(label, {}).get("names") if _type(features, label) == "ClassLabel" else None
    names = check_names(stated_names, str(path)) if isinstance(stated_names, list) else None
    return _Columns(image, label, names)


def _only(candidates: Sequence[str], usual: Sequence[str]) -> str | None:
    """Return the only candidate, or the one with the first of the usual names."""
    if len(candidates) == 1:
        return candidates[0]
    return next((name for name in usual if name in candidates), None)


def _label_candidates(schema: pa.Schema, features: dict[str, Any]) -> list[str]:
    stated = [name for name in schema.names if _type(features, name) == "ClassLabel"]
    return stated or [name for name in schema.names if column_of([name], LABEL_COLUMNS) is not None]


def _holds_images(field: pa.Field) -> bool:
    kind = field.type
    if pa.types.is_struct(kind):
        inside = [kind.field(i) for i in range(kind.num_fields) if kind.field(i).name == "bytes"]
        return len(inside) == 1 and _holds_images(inside[0])
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _holds_labels(field: pa.Field) -> bool:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _features(schema: pa.Schema, path: Path) -> dict[str, Any]:
    """Return the feature descriptions of `datasets`; {} for a file from another program."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    try:
        found = json.loads(text)["info"]["features"] if len(text) <= MAX_FEATURES else None
    except (ValueError, RecursionError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"cannot read the feature metadata of Hugging Face's datasets in {path}",
            found=repr(text[:80]),
            expected="JSON with info.features",
            fix="write the file again",
        )
    return {name: value for name, value in found.items() if isinstance(value, dict)}


def _type(features: dict[str, Any], name: str) -> object:
    return features.get(name, {}).get("_type")


def _check_group(group: Group, index: int, path: Path) -> None:
    """Raise DataError if images of a row group have no bytes, or the group is too large to read."""
    if group.size > MAX_GROUP:
        raise DataError(
            f"a row group of {path} is too large to read",
            found=f"{group.size:,} bytes of images in group {index}",
            expected=f"at most {MAX_GROUP:,}",
            fix="write it with smaller row groups (row_group_size=100)",
        )
    if group.missing:
        raise DataError(
            f"{path} has images without bytes",
            found=f"{group.missing} of {group.rows} rows in group {index}, which may refer to other files",
            expected="image bytes in the file",
            fix="embed the images: save_to_disk and push_to_hub of datasets do so; or pass the folder of image files",
        )


def _labels(file: ParquetTable | ArrowTable, group: int, column: str, where: str) -> Iterator[int | str]:
    for value in file.column(group, column).to_pylist():
        if value is None or value == "":
            raise DataError(
                f"an image of {where}, has no label",
                found=f"an empty cell in {column!r}",
                expected="a class for every image",
                fix=f"remove the row; or {NO_LABELS}",
            )
        yield read_label(value) if isinstance(value, str) else value


def _unlike(first: Path, path: Path, one: _Columns, other: _Columns) -> DataError:
    return DataError(
        f"{path.name} does not belong to the same data set as {first.name}",
        found=f"{other.image}, {other.label}, {len(other.names or ())} classes; {first.name} has {one.image}, "
        f"{one.label}, {len(one.names or ())}",
        expected="files with the same columns and classes",
        fix="pass one of them",
    )
