"""Locates and reads the bytes of images inside other files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

from vitdeploy.errors import DataError, ImageError
from vitdeploy.runtime.preprocess import MAX_FILE_BYTES


@dataclass(frozen=True)
class Container:
    """A local file that contains images, with its size in bytes and its time in nanoseconds when it was listed."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Container:
        found = path.stat()
        return cls(os.path.abspath(path), found.st_size, found.st_mtime_ns)  # noqa: PTH100 - links stay

    def open(self) -> IO[bytes]:
        """Open the file, unchanged since it was listed.

        Raises:
            DataError: it is missing or changed, so listed positions may be wrong.
        """
        try:
            file = open(self.path, "rb")  # noqa: PTH123, SIM115 - not a Path for each of a million images
        except OSError as error:
            raise self._other(error.strerror or str(error)) from None
        found = os.fstat(file.fileno())
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            file.close()
            raise self._other("a different size or time than when its images were listed")
        return file

    def _other(self, found: str) -> DataError:
        return DataError(
            f"{self.path} changed while its images were being read",
            found=found,
            expected="an unchanged file",
            fix="run the command again when no process writes to the file",
        )


class HeldImage(ABC):
    """The location of one image's bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes; `name`: the image's name for messages.

        Raises:
            ImageError: this image cannot be read. DataError: the containing file changed, or is damaged.
            StorageError: a service does not answer.
        """

    def written(self) -> list[Any]:
        """Return the location as JSON for `decode_worker`; `uris.read_written` reads it."""
        return [type(self).__name__, *astuple(self)]  # type: ignore[call-overload]

    @property
    def within(self) -> tuple[Container, str] | None:
        """The local file that contains it, and the position there; None if not on this machine."""
        return None

    @property
    def beside(self) -> tuple[str, int]:
        """A key shared by images that are read together; ("", 0) for an image read on its own."""
        return "", 0

    @property
    def uri(self) -> str | None:
        """The address of an image not on this machine; it may contain a secret."""
        return None


@dataclass(frozen=True)
class FilePart(HeldImage):
    """Bytes of a local file, starting at `offset`."""

    container: Container
    offset: int
    size: int

    def read(self, name: str) -> bytes:
        if self.size > MAX_FILE_BYTES:
            raise too_large(name, self.size)
        with self.container.open() as file:
            file.seek(self.offset)
            found = file.read(self.size)
        if len(found) != self.size:
            raise ImageError(f"{name} is truncated", found=f"{len(found):,} bytes", expected=f"{self.size:,} bytes")
        return found

    @property
    def within(self) -> tuple[Container, str]:
        return self.container, f"{self.offset}+{self.size}"


def too_large(name: str, size: int) -> ImageError:
    return ImageError(
        f"{name} is too large for an image file",
        found=f"{size:,} bytes",
        expected=f"at most {MAX_FILE_BYTES:,} bytes",
        fix="shrink it, or remove it from the data",
    )
