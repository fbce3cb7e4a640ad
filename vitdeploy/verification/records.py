"""Collects answers and per-image records, whole or in pieces."""

from __future__ import annotations

import contextlib
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import EngineError
from vitdeploy.runtime.inputs import Further
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.runtime.runner import Array as CollectArray
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import PreprocessSpec

# --- Records of images: what a comparison needs of each, small enough to be kept of all -------------------------------
# An image has one row in some tables, and any number of rows in others, such as one for each object. Records of pieces
# of a set of images are joined in the order of the set, whatever the order of the pieces: a floating-point sum along
# the rows equals the sum over the whole set, bit for bit.


Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

# The name of the image column in a file; names of tables and columns contain no slash.
IMAGE = "image"
COUNT = "n"


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Rows of images. image: int32 [rows], ascending, the index of each row's image. columns: by name, [rows, ...],
    values for each row."""

    image: npt.NDArray[np.int32]
    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def each(cls, **columns: Array) -> ImageRows:
        """Return a table with one row for each image, in order."""
        return cls(np.arange(len(next(iter(columns.values()))), dtype=np.int32), columns)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Array]]) -> ImageRows:
        """Return a table from the rows of each image: the same names for all, [rows, ...] of one dtype and shape."""
        counts = [len(next(iter(each.values()))) for each in rows]
        columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        return cls(np.repeat(np.arange(len(rows), dtype=np.int32), counts), columns)

    def where(self, chosen: npt.NDArray[np.bool_]) -> ImageRows:
        """Return a subset of the rows."""
        return ImageRows(self.image[chosen], {name: column[chosen] for name, column in self.columns.items()})


@dataclass(frozen=True, eq=False)
class Records:
    """Tables of values for n images, by name."""

    n: int
    tables: Mapping[str, ImageRows]

    def __getitem__(self, name: str) -> ImageRows:
        return self.tables[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    def with_tables(self, **tables: ImageRows) -> Records:
        """Return these records with more tables for the same images."""
        return Records(self.n, {**self.tables, **tables})

    def beside(self, prefix: str, others: Records) -> Records:
        """Return these records with those of another comparison of the same images, their names prefixed."""
        return self.with_tables(**{prefix + name: table for name, table in others.tables.items()})

    def part(self, prefix: str) -> Records:
        """Return the tables that `beside` added under a prefix."""
        found = {name.removeprefix(prefix): table for name, table in self.tables.items() if name.startswith(prefix)}
        return Records(self.n, found)

    @classmethod
    def joined(cls, records: Sequence[Records], places: Sequence[Ints]) -> Records:
        """Return the records of all images; `places` as for `changes.joined`.

        Raises:
            ValueError: they have other tables, or other numbers of images than places; two images with one place.
        """
        if [record.n for record in records] != [len(place) for place in places]:
            raise ValueError(f"{[each.n for each in records]} images, but {[len(each) for each in places]} places")
        if len({tuple(sorted(each.tables)) for each in records}) != 1:
            raise ValueError(f"different tables: {sorted({tuple(sorted(each.tables)) for each in records})}")
        everywhere = np.concatenate(places)
        order = np.argsort(everywhere, kind="stable")
        if len(np.unique(everywhere)) != len(everywhere):
            raise ValueError("two images with the same place")
        ranks = np.empty(len(order), np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        starts = itertools.accumulate((each.n for each in records), initial=0)
        own = [ranks[start : start + each.n] for start, each in zip(starts, records, strict=False)]
        return cls(len(order), {name: _joined([each[name] for each in records], own) for name in records[0].tables})

    def save(self, path: Path) -> None:
        """Write an .npz."""
        arrays: dict[str, Array] = {COUNT: np.array(self.n, np.int64)}
        for name, table in self.tables.items():
            arrays[f"{name}/{IMAGE}"] = table.image
            arrays |= {f"{name}/{column}": values for column, values in table.columns.items()}
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Records:
        tables: dict[str, dict[str, Array]] = {}
        with np.load(path, allow_pickle=False) as file:
            n = int(file[COUNT])
            for key in file.files:
                name, slash, column = key.partition("/")
                if slash:
                    tables.setdefault(name, {})[column] = file[key]
        return cls(n, {name: ImageRows(columns.pop(IMAGE), columns) for name, columns in tables.items()})


def _joined(tables: Sequence[ImageRows], ranks: Sequence[npt.NDArray[np.int32]]) -> ImageRows:
    image = np.concatenate([own[table.image] for table, own in zip(tables, ranks, strict=True)])
    order = np.argsort(image, kind="stable")
    columns = {name: np.concatenate([table[name] for table in tables])[order] for name in tables[0].columns}
    return ImageRows(image[order], columns)


# --- Runs an artifact over images and keeps its answers. It uses a Predictor, exactly as an app does ------------------


CHUNK = 8
# The most answers held in memory, and written into one file. A multiple of CHUNK.
PIECE = 2048
SIZE = "size"

# (outputs of one image, its original (width, height)) -> the values to keep.
Keep = Callable[[Mapping[str, CollectArray], tuple[int, int]], Mapping[str, CollectArray]]
Turn = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class LazyColumn(Sequence[CollectArray]):
    """One array per image, computed on access."""

    length: int
    make: Callable[[int], CollectArray]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> CollectArray:  # type: ignore[override]  # no slices
        return self.make(range(self.length)[index])


@dataclass(frozen=True)
class Answers:
    """The answers kept from an artifact: by name, one array per image, in the order of the images."""

    columns: Mapping[str, Sequence[CollectArray]]

    def __len__(self) -> int:
        return max((len(column) for column in self.columns.values()), default=0)

    def size(self, index: int) -> tuple[int, int]:
        """Return the (width, height) of one original image, if kept."""
        width, height = self.columns[SIZE][index].tolist()
        return width, height

    def outputs(self, index: int) -> dict[str, CollectArray]:
        """Return the values kept for one image, except its size."""
        return {name: column[index] for name, column in self.columns.items() if name != SIZE}

    def stacked(self, name: str) -> CollectArray:
        """[images, ...] of a column whose arrays have one shape."""
        return np.stack(self.columns[name])

    def pieces(self, name: str) -> Iterator[CollectArray]:
        """Yield the same in pieces of at most `PIECE` images."""
        rows = iter(self.columns[name])
        while piece := list(itertools.islice(rows, PIECE)):
            yield np.stack(piece)

    def save(self, path: Path | IO[bytes]) -> None:
        """Write an .npz: a column of one shape as one array, any other as `name.0`, `name.1` ... Integers, such as
        class maps, are compressed; floats hardly compress."""
        arrays: dict[str, CollectArray] = {}
        for name, column in self.columns.items():
            if len({array.shape for array in column}) == 1:
                arrays[name] = np.stack(column)
            else:
                arrays |= {f"{name}.{i}": array for i, array in enumerate(column)}
        with zipfile.ZipFile(path, "w") as file:
            for name, array in arrays.items():
                member = zipfile.ZipInfo(f"{name}.npy")
                member.compress_type = zipfile.ZIP_STORED if array.dtype.kind == "f" else zipfile.ZIP_DEFLATED
                with file.open(member, "w", force_zip64=True) as out:
                    np.lib.format.write_array(out, array, allow_pickle=False)

    @classmethod
    def load(cls, path: Path) -> Answers:
        columns: dict[str, list[CollectArray]] = {}
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                name, dot, _ = key.partition(".")
                columns.setdefault(name, []).extend([file[key]] if dot else file[key])
        return cls({name: tuple(column) for name, column in columns.items()})


def everything(outputs: Mapping[str, CollectArray], size: tuple[int, int]) -> Mapping[str, CollectArray]:
    """Keep every output, and the original size as int64 [width, height]."""
    return {**outputs, SIZE: np.array(size, np.int64)}


def collect(
    runner: Runner,
    images: Iterable[tuple[Pixels, tuple[int, int]]],
    preprocess: PreprocessSpec,
    keep: Keep = everything,
    progress: Callable[[int], None] = lambda images: None,
    further: Iterable[Further] | None = None,
) -> Answers:
    """Return the answers for preprocessed images with their original sizes, with at most `CHUNK` images in memory.
    `further`: the values of each image for further inputs of the model.

    Raises:
        EngineError: an output is NaN or infinite.
    """
    with Predictor(runner, preprocess) as predictor:
        return gather(predictor, images, keep, progress, further=further)


def gather(
    predictor: Predictor,
    images: Iterable[tuple[Pixels, tuple[int, int]]],
    keep: Keep = everything,
    progress: Callable[[int], None] = lambda images: None,
    *,
    further: Iterable[Further] | None = None,
    fill: bool = False,
    turn: Turn = contextlib.nullcontext,
) -> Answers:
    """As `collect`, for a loaded artifact. The last `CHUNK` is padded with copies, since sums round differently in a
    different batch size; a single chunk is padded only if `fill` is True. The artifact runs while it holds `turn`."""
    columns: dict[str, list[CollectArray]] = {}
    broken = 0

    def run(held: list[tuple[Pixels, tuple[int, int], Further]]) -> int:
        copies = CHUNK - len(held) if fill or columns else 0
        filled = (*held, *held[-1:] * copies)
        with turn():
            outputs = predictor.outputs(
                [pixels for pixels, _, _ in filled], [brought for _, _, brought in filled if brought]
            )
        for i, (_, size, _) in enumerate(held):
            for name, array in keep({name: output[i] for name, output in outputs.items()}, size).items():
                columns.setdefault(name, []).append(array)
        progress(len(held))
        return sum(not _finite(output[i] for output in outputs.values()) for i in range(len(held)))

    held: list[tuple[Pixels, tuple[int, int], Further]] = []
    brings = itertools.repeat({}) if further is None else iter(further)
    for pixels, size in images:
        held.append((pixels, size, next(brings)))
        if len(held) == CHUNK:
            broken += run(held)
            held = []
    if held:
        broken += run(held)
    answers = Answers({name: tuple(column) for name, column in columns.items()})
    if broken:
        raise EngineError(
            f"{predictor.runner.name} produces non-finite outputs",
            found=f"NaN or infinity for {broken} of {len(answers)} images",
            expected="finite outputs",
            fix="choose another precision, or check the checkpoint",
        )
    return answers


def _finite(arrays: Iterable[CollectArray]) -> bool:
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)
