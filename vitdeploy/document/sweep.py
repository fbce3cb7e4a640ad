"""The JSON documents of sweeps and searches (`sweep`, `tune`)."""

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
    """One recipe by its name and file, with its report, its error, or why it was not started. For a recipe from a grid,
    `recipe` is the grid's file, and `axes` its values by field, with the names in that file. `host`: the node that
    measured it, if it was not the machine of the command."""

    name: str
    recipe: str
    report: Report | None
    error: ErrorFacts | None
    axes: dict[str, str] | None = field(default=None, metadata=SPARSE)
    host: str | None = field(default=None, metadata=SPARSE)
    not_begun: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class StageCounts:
    """Numbers of stages that ran before measuring: `asked`: of all recipes together; `distinct` ones of these; `made`:
    computed by this command; the rest was in the store."""

    asked: int
    distinct: int
    made: int


@dataclass(frozen=True)
class Running:
    """The state of a running sweep at the time `at`: `done` of `total` in the phase `text`, and the expected
    `seconds_left`, None if unknown."""

    text: str
    done: int
    total: int
    at: str
    seconds_left: float | None


@dataclass(frozen=True)
class SweepDocument:
    """The whole document. `environment`: the machine of the command. `stages`: None if each recipe's stages ran right
    before its measurement; `running`: only on the page of a running sweep."""

    format: Literal[1]
    created: str
    recipes: tuple[SweptRecipe, ...]
    environment: dict[str, str]
    stages: StageCounts | None = field(default=None, metadata=SPARSE)
    running: Running | None = field(default=None, metadata=SPARSE)

    @property
    def flags(self) -> list[str]:
        """The flags of all artifacts of all recipes."""
        return [flag for recipe in self.recipes if recipe.report for flag in recipe.report.flags]


# --- The plan of a sweep and its expected cost, before anything starts ------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """The expected cost of one or several stages: the least, the median and the most of similar stages."""

    least: float
    median: float
    most: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage that at least one of the recipes needs. `name`: its name in plans; `recipes`: the names of the recipes
    that need it; `there`: whether it is in the store. `seconds`, `bytes`: its expected cost, None if it is in the store
    or if no similar stage is known (`seen` 0); `seen`: the number of similar stages behind the estimate."""

    name: str
    recipes: tuple[str, ...]
    there: bool
    seconds: Estimate | None
    bytes: Estimate | None
    seen: int


@dataclass(frozen=True)
class PlannedRecipe:
    """One recipe. `finished`: an earlier sweep has made its bundle; `error`: the error that it would fail with.
    `seconds`, `most`: the expected time of its measurement on a quiet machine, and at most; None if it is not
    measured."""

    name: str
    recipe: str
    finished: bool
    error: ErrorFacts | None
    seconds: float | None
    most: float | None
    axes: dict[str, str] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class PlanTotal:
    """Numbers of stages: `asked` of all recipes together, `distinct` ones of these, `there` (in the store), `to_make`,
    and `unknown`: stages to make without an estimate. `seconds`, `bytes`: the cost of the stages to make, one after the
    other; None without any estimate. `measuring`: seconds on a quiet machine, and `measuring_most` at most."""

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
    """The whole document. `environment`: the machine."""

    format: Literal[1]
    created: str
    recipes: tuple[PlannedRecipe, ...]
    stages: tuple[PlannedStage, ...]
    total: PlanTotal
    environment: dict[str, str]


# --- tune.json: every variant of a search, and its finalists as engines of a report -----------------------------------


@dataclass(frozen=True, kw_only=True)
class TuneVerdict(VerdictFacts):
    """The verdict on a search. `confirmed`: the finalists that the evaluation samples confirm, the closest to the
    original first; `stopped`: the first one that they do not confirm."""

    confirmed: tuple[str, ...]
    stopped: str | None


@dataclass(frozen=True)
class VariantFacts:
    """One variant. `merges`: pairs (block, remaining tokens); `prune`: the least share of pruned MACs. `latency_ms`:
    the median of `rounds_ms`. `distance` from the original on `images` calibration images, with its 95 % interval;
    `expected`: the expected agreement of a classifier's answers."""

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
    """The trials of token merging. `tokens`: the number of tokens without merging."""

    tokens: int
    schedules: tuple[Schedule, ...]


@dataclass(frozen=True, kw_only=True)
class TuneDocument(Judgement):
    """tune.json. `unit`: the unit of distances; `merging`: by target; `recipe`: the recommended recipe; `pruning`: its
    trials; `disturbed`: why the latencies of the variants are unreliable, "" if they are reliable."""

    verdict: TuneVerdict
    bench: Bench
    budget: Budget
    unit: str
    variants: tuple[VariantFacts, ...]
    merging: dict[str, MergingTrial]
    left_out: tuple[Omission, ...]
    recipe: dict[str, object]
    pruning: tuple[Pruning, ...] | None = field(default=None, metadata=SPARSE)
    disturbed: str = field(default="", metadata=SPARSE)

    @property
    def noise(self) -> str:
        """Why the latencies rank no variant; "" if they do."""
        every = all(variant.name in self.undecided for variant in self.variants if variant.finalist)
        return self.disturbed or ("the latency of every finalist is undecided" if every else "")

    @property
    def nearest(self) -> list[VariantFacts]:
        """All variants, the closest to the original first."""
        return sorted(self.variants, key=lambda each: (each.distance, each.latency_ms))
