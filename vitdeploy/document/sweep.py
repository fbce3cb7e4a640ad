"""sweep.json: the reports of many recipes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.report import Report


@dataclass(frozen=True)
class SweptRecipe:
    """One recipe by its name and file, with its report, or the error that it failed with."""

    name: str
    recipe: str
    report: Report | None
    error: ErrorFacts | None


@dataclass(frozen=True)
class SweepDocument:
    """The whole document; `environment` describes the machine."""

    format: Literal[1]
    created: str
    recipes: tuple[SweptRecipe, ...]
    environment: dict[str, str]
