"""Where the bytes of an image lie that has no file of its own, and what reads them there."""

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
    """A local file that holds images, as it was when it was listed: its size in bytes, and its time in nanoseconds."""

    path: str
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> Container:
        found = path.stat()
        return cls(os.path.abspath(path), found.st_size, found.st_mtime_ns)  # noqa: PTH100 - links stay

    def open(self) -> IO[bytes]:
        """The file, which is still the one that was listed.

        Raises:
            DataError: it has gone, or changed: what was listed may now lie elsewhere in it.
        """
        try:
            file = open(self.path, "rb")  # noqa: PTH123, SIM115 - not a Path for each of a million images
        except OSError as error:
            raise self._other(error.strerror or str(error)) from None
        found = os.fstat(file.fileno())
        if (found.st_size, found.st_mtime_ns) != (self.size, self.mtime_ns):
            file.close()
            raise self._other("another size or time than when its images were listed")
        return file

    def _other(self, found: str) -> DataError:
        return DataError(
            f"{self.path} changed while its images were being read",
            found=found,
            expected="a file that stays as it is",
            fix="give the command again when nobody writes to it any more",
        )


class HeldImage(ABC):
    """The place of one image's bytes."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """The bytes; `name` is the image's in messages.

        Raises:
            ImageError: this image cannot be read. DataError: the file that holds it changed, or is damaged.
            StorageError: a service does not answer.
        """

    def written(self) -> list[Any]:
        """What `decode_worker` is told of it, as JSON, and `uris.read_written` reads."""
        return [type(self).__name__, *astuple(self)]  # type: ignore[call-overload]

    @property
    def within(self) -> tuple[Container, str] | None:
        """The local file that holds it, and where there; None of what is not on this machine."""
        return None

    @property
    def beside(self) -> tuple[str, int]:
        """The same for all that is read at once with it, and in no other respect; ("", 0) of what is read alone."""
        return "", 0

    @property
    def uri(self) -> str | None:
        """Where it is, of what is not on this machine; it may hold a secret."""
        return None


@dataclass(frozen=True)
class FilePart(HeldImage):
    """Bytes of a local file, from `offset` on."""

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
            raise ImageError(f"{name} is cut off", found=f"{len(found):,} bytes", expected=f"{self.size:,} bytes")
        return found

    @property
    def within(self) -> tuple[Container, str]:
        return self.container, f"{self.offset}+{self.size}"


def too_large(name: str, size: int) -> ImageError:
    return ImageError(
        f"{name} is not an image file of a sane size",
        found=f"{size:,} bytes",
        expected=f"at most {MAX_FILE_BYTES:,} bytes",
        fix="shrink it, or take it out of the data",
    )
