"""sweep.json: the reports of many recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.report import Report
from vitdeploy.spec import SPARSE


@dataclass(frozen=True)
class SweptRecipe:
    """One recipe by its name and file, with its report, or the error that it failed with. Of a recipe out of a grid,
    `recipe` is the grid's file, and `axes` the values that it has there, as the file calls them, by field."""

    name: str
    recipe: str
    report: Report | None
    error: ErrorFacts | None
    axes: dict[str, str] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class SweepDocument:
    """The whole document; `environment` describes the machine."""

    format: Literal[1]
    created: str
    recipes: tuple[SweptRecipe, ...]
    environment: dict[str, str]
