"""Where a history lies: a folder, or a URI that fsspec knows. A file in it appears whole or not at all."""

from __future__ import annotations

import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.errors import InputError, LimitError, MissingFileError, MissingPackageError, StorageError
from vitdeploy.publish import replacing_file, storage_errors, temporary_folder
from vitdeploy.store.uri import shown_uri

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
        self.name = shown_uri(uri)
        try:
            import fsspec
        except ModuleNotFoundError:
            raise MissingPackageError("fsspec", "history", "a history at a URI") from None
        with self._told("opened"):
            files, self._folder = fsspec.core.url_to_fs(uri)
        self._files: AbstractFileSystem = files

    def prepare(self) -> None:
        with self._told("written"):
            self._files.makedirs(self._folder, exist_ok=True)

    def names(self) -> list[str]:
        with self._told("read"):
            self._files.invalidate_cache()
            if not self._files.exists(self._folder):
                raise _missing(self.name)
            found: list[Any] = self._files.ls(self._folder, detail=False)
        names = [str(path).rstrip("/").rpartition("/")[2] for path in found]
        return sorted(name for name in names if name.endswith(ENDING) and not name.startswith("."))

    def read(self, name: str) -> bytes:
        path = f"{self._folder}/{name}"
        with self._told("read"):
            size = self._files.size(path)
            if size is not None and size > MAX_BYTES:
                raise _too_large(name, size)
            return bytes(self._files.cat_file(path))

    def write(self, name: str, data: bytes) -> None:
        """Stores of objects write them whole; other services may be cut off, so the file gets its name last."""
        temporary = f"{self._folder}/.tmp-{uuid.uuid4().hex}"
        with self._told("written"):
            self._files.makedirs(self._folder, exist_ok=True)
            try:
                self._files.pipe_file(temporary, data)
                self._files.mv(temporary, f"{self._folder}/{name}")
            except BaseException:
                with contextlib.suppress(Exception):
                    self._files.rm_file(temporary)
                raise

    @contextlib.contextmanager
    def _told(self, done: str) -> Iterator[None]:
        """Errors of a service as ours. Their texts, which may hold the URI with its password, are not repeated."""
        try:
            yield
        except (InputError, LimitError):
            raise
        except ImportError as error:
            raise MissingPackageError(
                error.name or "that fsspec names for it", "", f"a history at {self.name}"
            ) from None
        except ValueError:
            raise InputError(
                f"the history {self.name} cannot be {done}",
                found="a URI that fsspec does not know, or that lacks something",
                wanted="a folder, or a URI such as s3://bucket/folder",
            ) from None
        except Exception as error:
            raise StorageError(
                f"the history {self.name} cannot be {done}",
                found=type(error).__name__,
                wanted="a service that answers, and credentials that it takes",
                fix="check the URI, the network and the credentials, which fsspec reads from the environment",
            ) from None
