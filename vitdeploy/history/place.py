"""Where a history lies: a folder, or a URI that fsspec knows. A file in it appears whole or not at all."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import InputError, LimitError, MissingFileError
from vitdeploy.publish import replacing_file, storage_errors, temporary_folder
from vitdeploy.remote import Remote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MAX_BYTES = 1 << 30
ENDING = ".parquet"


class Place(ABC):
    """A folder of files. `name` is what messages call it; no credentials are in it."""

    name: str

    @abstractmethod
    def prepare(self) -> None:
        """Make the place if it is not there, and raise if nothing can be written to it."""

    @abstractmethod
    def names(self) -> list[str]:
        """The names of the files that end as Parquet files do, in order; MissingFileError without the folder."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The content of a file; LimitError if it is too large."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Add a file under a name that no other has."""


def open_place(where: str | Path) -> Place:
    """The place of a path or a URI.

    Raises:
        InputError: a protocol that fsspec does not know. MissingPackageError: what reads that protocol is not
            installed. StorageError: its service refuses.
    """
    return _Remote(where) if isinstance(where, str) and "://" in where else _Folder(Path(where))


def _too_large(name: str, size: int) -> LimitError:
    return LimitError(f"{name} is too large", found=f"{size:,} bytes", wanted=f"at most {MAX_BYTES:,}")


def _missing(name: str) -> MissingFileError:
    return MissingFileError(
        f"no history at {name}", wanted="a folder or URI that --history of run, bench, compare or sweep wrote to"
    )


class _Folder(Place):
    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder

    def prepare(self) -> None:
        self._require_folder()
        with temporary_folder(self._folder):
            pass

    def names(self) -> list[str]:
        self._require_folder()
        with storage_errors(self._folder):
            try:
                found = [path.name for path in self._folder.iterdir() if path.suffix == ENDING]
            except FileNotFoundError:
                raise _missing(self.name) from None
        return sorted(name for name in found if not name.startswith("."))

    def read(self, name: str) -> bytes:
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
                raise MissingFileError(f"{name} has gone") from None

    def write(self, name: str, data: bytes) -> None:
        with replacing_file(self._folder / name, lambda _: False) as file:
            file.write_bytes(data)

    def _require_folder(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            if self._folder.exists() and not self._folder.is_dir():
                raise InputError(f"{self.name} is no folder", found="a file", wanted="a folder, or a URI with ://")


class _Remote(Place):
    def __init__(self, uri: str) -> None:
        self._remote = Remote(uri, "history", "history", InputError)
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
