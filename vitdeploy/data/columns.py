"""Labels in the columns of a table: a CSV, TSV, Parquet or JSON file with one row per image.

image,age,quality               one column names the images, all others are labels
a.png,31,0.8
train/b.png,27,0.4              by path below the folder of images, by file name, or by file name without its suffix

JSON is a list of rows, {"image": "a.png", "age": 31, "quality": 0.8}, of the same names.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from vitdeploy.data.annotations import AnnotatedSet, folder_images, located, nothing_annotated
from vitdeploy.data.containers.listing import require_pyarrow, whole
from vitdeploy.data.folder import Sample
from vitdeploy.data.label_file import Repairs
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.extensions import lazy
from vitdeploy.limits import bounded
from vitdeploy.paths import is_file, name_bytes

if TYPE_CHECKING:
    import pyarrow.parquet as parquet
else:
    parquet = lazy("pyarrow.parquet")

# A cell: text in a CSV file; in Parquet and JSON also a number, a boolean or a list. None if empty.
Cell: TypeAlias = Any
# Usual names of the column with image names, most reliable first.
IMAGE_COLUMNS = (
    *("image", "file_name", "filename", "file", "path", "image_path", "filepath", "image_id", "img"),
    *("name", "id", "index"),
)
EXAMPLE = "a CSV, TSV, Parquet or JSON file with a column `image` and one column per label"
MAX_BYTES = 1 << 30
_DELIMITERS = (",", ";", "\t")
_FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


@dataclass(frozen=True)
class LabelRow:
    """The labels of one image: a cell per column, except the image column. `line`: the location for messages."""

    cells: Mapping[str, Cell]
    line: str

    def content(self) -> bytes:
        return name_bytes(repr(list(self.cells.items())))

    def number(self, column: str) -> float | None:
        """Return the number in a column; None if the cell is empty.

        Raises:
            DataError: a text, NaN or infinity.
        """
        cell = self.cells[column]
        if cell is None:
            return None
        try:
            value = float(cell)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            comma = isinstance(cell, str) and cell.count(",") == 1
            raise DataError(
                f"{self.line}: the column {column!r} is not a number",
                found=repr(cell)[:60],
                expected="a finite number",
                fix="use a decimal point, not a comma" if comma else "correct the cell, or remove the row",
            )
        return value

    def flag(self, column: str) -> bool | None:
        """Return the Boolean in a column: 1 and 0, or true and false; None if the cell is empty.

        Raises:
            DataError: anything else.
        """
        cell = self.cells[column]
        if cell is None:
            return None
        flag = _FLAGS.get(str(cell).strip().lower())
        if flag is None:
            raise DataError(
                f"{self.line}: the column {column!r} is neither 0 nor 1",
                found=repr(cell)[:60],
                expected="0 or 1, or true or false",
                fix="correct the cell, or remove the row",
            )
        return flag


RowSet: TypeAlias = AnnotatedSet[LabelRow]


def read_columns(images: Path, file: Path) -> RowSet:
    """Return the images below `images` that have a row in a table, with their rows. Rows of missing images are ignored;
    a note gives their number.

    Raises:
        MissingFileError: no such folder or file.
        MissingPackageError: a Parquet file, and no pyarrow.
        DataError: not a table; no column with image names of the folder, or several; an image with two different rows.
    """
    table, paths = read_table(file), folder_images(images)
    column, places, repairs = _image_column(table, images, paths, file)
    rows: dict[Path, LabelRow] = {}
    missing = list[str]()
    for number, name in enumerate(table[column]):
        path = places.get(str(name))
        row = LabelRow(
            {key: cells[number] for key, cells in table.items() if key != column}, f"{file}, row {number + 1}"
        )
        if path is None:
            missing.append(str(name))
            continue
        if (first := rows.setdefault(path, row)) is not row:
            if first.cells != row.cells:
                raise DataError(
                    f"{file} has two different rows for one image",
                    found=f"{path.name}: {first.line.rpartition(', ')[2]} and row {number + 1}",
                    expected="one row per image",
                    fix="remove the wrong row",
                )
            repairs.add("repeated rows, counted once", path.name)
    if missing:
        repairs.add("rows of images that are not in the folder, ignored", missing[0], len(missing))
    annotations = {path: rows[path] for path in sorted(rows)}
    samples = tuple(Sample(path, None) for path in annotations)
    unannotated = len(set(paths.values())) - len(annotations)
    return AnnotatedSet(images, samples, annotations, (), unannotated, repairs.notes)


def read_table(file: Path) -> dict[str, list[Cell]]:
    """Return the columns of a table by name, in order, all of the same length above 0. White space around a CSV cell is
    ignored; an empty cell is None.

    Raises: as `read_columns`.
    """
    if not is_file(file):
        raise MissingFileError(f"no label table at {file}", expected=EXAMPLE, fix="check the path of --annotations")
    if (size := file.stat().st_size) > MAX_BYTES:
        raise DataError(f"{file} is too large for a label table", found=f"{size >> 20} MiB", expected="at most 1 GiB")
    suffix = file.suffix.lower()
    if suffix not in (".csv", ".tsv", ".txt", ".parquet", ".json"):
        raise DataError(f"{file} is not a label table", found=f"the suffix {suffix!r}", expected=EXAMPLE)
    with bounded(f"read {file.name}", size):
        table = {".parquet": _parquet, ".json": _json}.get(suffix, _csv)(file)
    if not table or not next(iter(table.values())):
        raise DataError(f"{file} has no rows", found=", ".join(table) or "an empty file", expected=EXAMPLE)
    return table


def _parquet(file: Path) -> dict[str, list[Cell]]:
    require_pyarrow()
    with whole(file):
        table = parquet.read_table(file)
    _once(file, table.column_names)
    return {name: [_cell(value) for value in table.column(name).to_pylist()] for name in table.column_names}


def _json(file: Path) -> dict[str, list[Cell]]:
    try:
        rows = json.loads(file.read_bytes(), object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{file} is not a JSON file", found=str(error)[:200], expected=EXAMPLE) from None
    header = [name for name, _ in rows[0]] if isinstance(rows, list) and rows and _is_row(rows[0]) else []
    _once(file, header)
    for number, row in enumerate(rows if header else [rows], 1):
        names = [name for name, _ in row] if _is_row(row) else []
        if sorted(names) != sorted(header) or not header:
            raise DataError(
                f"{file}, row {number} is not a row of the table" if header else f"{file} is not a list of rows",
                found=f"the keys {', '.join(names)}"[:100] if names else repr(row)[:80],
                expected=f"an object with {', '.join(header)}"[:100] if header else "a JSON list of objects",
            )
    cells = [dict(row) for row in rows]
    return {name: [_cell(row[name]) for row in cells] for name in header}


def _is_row(value: object) -> bool:
    """Whether this was a JSON object: `_json` reads only objects as lists of tuples."""
    return isinstance(value, list) and bool(value) and all(isinstance(pair, tuple) for pair in value)


def _csv(file: Path) -> dict[str, list[Cell]]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8", found=str(error)[:100], fix="save the file as UTF-8") from None
    head = text.partition("\n")[0]
    delimiter = max(_DELIMITERS, key=head.count)
    try:
        header, *lines = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True) if row] or [[]]
    except csv.Error as error:
        raise DataError(f"{file} is not a valid CSV file", found=str(error), expected=EXAMPLE) from None
    header = [name.strip() for name in header]
    for number, row in enumerate(lines, 1):
        if len(row) != len(header):
            raise DataError(
                f"{file}, row {number} does not match the header",
                found=f"{len(row)} cells: {delimiter.join(row)[:60]!r}",
                expected=f"{len(header)}: {', '.join(header)[:100]}",
                fix="quote cells that contain the delimiter",
            )
    # The index that pandas writes has no name: drop row numbers; anything else may name the images.
    if header and not header[0] and [row[0] for row in lines] != [str(number) for number in range(len(lines))]:
        header[0] = "index"
    _once(file, [name for name in header if name])
    return {name: [_cell(row[place]) for row in lines] for place, name in enumerate(header) if name}


def _cell(value: Cell) -> Cell:
    if isinstance(value, str):
        return value.strip() or None
    return None if isinstance(value, float) and math.isnan(value) else value


def _once(file: Path, names: Sequence[str]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{file} has duplicate columns", found=", ".join(repeated), expected="unique column names")


def _image_column(
    table: Mapping[str, Sequence[Cell]], images: Path, paths: Mapping[str, Path], file: Path
) -> tuple[str, dict[str, Path], Repairs]:
    """Return the image column, the image of each of its cells, and the repaired names."""
    repairs = {column: Repairs() for column in table}
    places = {column: _located(cells, images, paths, repairs[column]) for column, cells in table.items()}
    candidates = [column for column in table if places[column]]
    usual = [name for name in IMAGE_COLUMNS for column in candidates if column.lower() == name]
    if not candidates:
        column = next((c for c in table if c.lower() in IMAGE_COLUMNS), next(iter(table)))
        there = next(iter(paths.values())).relative_to(images).as_posix()
        raise nothing_annotated(
            images, file, f"the column {column!r} with {table[column][0]!r}; the folder contains {there!r}"
        )
    if len(candidates) > 1 and not usual:
        raise DataError(
            f"{file} has several columns with image names",
            found=", ".join(candidates),
            expected="one",
            fix=f"rename the right one to {IMAGE_COLUMNS[0]}",
        )
    column = candidates[0] if len(candidates) == 1 else next(c for c in candidates if c.lower() == usual[0])
    return column, places[column], repairs[column]


def _located(cells: Sequence[Cell], images: Path, paths: Mapping[str, Path], repairs: Repairs) -> dict[str, Path]:
    """Return the image for each cell that names one: as `located`, else by file name without suffix."""
    names = [str(cell) for cell in cells if isinstance(cell, str | int) and not isinstance(cell, bool)]
    direct = located(images, paths, names, repairs) if names else {}
    if direct or not names:
        return direct
    times = Counter(path.stem for path in set(paths.values()))
    stems = {path.stem: path for path in paths.values() if times[path.stem] == 1}
    return {name: stems[name] for name in names if name in stems}
