"""Runs an artifact over images and keeps its answers. It uses a Predictor, exactly as an app does."""

from __future__ import annotations

import contextlib
import itertools
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from vitdeploy.errors import EngineError
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec

CHUNK = 8
# Where there are many answers, so many are in memory; as many are written into one file. A multiple of CHUNK.
PIECE = 2048
SIZE = "size"

# (outputs of one image, its original (width, height)) -> what is kept of them.
Keep = Callable[[Mapping[str, Array], tuple[int, int]], Mapping[str, Array]]
Turn = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Column(Sequence[Array]):
    """One array per image, made when it is looked at."""

    length: int
    make: Callable[[int], Array]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Array:  # type: ignore[override]  # no slices
        return self.make(range(self.length)[index])


@dataclass(frozen=True)
class Answers:
    """The answers kept from an artifact: by name, one array per image, in the order of the images."""

    columns: Mapping[str, Sequence[Array]]

    def __len__(self) -> int:
        return max((len(column) for column in self.columns.values()), default=0)

    def stacked(self, name: str) -> Array:
        """[images, ...] of a column whose arrays have one shape."""
        return np.stack(self.columns[name])

    def pieces(self, name: str) -> Iterator[Array]:
        """The same, at most `PIECE` images at a time."""
        rows = iter(self.columns[name])
        while piece := list(itertools.islice(rows, PIECE)):
            yield np.stack(piece)

    def save(self, path: Path | IO[bytes]) -> None:
        """Write an .npz: a column of one shape as one array, any other as `name.0`, `name.1` ... Whole numbers, such as
        maps of classes, are compressed; floats hardly get smaller."""
        arrays: dict[str, Array] = {}
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
        columns: dict[str, list[Array]] = {}
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                name, dot, _ = key.partition(".")
                columns.setdefault(name, []).extend([file[key]] if dot else file[key])
        return cls({name: tuple(column) for name, column in columns.items()})


def everything(outputs: Mapping[str, Array], size: tuple[int, int]) -> Mapping[str, Array]:
    """Keep every output, and the original size as int64 [width, height]."""
    return {**outputs, SIZE: np.array(size, np.int64)}


def collect(
    runner: Runner,
    images: Iterable[tuple[Pixels, tuple[int, int]]],
    preprocess: PreprocessSpec,
    keep: Keep = everything,
    progress: Callable[[int], None] = lambda images: None,
) -> Answers:
    """The answers for preprocessed images with their original sizes, at most `CHUNK` images in memory at a time.

    Raises:
        EngineError: an output is NaN or infinite.
    """
    with Predictor(runner, preprocess) as predictor:
        return gather(predictor, images, keep, progress)


def gather(
    predictor: Predictor,
    images: Iterable[tuple[Pixels, tuple[int, int]]],
    keep: Keep = everything,
    progress: Callable[[int], None] = lambda images: None,
    *,
    fill: bool = False,
    turn: Turn = contextlib.nullcontext,
) -> Answers:
    """As `collect`, of an artifact that is loaded already. The last `CHUNK` is filled up with copies, as the sums of
    another batch are rounded otherwise; where it is the only one too if `fill` is True. The artifact runs inside
    `turn`."""
    columns: dict[str, list[Array]] = {}
    broken = 0

    def run(held: list[tuple[Pixels, tuple[int, int]]]) -> int:
        copies = CHUNK - len(held) if fill or columns else 0
        with turn():
            outputs = predictor.outputs([pixels for pixels, _ in (*held, *held[-1:] * copies)])
        for i, (_, size) in enumerate(held):
            for name, array in keep({name: output[i] for name, output in outputs.items()}, size).items():
                columns.setdefault(name, []).append(array)
        progress(len(held))
        return sum(not _finite(output[i] for output in outputs.values()) for i in range(len(held)))

    held = []
    for image in images:
        held.append(image)
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
            wanted="finite outputs",
            fix="choose another precision, or check the checkpoint",
        )
    return answers


def _finite(arrays: Iterable[Array]) -> bool:
    return all(array.dtype.kind != "f" or bool(np.isfinite(array).all()) for array in arrays)
