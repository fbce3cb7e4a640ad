"""Images that are decoded and resized once, for all their readers.

Their pixels lie in an unnamed file, which disappears with this process however it ends; one at a time is in memory.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from vitdeploy.data.decoding import Loaded, Size, decode_images, load_sample
from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import StorageError
from vitdeploy.publish import storage_errors
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec

# The share of the free space that pixels may take. If they need more, every reader decodes the files again.
DISK_SHARE = 0.5


class Decoded(Sequence[Loaded]):
    """The pixels of some images, uint8 [height, width, channels], each with the (width, height) of its original.

    May be read from several threads. `kept`: they are in the file, and no image is decoded again.
    """

    def __init__(self, samples: Sequence[Sample], spec: PreprocessSpec, folder: Path) -> None:
        """`samples` are those that `fill` adds, all or some; `folder` holds the file."""
        self._samples, self._spec, self._folder = list(samples), spec, folder
        self._sizes: list[Size] = []
        # Of each image where its pixels lie in the file, in images.
        self._slots: list[int] = []
        self._shape = (*spec.crop, spec.channels)
        self._bytes = int(np.prod(self._shape))
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        with storage_errors(folder):
            if len(samples) * self._bytes <= DISK_SHARE * shutil.disk_usage(folder).free:
                self._file = tempfile.TemporaryFile(prefix=".vitdeploy-pixels-", dir=folder)  # noqa: SIM115 - kept open

    @property
    def kept(self) -> bool:
        return self._file is not None

    def fill(self, skipped: Skipped | None, count: Callable[[int], None]) -> tuple[Sample, ...]:
        """Decode all images and keep the readable ones; returns these.

        Raises:
            ImageError, DataError, WorkerError: as `decode_images`.
            StorageError: the disk is full.
        """
        order = reading_order(self._samples)
        left, good = iter(order), list[tuple[int, int, Size]]()
        for sample, pixels, size in decode_images([self._samples[i] for i in order], self._spec, skipped):
            if self._file is not None:
                with storage_errors(self._folder):
                    self._file.write(np.ascontiguousarray(pixels).data)
            index = next(i for i in left if self._samples[i] is sample)  # those before it are skipped
            good.append((index, len(good), size))
            count(1)
        good.sort()
        self._samples = [self._samples[index] for index, _, _ in good]
        self._slots, self._sizes = [slot for _, slot, _ in good], [size for _, _, size in good]
        return tuple(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Loaded:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._read(index) if self.kept else self._load(self._samples[index])

    def __iter__(self) -> Iterator[Loaded]:
        if self.kept:
            return (self._read(index) for index in range(len(self)))
        return ((pixels, size) for _, pixels, size in decode_images(self._samples, self._spec))

    def some(self, places: range) -> Iterator[Loaded]:
        """Those at some places that follow each other."""
        if self.kept:
            return (self._read(index) for index in places)
        samples = self._samples[places.start : places.stop]
        return ((pixels, size) for _, pixels, size in decode_images(samples, self._spec))

    def _load(self, sample: Sample) -> Loaded:
        return load_sample(sample, self._spec)

    def _read(self, index: int) -> tuple[Pixels, Size]:
        pixels = np.empty(self._shape, np.uint8)
        assert self._file is not None
        with self._lock, storage_errors(self._folder):
            self._file.seek(self._slots[index] * self._bytes)
            count = self._file.readinto(pixels.data)  # type: ignore[attr-defined]
        if count != self._bytes:
            raise StorageError(
                f"the decoded images in {self._folder} are not all there",
                found=f"{count:,} bytes of image {index}",
                wanted=f"{self._bytes:,} bytes",
                fix="give the command again; another place is set with VITDEPLOY_STORE",
            )
        return pixels, self._sizes[index]


class DecodedSet:
    """The same images in all requested geometries: specs that differ only in mean and deviation share one."""

    def __init__(self, samples: Sequence[Sample], folder: Path) -> None:
        self._samples, self._folder = samples, folder
        self._by_geometry: dict[PreprocessSpec, Decoded] = {}
        self._lock = threading.Lock()

    def check(self, spec: PreprocessSpec, skipped: Skipped | None, count: Callable[[int], None]) -> tuple[Sample, ...]:
        """Decode all images, and keep the readable ones; errors as `Decoded.fill`."""
        decoded = Decoded(self._samples, spec, self._folder)
        self._samples = decoded.fill(skipped, count)
        self._by_geometry[_geometry(spec)] = decoded
        return tuple(self._samples)

    def of(self, spec: PreprocessSpec) -> Decoded:
        """The images as `spec` resizes and crops them; decoded when first requested."""
        with self._lock:
            found = self._by_geometry.get(_geometry(spec))
            if found is None:
                found = Decoded(self._samples, spec, self._folder)
                found.fill(None, lambda images: None)
                self._by_geometry[_geometry(spec)] = found
            return found


def reading_order(samples: Sequence[Sample]) -> list[int]:
    """The indices of samples in the order in which they are best read: rows of a table group by group, all others as
    they are. A group is read at once, for whichever of its rows."""
    keys = [("", 0) if each.held is None else each.held.beside for each in samples]
    return sorted(range(len(samples)), key=lambda i: keys[i])


def _geometry(spec: PreprocessSpec) -> PreprocessSpec:
    return dataclasses.replace(spec, mean=(0.0,) * spec.channels, std=(1.0,) * spec.channels)
