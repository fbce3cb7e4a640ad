"""Class by class: which are confused, and which provably lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.document.answers import AnswerFacts
from vitdeploy.document.report import Report
from vitdeploy.report import lookup, text
from vitdeploy.report.measures import Cell
from vitdeploy.report.page import RunPage
from vitdeploy.verification.classes import ClassRow as ClassDrops
from vitdeploy.verification.classes import ConfusedPair, Confusion, Drops

# Shades of a cell, from its share of the row.
SHADES = 5
# A phone has room for this many digits in a row of the matrix.
PHONE_DIGITS = 32
# Classes that a sentence names.
NAMED_CLASSES = 5
LONGEST_NAME, UPRIGHT_NAME = 18, 3  # letters of a class above its column, at all and without being turned


@dataclass(frozen=True)
class MatrixCell:
    """The count; the shade, 0 to SHADES; the difference from the original's count ("" if equal)."""

    count: str
    shade: int
    change: str


@dataclass(frozen=True)
class Matrix:
    """A row for each true class, a column for each answer. `upright`: the names of columns are that short. `phone`:
    there is room for it on one."""

    classes: list[str]
    upright: bool
    rows: list[tuple[str, list[MatrixCell]]]
    phone: bool


@dataclass(frozen=True)
class Confused:
    """A true class, the wrong answer to it, how often the original and the engine give it, and the difference."""

    truth: str
    answer: str
    original: str
    engine: str
    change: str


@dataclass(frozen=True)
class ClassRow:
    """One class. `proven`: the whole interval of the drop is above zero."""

    name: str
    n: str
    original: str
    value: str
    drop: Cell
    proven: bool


@dataclass(frozen=True)
class Classes:
    """One engine class by class. `headline` says what is proven of its classes."""

    artifact: str
    matrix: Matrix | None
    pairs: list[Confused]
    headline: str
    rows: list[ClassRow]


@dataclass(frozen=True)
class ClassesView:
    """The section. `left`: how many confusions, and how many classes, are not listed."""

    noun: str
    engines: list[Classes]
    left: tuple[int, int]


def classes_view(page: RunPage) -> list[ClassesView]:
    """The section; none where samples have no class."""
    found = class_views(page.report)
    return [ClassesView(page.report.data.noun, found, left(page.report))] if found else []


def left(report: Report) -> tuple[int, int]:
    """The numbers of confusions and of classes that are not listed."""
    found = report.answers or AnswerFacts()
    return found.confusion.left if found.confusion else 0, found.classes.left if found.classes else 0


def class_views(report: Report) -> list[Classes]:
    """Shipped or recommended engines, class by class, the recommended first; none without classes."""
    found = report.answers
    if found is None or found.confusion is None or found.classes is None:
        return []
    names = [name for name in lookup.focus(report) if name in found.changed]
    return [_classes(found.confusion, found.classes, name) for name in names]


def _classes(confusion: Confusion, classes: Drops, artifact: str) -> Classes:
    matrix = None
    if confusion.matrix and confusion.classes:
        both = [confusion.matrix[name] for name in (lookup.ORIGINAL, artifact)]
        matrix = _matrix(confusion.classes, *both)
    pairs = [_confused(pair, artifact) for pair in confusion.pairs]
    rows = [_class_row(row, artifact) for row in classes.rows]
    return Classes(artifact, matrix, pairs, class_headline(classes, artifact), rows)


def _matrix(classes: Sequence[str], original: Sequence[Sequence[int]], engine: Sequence[Sequence[int]]) -> Matrix:
    rows, widest = [], 1
    for name, theirs, ours in zip(classes, original, engine, strict=True):
        total = max(sum(ours), 1)
        widest = max(widest, *(len(str(each)) for each in ours))
        cells = [
            MatrixCell(str(b) if b else "", math.ceil(SHADES * b / total), _signed(b - a))
            for a, b in zip(theirs, ours, strict=True)
        ]
        rows.append((name, cells))
    names = [text.shorten(name, LONGEST_NAME) for name in classes]
    upright = max(map(len, names)) <= UPRIGHT_NAME
    return Matrix(names, upright, rows, widest * len(classes) <= PHONE_DIGITS)


def _signed(change: int) -> str:
    return f"{change:+d}".replace("-", "−") if change else ""


def _confused(pair: ConfusedPair, artifact: str) -> Confused:
    original, engine = (pair.counts.get(name, 0) for name in (lookup.ORIGINAL, artifact))
    change = _signed(engine - original) or "0"
    return Confused(pair.truth, pair.answer, text.number(original, 0), text.number(engine, 0), change)


def _class_row(row: ClassDrops, artifact: str) -> ClassRow:
    engine = row.engines[artifact]
    return ClassRow(
        row.name,
        text.number(row.n, 0),
        text.number(row.original),
        text.number(engine.value),
        Cell(text.number(engine.drop), text.interval(engine.drop_ci95)),
        engine.drop_ci95[0] > 0,
    )


def class_headline(classes: Drops, artifact: str) -> str:
    """The classes that lose, if the intervals of all classes together prove it."""
    lost = classes.lost[artifact]
    if not lost.classes:
        return f"No class provably loses accuracy ({text.count(classes.classes, 'class', 'classes')} together, 95 %)."
    parts = [
        f"{each.name} {text.number(each.drop)} points ({text.interval(each.drop_ci95)})"
        for each in lost.worst[:NAMED_CLASSES]
    ]
    more = f"; and {lost.classes - NAMED_CLASSES} more" if lost.classes > NAMED_CLASSES else ""
    return f"Provably lost: {'; '.join(parts)}{more}."
