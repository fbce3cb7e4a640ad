"""What sweeps and tunings print as JSON."""

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.document.bench import Bench, ErrorFacts, Omission
from vitdeploy.document.report import Judgement, Report, VerdictFacts
from vitdeploy.search.frame import Expected
from vitdeploy.search.pruning import Pruning
from vitdeploy.search.rows import Schedule
from vitdeploy.spec import SPARSE, Budget

# --- sweep.json: the reports of many recipes --------------------------------------------------------------------------


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

    @property
    def flags(self) -> list[str]:
        """Those of all artifacts of all recipes."""
        return [flag for each in self.recipes if each.report for flag in each.report.flags]


# --- What a sweep would do, and what that costs, before anything starts -----------------------------------------------


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


# --- tune.json: every variant that a search tried, and the finalists as a report has engines --------------------------


@dataclass(frozen=True, kw_only=True)
class TuneVerdict(VerdictFacts):
    """`confirmed`: the finalists that the evaluation samples confirm, the nearest to the original first; `stopped`: the
    one that they do not."""

    confirmed: tuple[str, ...]
    stopped: str | None


@dataclass(frozen=True)
class VariantFacts:
    """One variant. `merges`: (block, tokens that remain) each; `prune`: the least share of MACs that is gone.
    `latency_ms`: the median of `rounds_ms`. `distance` from the original on `images` calibration images, with its 95 %
    interval; `expected` of a classifier's answers."""

    name: str
    target: str
    precision: str
    merges: tuple[tuple[int, int], ...]
    latency_ms: float
    rounds_ms: tuple[float, ...]
    bytes: int
    finalist: bool
    images: int
    distance: float
    ci95: tuple[float, float]
    expected: Expected | None
    prune: float | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class MergingTrial:
    """The trials of token merging; `tokens`: their number without it."""

    tokens: int
    schedules: tuple[Schedule, ...]


@dataclass(frozen=True, kw_only=True)
class TuneDocument(Judgement):
    """`unit` of distances; `merging`: by target; `recipe`: of what to ship; `pruning`: its trials."""

    verdict: TuneVerdict
    bench: Bench
    budget: Budget
    unit: str
    variants: tuple[VariantFacts, ...]
    merging: dict[str, MergingTrial]
    left_out: tuple[Omission, ...]
    recipe: dict[str, object]
    pruning: tuple[Pruning, ...] | None = field(default=None, metadata=SPARSE)

    @property
    def nearest(self) -> list[VariantFacts]:
        """All variants, the nearest to the original first."""
        return sorted(self.variants, key=lambda each: (each.distance, each.latency_ms))
