"""tune.json: every variant that a search tried, and the finalists as a report has engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from vitdeploy.document.bench import Bench
from vitdeploy.document.context import Omission
from vitdeploy.document.report import Judgement, VerdictFacts
from vitdeploy.search.expected import Expected
from vitdeploy.search.pruning import Pruning
from vitdeploy.search.rows import RowTable
from vitdeploy.search.schedules import Schedule
from vitdeploy.spec import SPARSE, Budget


@dataclass(frozen=True, kw_only=True)
class TuneVerdict(VerdictFacts):
    """`confirmed`: the finalists that the evaluation samples confirm, the nearest to the original first; `stopped`: the
    one that they do not."""

    confirmed: tuple[str, ...]
    stopped: str | None


@dataclass(frozen=True)
class VariantFacts:
    """One variant. `merges`: (block, tokens that remain) each; `rows`: how many are computed, None as many as tokens;
    `prune`: the least share of MACs that is gone.
    `latency_ms`: the median of `rounds_ms`. `distance` from the original on `images` calibration images, with its 95 %
    interval; `expected` of a classifier's answers."""

    name: str
    target: str
    precision: str
    merges: tuple[tuple[int, int], ...]
    rows: int | None
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
    """`unit` of distances; `rows`, `merging`: by target; `recipe`: of what to ship; `pruning`: its trials."""

    verdict: TuneVerdict
    bench: Bench
    budget: Budget
    unit: str
    variants: tuple[VariantFacts, ...]
    rows: dict[str, RowTable]
    merging: dict[str, MergingTrial]
    left_out: tuple[Omission, ...]
    recipe: dict[str, object]
    pruning: tuple[Pruning, ...] | None = field(default=None, metadata=SPARSE)
