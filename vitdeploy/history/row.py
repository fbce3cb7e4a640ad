"""Rows of a history, and the places that store them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vitdeploy.errors import InputError, LimitError, MissingFileError
from vitdeploy.extensions import lazy
from vitdeploy.publish import replacing_file, storage_errors, temporary_folder
from vitdeploy.remote import Remote

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem
else:
    pa = lazy("pyarrow")


# --- One row of a history: one artifact of one document, in flat columns ----------------------------------------------


FORMAT = 1
# The key of the format in the metadata of a file's schema.
FORMAT_KEY = b"vitdeploy.history"
Kind = Literal["run", "bench", "compare", "sweep", "canary"]


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One artifact of one result. None: unknown or not measured. "_low" and "_high": the bounds of 95 % intervals.

    Set when written: `format`, `sequence` (one more than the largest in the history at that time), `run` (the same in
    all rows of one result), `host` (the name of the writing machine). `time`: the wall clock of that machine, UTC.

    The machine: `cpu`, `isa`, `cores`, `system`, `python`, and `device`: the registered device or the GPU, "" for the
    CPU of this machine. The software: `vitdeploy`, `runtime` with `runtime_version`, `driver`.

    What was measured: `kind` of command, `model` (its name, or that of the recipe), `model_digest` (sha256 of the files
    that it was made from), `artifact` (the engine), `target`, `precision`, `provider`, images per query in `batch` and
    `offline_batch`, `threads` (0: the runtime's choice).

    Latencies in milliseconds per query, `throughput` in images per second. `value` and `reference_value` of `metric`
    and `agreement` in percent of `samples`, `drop` in points. `gate`: "pass", "fail", "undecided" or "none". `flags`
    separated by spaces. `decided`: whether the times are reliable; if not, `undecided` has the reason. `error`: of a
    failed recipe, or of an engine that failed its golden answers.

    `document`: the whole document as JSON, only in the first row of each result.
    """

    kind: str
    time: datetime.datetime
    model: str
    artifact: str
    target: str
    precision: str
    format: int = FORMAT
    sequence: int = 0
    run: str = ""
    host: str = ""
    device: str = ""
    cpu: str = ""
    isa: str = ""
    cores: int | None = None
    system: str = ""
    python: str = ""
    vitdeploy: str = ""
    runtime: str = ""
    runtime_version: str = ""
    driver: str = ""
    model_digest: str | None = None
    provider: str = ""
    batch: int | None = None
    offline_batch: int | None = None
    threads: int | None = None
    p50_ms: float | None = None
    p50_ms_low: float | None = None
    p50_ms_high: float | None = None
    p90_ms: float | None = None
    p90_ms_low: float | None = None
    p90_ms_high: float | None = None
    p99_ms: float | None = None
    p99_ms_low: float | None = None
    p99_ms_high: float | None = None
    mean_ms: float | None = None
    throughput: float | None = None
    throughput_low: float | None = None
    throughput_high: float | None = None
    peak_memory_bytes: int | None = None
    size_bytes: int | None = None
    metric: str | None = None
    samples: int | None = None
    value: float | None = None
    reference_value: float | None = None
    drop: float | None = None
    drop_low: float | None = None
    drop_high: float | None = None
    agreement: float | None = None
    agreement_low: float | None = None
    agreement_high: float | None = None
    gate: str | None = None
    flags: str = ""
    decided: bool = True
    undecided: str = ""
    error: str = ""
    document: str | None = None


@functools.cache
def schema() -> pa.Schema:
    """Return the columns of a history's files, in Arrow's types, with the format in the metadata."""
    columns = {
        str: pa.string(),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
        datetime.datetime: pa.timestamp("us", tz="UTC"),
    }
    fields = []
    for name, hint in typing.get_type_hints(ResultRow).items():
        kinds = [each for each in typing.get_args(hint) or (hint,) if each is not type(None)]
        fields.append(pa.field(name, columns[kinds[0]], nullable=type(None) in typing.get_args(hint)))
    return pa.schema(fields, metadata={FORMAT_KEY: str(FORMAT).encode()})


def defaults() -> dict[str, Any]:
    """Return the defaults of columns that a file of an earlier vitdeploy may lack."""
    return {f.name: f.default for f in dataclasses.fields(ResultRow) if f.default is not dataclasses.MISSING}


def now() -> datetime.datetime:
    """Return the current time, in UTC."""
    return datetime.datetime.now(datetime.timezone.utc)


# --- The place of a history: a folder, or a URI that fsspec supports. Files are written atomically --------------------


MAX_BYTES = 1 << 30
ENDING = ".parquet"


def open_place(where: str | Path) -> Place:
    """Return the place of a path or a URI, which creates it, lists and reads its Parquet files, and adds files. `name`
    is for messages and has no credentials.

    Raises:
        InputError: a protocol that fsspec does not know. MissingPackageError: the package for that protocol is not
            installed. StorageError: the service refuses.
    """
    return _Remote(where) if isinstance(where, str) and "://" in where else _Folder(Path(where))


def _too_large(name: str, size: int) -> LimitError:
    return LimitError(f"{name} is too large", found=f"{size:,} bytes", expected=f"at most {MAX_BYTES:,}")


def _missing(name: str) -> MissingFileError:
    return MissingFileError(
        f"no history at {name}", expected="a folder or URI written by run, bench, compare or sweep with --history"
    )


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder

    def prepare(self) -> None:
        """Create the place if missing, and raise if it is not writable."""
        self._require_folder()
        with temporary_folder(self._folder):
            pass

    def names(self) -> list[str]:
        """Return the sorted names of the Parquet files; raise MissingFileError without the folder."""
        self._require_folder()
        with storage_errors(self._folder):
            try:
                found = [path.name for path in self._folder.iterdir() if path.suffix == ENDING]
            except FileNotFoundError:
                raise _missing(self.name) from None
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise LimitError if it is too large."""
        path = self._folder / name
        with storage_errors(path):
            try:
                if not path.is_file():
                    raise InputError(f"{name} is not a file")
                size = path.stat().st_size
                if size > MAX_BYTES:
                    raise _too_large(name, size)
                return path.read_bytes()
            except FileNotFoundError:
                raise MissingFileError(f"{name} was deleted meanwhile") from None

    def write(self, name: str, data: bytes) -> None:
        """Add a file under a new, unique name."""
        with replacing_file(self._folder / name, lambda _: False) as file:
            file.write_bytes(data)

    def _require_folder(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._folder.exists() and not self._folder.is_dir():
                raise InputError(f"{self.name} is not a folder", found="a file", expected="a folder, or a URI with ://")


class _Remote:
    def __init__(self, uri: str) -> None:
        self._remote = Remote(uri, "history", InputError)
        self.name = self._remote.name
        self._remote.open()

    def prepare(self) -> None:
        self._remote.ask(lambda files, at: files.makedirs(at, exist_ok=True), done="written")

    def names(self) -> list[str]:
        def ask(files: AbstractFileSystem, at: str) -> list[str]:
            files.invalidate_cache()
            if not files.exists(at):
                raise _missing(self.name)
            return [str(path) for path in files.ls(at, detail=False)]

        names = [path.rstrip("/").rpartition("/")[2] for path in self._remote.ask(ask, done="read")]
        return sorted(name for name in names if name.endswith(ENDING) and not name.startswith("."))

    def read(self, name: str) -> bytes:
        size = self._remote.ask(lambda files, at: files.size(f"{at}/{name}"), done="read")
        if size is not None and size > MAX_BYTES:
            raise _too_large(name, size)
        return self._remote.ask(lambda files, at: bytes(files.cat_file(f"{at}/{name}")), size or MAX_BYTES, done="read")

    def write(self, name: str, data: bytes) -> None:
        self._remote.publish(name, data, len(data))


Place: TypeAlias = _Folder | _Remote


def joined(parts: Sequence[str]) -> str:
    """Join parts of a sentence with commas, and "and" before the last."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
