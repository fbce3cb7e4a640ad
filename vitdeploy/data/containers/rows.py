"""Single images of Parquet and Arrow files. What was read for one is kept for those beside it."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vitdeploy.data.containers.held import Container, Held, Written, too_large
from vitdeploy.errors import DataError, ImageError, MissingPackageError

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET, ARROW = ".parquet", ".arrow"
# Row groups that a process keeps, at least one.
KEPT_BYTES = 256 << 20


def require_pyarrow() -> None:
    """Raise MissingPackageError unless Parquet files can be read here."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ModuleNotFoundError:
        raise MissingPackageError("pyarrow", "datasets", "a data set in Parquet or Arrow files") from None


@contextlib.contextmanager
def whole(path: Path | str) -> Iterator[None]:
    """Errors of pyarrow as those of a damaged file."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk
            raise
        raise DataError(
            f"{path} is not a whole {'Arrow' if str(path).endswith(ARROW) else 'Parquet'} file",
            found=(str(error).splitlines() or [type(error).__name__])[0][:200],
            wanted="a file as it was written",
            fix="fetch or write it again",
        ) from None


@dataclass(frozen=True)
class Group:
    """What is known of some rows of a file before they are read: how many, how many have no bytes of an image, and the
    bytes of all."""

    rows: int
    missing: int
    size: int


class Table(Protocol):
    """A Parquet file, or one of Arrow's. Errors of pyarrow propagate."""

    @property
    def schema(self) -> pa.Schema: ...

    def groups(self, image: str) -> list[Group]:
        """Its groups of rows, with the column of images."""

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        """A column of one group."""


class _Parquet:
    def __init__(self, container: Container) -> None:
        import pyarrow.parquet as pq

        self._file = pq.ParquetFile(container.path)
        self.schema: pa.Schema = self._file.schema_arrow

    def groups(self, image: str) -> list[Group]:
        return [self._group(self._file.metadata.row_group(i), image) for i in range(self._file.num_row_groups)]

    def _group(self, group: Any, image: str) -> Group:
        columns = [group.column(i) for i in range(group.num_columns)]
        [found] = [each for each in columns if each.path_in_schema in (image, f"{image}.bytes")]
        known = found.statistics is not None and found.statistics.has_null_count
        return Group(group.num_rows, found.statistics.null_count if known else 0, found.total_uncompressed_size)

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        return self._file.read_row_group(group, columns=[name]).column(name)


class _Arrow:
    """An Arrow file of `datasets`: one group, whose bytes stay on the disk until they are needed."""

    def __init__(self, container: Container) -> None:
        import pyarrow as pa

        with pa.memory_map(container.path) as source:
            self._table = pa.ipc.open_stream(source).read_all()
        for column in self._table.columns:
            column.validate(full=True)  # offsets of a damaged file lead anywhere
        self.schema: pa.Schema = self._table.schema

    def groups(self, image: str) -> list[Group]:
        import pyarrow as pa

        missing = 0
        for chunk in self._table.column(image).chunks:
            inner = chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk
            missing += inner.null_count + (chunk.null_count if inner is not chunk else 0)
        return [Group(self._table.num_rows, missing, 0)]

    def column(self, group: int, name: str) -> pa.ChunkedArray:
        return self._table.column(name)


def open_table(container: Container) -> Table:
    """The open file. Errors of pyarrow propagate, and those of `Container.open`."""
    container.open().close()
    return _Arrow(container) if container.path.endswith(ARROW) else _Parquet(container)


class _Kept:
    """Row groups, the last used ones."""

    def __init__(self) -> None:
        self._groups: OrderedDict[tuple[Container, str, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def group(self, container: Container, column: str, index: int) -> Any:
        """The column of images of one row group."""
        key = (container, column, index)
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
            else:
                self._groups[key] = open_table(container).column(index, column)
                while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > KEPT_BYTES:
                    self._groups.popitem(last=False)
            return self._groups[key]


_kept = _Kept()


def _image(container: Container, column: str, group: int, row: int, name: str) -> bytes:
    """The bytes of one image; errors as `Held.read`."""
    from vitdeploy.runtime.preprocess import MAX_FILE_BYTES

    require_pyarrow()
    import pyarrow as pa

    container.open().close()  # still the one that was listed
    with whole(container.path):
        value = _kept.group(container, column, group)[row]
        if pa.types.is_struct(value.type) and value.is_valid:
            value = value["bytes"]
        found = value.as_buffer() if value.is_valid else None
    if found is None:
        raise ImageError(
            f"{name} has no bytes",
            found="nothing, or the path of a file elsewhere",
            wanted="the bytes of each image in the data set",
            fix="write them in: save_to_disk and push_to_hub of datasets do",
        )
    if found.size > MAX_FILE_BYTES:
        raise too_large(name, found.size)
    return bytes(found)


@dataclass(frozen=True)
class TableRow(Held):
    """A row of a table: of a Parquet file inside one of its groups."""

    container: Container
    column: str
    group: int
    row: int

    def read(self, name: str) -> bytes:
        return _image(self.container, self.column, self.group, self.row, name)

    def written(self) -> Written:
        held = self.container
        return ["row", [held.path, held.size, held.mtime_ns], self.column, self.group, self.row]

    @property
    def within(self) -> tuple[Container, str]:
        return self.container, f"{self.column}:{self.group}:{self.row}"
