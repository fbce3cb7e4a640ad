"""sweep.json: the reports of many recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.report import Report
from vitdeploy.spec import SPARSE


@dataclass(frozen=True)
class SweptRecipe:
    """One recipe by its name and file, with its report, or the error that it failed with, or why it was not begun. Of a
    recipe out of a grid, `recipe` is the grid's file, and `axes` the values that it has there, as the file calls them,
    by field. `host`: the node that measured it, where that was not the machine of the command."""

    name: str
    recipe: str
    report: Report | None
    error: ErrorFacts | None
    axes: dict[str, str] | None = field(default=None, metadata=SPARSE)
    host: str | None = field(default=None, metadata=SPARSE)
    not_begun: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class StageCounts:
    """Stages that were made ahead of measuring: `asked` of all recipes together, `distinct` of these, `made` by this
    command; the rest was in the store."""

    asked: int
    distinct: int
    made: int


@dataclass(frozen=True)
class Running:
    """A sweep that goes on: `done` of `total` of the phase that `text` names, at a time; how many `seconds_left`, None
    where nothing was measured yet that says it."""

    text: str
    done: int
    total: int
    at: str
    seconds_left: float | None


@dataclass(frozen=True)
class SweepDocument:
    """The whole document; `environment` describes the machine of the command. `stages`: None where each recipe was made
    when it was measured; `running`: only on a page of a sweep that goes on."""

    format: Literal[1]
    created: str
    recipes: tuple[SweptRecipe, ...]
    environment: dict[str, str]
    stages: StageCounts | None = field(default=None, metadata=SPARSE)
    running: Running | None = field(default=None, metadata=SPARSE)
