"""Records of images: what a comparison needs of each, small enough to be kept of all.

An image has one row in some tables, and any number of rows in others, such as one for each object. Records of pieces
of a set of images are joined in the order of the set, whatever the order of the pieces: whoever adds up floats along
the rows has the sum of the set, to the last bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

# The name of the column of images in a file; names of tables and columns have no slash.
IMAGE = "image"
COUNT = "n"


@dataclass(frozen=True, eq=False)
class Table:
    """Rows of images. image: int32 [rows], ascending, the image of each, counted from 0. columns: by name, [rows, ...],
    what is known of it."""

    image: npt.NDArray[np.int32]
    columns: Mapping[str, Array]

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    @classmethod
    def each(cls, **columns: Array) -> Table:
        """A table with one row for each image, in order."""
        return cls(np.arange(len(next(iter(columns.values()))), dtype=np.int32), columns)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Array]]) -> Table:
        """A table of the rows of each image: by the same names, [rows, ...] of one dtype and shape."""
        counts = [len(next(iter(each.values()))) for each in rows]
        columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
        return cls(np.repeat(np.arange(len(rows), dtype=np.int32), counts), columns)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """Some of the rows."""
        return Table(self.image[chosen], {name: column[chosen] for name, column in self.columns.items()})


@dataclass(frozen=True, eq=False)
class Records:
    """What is known of n images, by name."""

    n: int
    tables: Mapping[str, Table]

    def __getitem__(self, name: str) -> Table:
        return self.tables[name]

    def __contains__(self, name: str) -> bool:
        return name in self.tables

    def with_tables(self, **tables: Table) -> Records:
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
        return cls(n, {name: Table(columns.pop(IMAGE), columns) for name, columns in tables.items()})


def _joined(tables: Sequence[Table], ranks: Sequence[npt.NDArray[np.int32]]) -> Table:
    image = np.concatenate([own[table.image] for table, own in zip(tables, ranks, strict=True)])
    order = np.argsort(image, kind="stable")
    columns = {name: np.concatenate([table[name] for table in tables])[order] for name in tables[0].columns}
    return Table(image[order], columns)
