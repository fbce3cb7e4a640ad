"""The files of answers that the original and every engine leave: one, or of many samples one for each `PIECE`.

Of many, an interrupted stage goes on behind the last file that is whole, and whoever reads them has one in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from vitdeploy.publish import storage_errors
from vitdeploy.runtime.atomic import open_atomic
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.tasks.adapter import Count, Data, TaskAdapter
from vitdeploy.verification.collect import PIECE, Answers
from vitdeploy.zip_members import DAMAGED

ANSWERS_FILE = "answers.npz"
PIECE_FILE = "answers-{:06}.npz"


def write_answers(
    adapter: TaskAdapter, runner: Runner, data: Data, out: Path, count: Count, scratch: Path | None = None
) -> None:
    """Write what a runner answers to the evaluation samples into `out`; `scratch` keeps files of many answers for the
    case that this is interrupted. Errors of the runner and of images propagate."""
    samples = len(data.evaluation)
    if samples <= PIECE or not adapter.divisible:
        adapter.answers(runner, data, count).save(out / ANSWERS_FILE)
        return
    ranges = [range(start, min(start + PIECE, samples)) for start in range(0, samples, PIECE)]
    missing = []
    for number, part in enumerate(ranges):
        file = PIECE_FILE.format(number)
        if scratch is not None and _is_whole(scratch / file, len(part)):
            shutil.copyfile(scratch / file, out / file)
            count(len(part))
        else:
            missing.append(number)
    found = adapter.parts(runner, data, [ranges[number] for number in missing], count) if missing else iter(())
    for number, answers in zip(missing, found, strict=True):
        file = PIECE_FILE.format(number)
        answers.save(out / file)
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
            _keep(out / file, scratch)


def _keep(file: Path, scratch: Path) -> None:
    # Another run may have finished the stage, and cleared the folder.
    with (
        contextlib.suppress(FileNotFoundError),
        storage_errors(scratch),
        file.open("rb") as written,
        open_atomic(scratch / file.name) as kept,
    ):
        shutil.copyfileobj(written, kept)


def read_answers(folder: Path) -> Answers:
    """The answers in a folder; of many, those that are looked at are in memory."""
    if (folder / ANSWERS_FILE).exists():
        return Answers.load(folder / ANSWERS_FILE)
    files = _Files(sorted(folder.glob(PIECE_FILE.format(0).replace("000000", "*"))))
    return Answers({name: _Column(files, name) for name in files.read(0).columns})


def _is_whole(file: Path, samples: int) -> bool:
    try:
        return len(Answers.load(file)) == samples
    except DAMAGED:
        return False


class _Files:
    """The files of many answers, the last one that was read in memory."""

    def __init__(self, files: Sequence[Path]) -> None:
        if not files:
            raise FileNotFoundError("no file of answers")
        self._files = files
        self._last: tuple[int, Answers] | None = None
        last = len(self.read(len(files) - 1))
        self.each = len(self.read(0))
        self.samples = (len(files) - 1) * self.each + last

    def __len__(self) -> int:
        return len(self._files)

    def read(self, number: int) -> Answers:
        if self._last is None or self._last[0] != number:
            self._last = number, Answers.load(self._files[number])
        return self._last[1]


class _Column(Sequence[Array]):
    """One column of them."""

    def __init__(self, files: _Files, name: str) -> None:
        self._files, self._name = files, name

    def __len__(self) -> int:
        return self._files.samples

    def __iter__(self) -> Iterator[Array]:
        pieces = (self._files.read(number).columns[self._name] for number in range(len(self._files)))
        return itertools.chain.from_iterable(pieces)

    def __getitem__(self, index: int) -> Array:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        return np.asarray(self._files.read(index // self._files.each).columns[self._name][index % self._files.each])
