"""What a sweep would do, and what that costs, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.spec import SPARSE


@dataclass(frozen=True)
class Estimate:
    """Of a stage or of several, from what such stages took: the least, the median and the most that was seen."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage that at least one of the recipes needs. `name`: as plans have it; `recipes`: the names of those that need
    it; `there`: in the store already. `seconds`, `bytes`: estimates of making it, None where it is there, and where
    nothing like it is known (`seen` 0); `seen`: how many such stages the estimate is from."""

    name: str
    recipes: tuple[str, ...]
    there: bool
    seconds: Estimate | None
    bytes: Estimate | None
    seen: int


@dataclass(frozen=True)
class PlannedRecipe:
    """One recipe: `finished` where its bundle is done by an earlier sweep, or the error that it would fail with. To
    measure it takes `seconds` on a quiet machine, and `most` at most; None where it is not measured."""

    name: str
    recipe: str
    finished: bool
    error: ErrorFacts | None
    seconds: float | None
    most: float | None
    axes: dict[str, str] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class PlanTotal:
    """Numbers of stages: `asked` of all recipes together, `distinct` of these, `there` already, `to_make`, and
    `unknown`: those to be made of which nothing is known, which the estimates leave out. `seconds`, `bytes`: of what is
    to be made, one after the other; None where nothing is known of any. `measuring`: seconds on a quiet machine, and
    `measuring_most` at most."""

    asked: int
    distinct: int
    there: int
    to_make: int
    unknown: int
    seconds: Estimate | None
    bytes: Estimate | None
    measuring: float
    measuring_most: float


@dataclass(frozen=True)
class SweepPlanDocument:
    """The whole document; `environment` describes the machine."""

    format: Literal[1]
    created: str
    recipes: tuple[PlannedRecipe, ...]
    stages: tuple[PlannedStage, ...]
    total: PlanTotal
    environment: dict[str, str]
