"""Answers in pieces, collected."""

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
# of a set of images are joined in the order of the set, whatever the order of the pieces: whoever adds up floats along
# the rows has the sum of the set, to the last bit.


Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

# The name of the column of images in a file; names of tables and columns have no slash.
IMAGE = "image"
COUNT = "n"


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Rows of images. image: int32 [rows], ascending, the image of each, counted from 0. columns: by name, [rows, ...],
    what is known of it."""

    image: npt.NDArray[np.int32]
    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def each(cls, **columns: Array) -> ImageRows:
        """A table with one row for each image, in order."""
        return cls(np.arange(len(next(iter(columns.values()))), dtype=np.int32), columns)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Array]]) -> ImageRows:
        """A table of the rows of each image: by the same names, [rows, ...] of one dtype and shape."""
        counts = [len(next(iter(each.values()))) for each in rows]
        columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        return cls(np.repeat(np.arange(len(rows), dtype=np.int32), counts), columns)

    def where(self, chosen: npt.NDArray[np.bool_]) -> ImageRows:
        """Some of the rows."""
        return ImageRows(self.image[chosen], {name: column[chosen] for name, column in self.columns.items()})


@dataclass(frozen=True, eq=False)
class Records:
    """What is known of n images, by name."""

    n: int
    tables: Mapping[str, ImageRows]

    def __getitem__(self, name: str) -> ImageRows:
        return self.tables[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    def with_tables(self, **tables: ImageRows) -> Records:
        """These, and more of the same images."""
        return Records(self.n, {**self.tables, **tables})

    def beside(self, prefix: str, others: Records) -> Records:
        """These, and others of the same images, by names with a prefix."""
        return self.with_tables(**{prefix + name: table for name, table in others.tables.items()})

    def part(self, prefix: str) -> Records:
        """The tables that `beside` has put under a prefix."""
        found = {name.removeprefix(prefix): table for name, table in self.tables.items() if name.startswith(prefix)}
        return Records(self.n, found)

    @classmethod
    def joined(cls, records: Sequence[Records], places: Sequence[Ints]) -> Records:
        """The records of all images; `places` as of `counts.joined`.

        Raises:
            ValueError: they have other tables, or other numbers of images than places; two images with one place.
        """
        if [each.n for each in records] != [len(each) for each in places]:
            raise ValueError(f"{[each.n for each in records]} images with {[len(each) for each in places]} places")
        if len({tuple(sorted(each.tables)) for each in records}) != 1:
            raise ValueError(f"records of {sorted({tuple(sorted(each.tables)) for each in records})}")
        everywhere = np.concatenate(places)
        order = np.argsort(everywhere, kind="stable")
        if len(np.unique(everywhere)) != len(everywhere):
            raise ValueError("two images at one place")
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
# Where there are many answers, so many are in memory; as many are written into one file. A multiple of CHUNK.
PIECE = 2048
SIZE = "size"

# (outputs of one image, its original (width, height)) -> what is kept of them.
Keep = Callable[[Mapping[str, CollectArray], tuple[int, int]], Mapping[str, CollectArray]]
Turn = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class LazyColumn(Sequence[CollectArray]):
    """One array per image, made when it is looked at."""

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
        """(width, height) of the original of one image, where that is kept."""
        width, height = self.columns[SIZE][index].tolist()
        return width, height

    def outputs(self, index: int) -> dict[str, CollectArray]:
        """What is kept of one image, but for its size."""
        return {name: column[index] for name, column in self.columns.items() if name != SIZE}

    def stacked(self, name: str) -> CollectArray:
        """[images, ...] of a column whose arrays have one shape."""
        return np.stack(self.columns[name])

    def pieces(self, name: str) -> Iterator[CollectArray]:
        """The same, at most `PIECE` images at a time."""
        rows = iter(self.columns[name])
        while piece := list(itertools.islice(rows, PIECE)):
            yield np.stack(piece)

    def save(self, path: Path | IO[bytes]) -> None:
        """Write an .npz: a column of one shape as one array, any other as `name.0`, `name.1` ... Whole numbers, such as
        maps of classes, are compressed; floats hardly get smaller."""
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
    """The answers for preprocessed images with their original sizes, at most `CHUNK` images in memory at a time.
    `further`: what each image brings for the further inputs of a model that has some.

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
    """As `collect`, of an artifact that is loaded already. The last `CHUNK` is filled up with copies, as the sums of
    another batch are rounded otherwise; where it is the only one too if `fill` is True. The artifact runs inside
    `turn`."""
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
            f"{predictor.runner.name} gives outputs that are not finite",
            found=f"NaN or infinity for {broken} of {len(answers)} images",
            expected="finite outputs",
            fix="choose another precision, or check the checkpoint",
        )
    return answers


def _finite(arrays: Iterable[CollectArray]) -> bool:
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)
