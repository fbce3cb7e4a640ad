"""The files of a history: each append writes one new Parquet file, and files are never modified.

A file's name is SEQUENCE-UNIQUE.parquet. The sequence is one more than the largest that its writer saw, a logical clock
(Lamport 1978, "Time, clocks, and the ordering of events in a distributed system", Communications of the ACM
21:558-565): later writes sort after earlier ones even if the machines' clocks are wrong. Two simultaneous writers may
use the same sequence; then the wall clock and finally the unique name decide.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import platform
import re
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vitdeploy.document.bench import Omission
from vitdeploy.errors import InputError, MissingPackageError, UnsafeError
from vitdeploy.extensions import lazy
from vitdeploy.history.row import FORMAT, FORMAT_KEY, Place, ResultRow, defaults, schema
from vitdeploy.limits import bounded
from vitdeploy.paths import shown_name
from vitdeploy.progress import Progress
from vitdeploy.spec import encode

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa, pq = lazy("pyarrow"), lazy("pyarrow.parquet")

_NAME = re.compile(r"([0-9]{10,15})-[0-9a-f]{12}\.parquet")
MAX_ROWS = 100_000
# Columns whose values must be positive.
_POSITIVE = ("p50_ms", "p90_ms", "p99_ms", "mean_ms", "throughput")


def require_packages() -> None:
    """Raise MissingPackageError if Parquet files cannot be written and read here."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingPackageError("pyarrow", "data", "a history", error=error) from None


def of_one_result(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows with the host and a new, unique `run`."""
    run = uuid.uuid4().hex[:12]
    return [dataclasses.replace(row, run=run, host=platform.node()) for row in rows]


def append(place: Place, rows: Sequence[ResultRow], document: object) -> str:
    """Add the rows of one document (also as returned by `of_one_result`) as one new file; return its name.

    Raises:
        MissingPackageError: pyarrow is missing. StorageError: the place is not writable.
    """
    require_packages()
    place.prepare()
    sequence = 1 + max(map(_sequence, place.names()), default=0)
    text = json.dumps(encode(document), allow_nan=False)
    if not all(row.run for row in rows):
        rows = of_one_result(rows)
    run = rows[0].run if rows else uuid.uuid4().hex[:12]
    stamped = [
        dataclasses.replace(row, sequence=sequence, document=text if number == 0 else None)
        for number, row in enumerate(rows)
    ]
    columns = [
        {name: shown_name(value) if isinstance(value, str) else value for name, value in vars(row).items()}
        for row in stamped
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(columns, schema()), buffer, compression="zstd")
    name = _name(sequence, run)
    place.write(name, buffer.getvalue())
    return name


def _name(sequence: int, run: str) -> str:
    return f"{sequence:010d}-{run}.parquet"


def _sequence(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def read_rows(place: Place, progress: Progress) -> tuple[list[ResultRow], list[Omission]]:
    """Return all rows in the order of their sequence, without their documents, and the skipped files (foreign, damaged
    or in a newer format) with the reason for each.

    Raises:
        MissingFileError: the folder is missing. MissingPackageError: pyarrow is missing. StorageError: the place cannot
            be read.
    """
    require_packages()
    found: dict[tuple[str, int], ResultRow] = {}
    left_out, names = [], place.names()
    for number, name in enumerate(names):
        progress("reading the history", number, len(names))
        try:
            # A copy of a file in the same folder adds nothing.
            found |= {(row.run, index): row for index, row in enumerate(_read(place, name))}
        except (InputError, UnsafeError) as error:
            left_out.append(Omission(name, f"{error.message}: {error.found}" if error.found else error.message))
    return sorted(found.values(), key=lambda row: (row.sequence, row.time, row.run)), left_out


def documents_of(place: Place) -> Callable[[ResultRow], str | None]:
    """Return a function that reads the whole document of a row's result, as JSON; None if the file is missing.

    Raises:
        Errors as `read_rows`; the function raises InputError and UnsafeError for files that do not belong to a history.
    """
    names = set(place.names())

    def read(row: ResultRow) -> str | None:
        name = _name(row.sequence, row.run)
        records = _records(place, name, ["document"]) if name in names else []
        return next((text for record in records if (text := record.get("document")) is not None), None)

    return read


def _read(place: Place, name: str) -> list[ResultRow]:
    """Return the rows of one file; raise InputError or UnsafeError if it does not belong to a history."""
    return [_row(record) for record in _records(place, name, [each for each in schema().names if each != "document"])]


def _records(place: Place, name: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the raw rows of one file, with those of `columns` that it has."""
    data = place.read(name)
    with bounded(f"read {name}", len(data)):
        try:
            file = pq.ParquetFile(pa.BufferReader(data))
            _check(file)
            expected = [column for column in columns if column in file.schema_arrow.names]
            found: list[dict[str, Any]] = file.read(columns=expected).to_pylist()
        except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
            raise InputError("not a complete Parquet file", found=_first_line(error)) from None
    return found


def _check(file: Any) -> None:
    """Raise InputError unless a Parquet file is a history file in a supported format."""
    found: pa.Schema = file.schema_arrow
    version = (found.metadata or {}).get(FORMAT_KEY, b"")
    if not re.fullmatch(rb"[1-9][0-9]{0,5}", version):
        raise InputError("not a history file of vitdeploy")
    if int(version) > FORMAT:
        raise InputError(f"format {int(version)} of a newer vitdeploy; this one reads formats up to {FORMAT}")
    if file.metadata.num_rows > MAX_ROWS:
        raise InputError(f"{file.metadata.num_rows:,} rows; at most {MAX_ROWS:,} are allowed")
    types, optional = dict(zip(found.names, found.types, strict=True)), defaults()
    problems = [] if len(types) == len(found.names) else ["duplicate columns"]
    for field in schema():
        if field.name not in types:
            problems += [] if field.name in optional else [f"{field.name} is missing"]
        elif types[field.name] != field.type:
            problems.append(f"{field.name} is {types[field.name]}, expected {field.type}")
    if problems:
        raise InputError("the columns are not those of a history", found="; ".join(problems)[:300])


def _row(record: dict[str, Any]) -> ResultRow:
    """Return one row; raise InputError for invalid values."""
    nullable = {field.name for field in schema() if field.nullable}
    empty = [name for name, value in record.items() if value is None and name not in nullable]
    odd = [name for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)]
    low = [name for name in _POSITIVE if record.get(name) is not None and record[name] <= 0]
    if empty or odd or low or not 0 < record.get("sequence", 0) < 10**15:
        names = ", ".join([*empty, *odd, *low]) or "sequence"
        raise InputError("invalid values", found=names[:300])
    return ResultRow(**record)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
