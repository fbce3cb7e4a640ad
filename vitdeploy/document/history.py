"""The document of `history --json`: series of results and their changes."""

from dataclasses import dataclass
from typing import Literal

from vitdeploy.document.bench import Omission

Direction = Literal["slower", "faster"]


@dataclass(frozen=True)
class PointFacts:
    """One result of a series: `number` from 1 in the order of the history. `time`: the wall clock of its machine.

    `p50_ms` with its 95 % interval, `throughput` in images per second, `agreement` and `value` in percent; None if
    unknown. `decided`: whether change detection uses the result; if not, `undecided` says why. `error`: the error of a
    recipe that failed, or of an engine that did not give its golden answers; these have no times.
    """

    number: int
    sequence: int
    time: str
    host: str
    kind: str
    p50_ms: float | None
    p50_ms_ci95: tuple[float | None, float | None]
    throughput: float | None
    agreement: float | None
    value: float | None
    gate: str | None
    flags: tuple[str, ...]
    decided: bool
    undecided: str
    error: str
    runtime_version: str
    vitdeploy: str

    @property
    def shown_flags(self) -> tuple[str, ...]:
        """The flags, with "not decided" for an undecided result."""
        return self.flags if self.decided else (*self.flags, "not decided")


@dataclass(frozen=True)
class Difference:
    """A fact that differs between both sides of a change; "" if unknown."""

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class ShareFacts:
    """A value of a fact that is more frequent, but not universal, right after a change: in `before` of `of_before`
    results before it, and in `after` of `of_after` results after it. `ratio`: the time of results with it relative to
    that of results without it, after the change; None with too few of either."""

    what: str
    value: str
    before: int
    of_before: int
    after: int
    of_after: int
    ratio: float | None


@dataclass(frozen=True)
class ChangeFacts:
    """A change of the p50 latency. `number` and `time`: those of the first result after it.

    `ratio`: after / before, of the geometric means of both sides up to the next changes, with its 95 % interval.
    `differences`: facts that differ between both sides; `same`: facts that are equal; `unclear`: facts that are
    neither, of which `shares` has the values that became more frequent. `sentence`: the time, the size and the
    coinciding differences of the change.
    """

    number: int
    time: str
    direction: Direction
    before_ms: float
    after_ms: float
    ratio: float
    ci95: tuple[float, float]
    differences: tuple[Difference, ...]
    same: tuple[str, ...]
    unclear: tuple[str, ...]
    shares: tuple[ShareFacts, ...]
    sentence: str

    @property
    def further(self) -> list[str]:
        """Further facts about both sides, one per line."""
        known = {share.what for share in self.shares}
        unclear = [each for each in self.unclear if each not in known]
        lines = [f"more than one value on a side: {', '.join(unclear)}"] if unclear else []
        return [*lines, *([f"the same on both sides: {', '.join(self.same)}"] if self.same else [])]


@dataclass(frozen=True)
class SeriesFacts:
    """One artifact on one kind of machine, at one batch size and number of threads.

    `noise`: the standard deviation of single results, as a share; `correlation`: that of neighbouring results (see
    `history.changes.Noise`); None with too few results, and `too_few` then says how many are needed.
    """

    model: str
    artifact: str
    target: str
    precision: str
    machine: str
    batch: int | None
    offline_batch: int | None
    threads: int | None
    points: tuple[PointFacts, ...]
    changes: tuple[ChangeFacts, ...]
    noise: float | None
    correlation: float | None
    too_few: str

    @property
    def title(self) -> str:
        return f"{self.model}, {self.artifact}" if self.artifact else self.model


@dataclass(frozen=True)
class CanaryFacts:
    """An engine that did not give its golden answers with a release of its runtime: `results` times, on `machines`, the
    last time at `time` with `error`.

    `right_machines`: machines where this engine gave its golden answers with the same release; `right_releases`:
    releases with which it did so on any machine; `right_engines`: the number of other engines that did so with the same
    release. `sentence`: a summary. `proposal`: a draft entry for the known-bad table, whose pattern has all operators
    of the graph; None if these were not recorded.
    """

    runtime: str
    version: str
    model: str
    artifact: str
    target: str
    precision: str
    results: int
    machines: tuple[str, ...]
    time: str
    error: str
    right_machines: tuple[str, ...]
    right_releases: tuple[str, ...]
    right_engines: int
    sentence: str
    proposal: dict[str, object] | None


@dataclass(frozen=True)
class HistoryDocument:
    """The whole document. `left_out`: skipped files, and why."""

    format: Literal[1]
    created: str
    place: str
    results: int
    series: tuple[SeriesFacts, ...]
    canaries: tuple[CanaryFacts, ...]
    left_out: tuple[Omission, ...]
