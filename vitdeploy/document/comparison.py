"""compare.json: the losses and gains of a candidate against a baseline, by engine."""

from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.benchmark import evidence, summary
from vitdeploy.document.bench import Bench
from vitdeploy.spec import SPARSE, GateStatus
from vitdeploy.verification.comparison import Control
from vitdeploy.verification.gate import Gate


@dataclass(frozen=True)
class ComparisonLimits:
    """The allowed loss of the candidate: points of accuracy, and percent of time; None without a limit."""

    max_drop: float | None
    max_slowdown: float | None


@dataclass(frozen=True)
class AccuracyChange:
    """`baseline`, `candidate` and `agreement` in percent of `n` samples, the drop in points; None if unknown.
    `control`: the agreement of unrelated answers, if it was measured."""

    how: Literal["measured", "recorded", "same files"]
    n: int
    metric: str | None
    baseline: float | None
    candidate: float | None
    drop: float | None
    drop_ci95: tuple[float, float] | None
    agreement: float | None
    agreement_ci95: tuple[float, float] | None
    control: Control | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class TimeRatio:
    """The ratio candidate / baseline, as in `bench.Ratio`; a measured ratio has all its fields. `difference`: the
    verdict on the candidate, in words."""

    metric: summary.Metric
    ratio: float
    ci95: tuple[float, float]
    decided: bool = True
    reason: str = ""
    difference: str = ""
    a: str | None = field(default=None, metadata=SPARSE)
    b: str | None = field(default=None, metadata=SPARSE)
    verdict: str | None = field(default=None, metadata=SPARSE)
    a_ms: float | None = field(default=None, metadata=SPARSE)
    b_ms: float | None = field(default=None, metadata=SPARSE)
    unstable: bool | None = field(default=None, metadata=SPARSE)
    bounds: evidence.Interval = (None, None)


@dataclass(frozen=True)
class Check:
    """One check of a pair: of its accuracy, or of one of its times."""

    name: str
    status: GateStatus
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class PairFacts:
    """One pair of engines. `flags`: the flags of both sides' measurements. `same_engine`: both sides are the same
    engine on the same machine."""

    engine: str
    accuracy: AccuracyChange | None
    ratios: tuple[TimeRatio, ...]
    flags: tuple[str, ...]
    same_engine: bool
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class DigestPair:
    """The sha256 of one item on both sides; None if a side lacks it."""

    name: str
    baseline: str | None
    candidate: str | None

    @property
    def differs(self) -> bool:
        return self.baseline != self.candidate


@dataclass(frozen=True)
class ComparisonDocument:
    """The whole document. `measured`: whether the engines were run, instead of taking their numbers from reports."""

    format: Literal[1]
    created: str
    baseline: str
    candidate: str
    measured: bool
    limits: ComparisonLimits
    sentence: str
    gate: Gate
    engines: tuple[PairFacts, ...]
    remarks: tuple[str, ...]
    bench: Bench | None
    environment: dict[str, str]
    digests: tuple[DigestPair, ...]

    @property
    def metrics(self) -> list[summary.Metric]:
        """The metrics of the compared times."""
        return list(dict.fromkeys(ratio.metric for engine in self.engines for ratio in engine.ratios))
