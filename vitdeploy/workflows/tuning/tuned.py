"""What a search has made, and what it found."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.bench import Bench
from vitdeploy.pipeline.job import Job
from vitdeploy.search.pruning import Pruning
from vitdeploy.search.rows import RowTable
from vitdeploy.stages.schedules import Schedules
from vitdeploy.stages.score import Score
from vitdeploy.store.store import Artifact
from vitdeploy.workflows.tuning.choice import Choice, Finalist
from vitdeploy.workflows.tuning.variants import Variant


@dataclass(frozen=True)
class Made:
    """A variant with its artifacts, and how far its answers are from the original's on the calibration images."""

    variant: Variant
    job: Job
    artifacts: dict[str, Artifact]
    score: Score

    @property
    def engine(self) -> Artifact:
        return self.artifacts[self.variant.candidate.step("compile")]


@dataclass(frozen=True)
class Tuned:
    """The results of a search.

    made: every variant; `finals`: those that were judged, with the results; `front`: the same as finalists, the
        nearest to the original first.
    medians_ms: medians of each round of the screening, by name. disturbed: why these are unreliable; empty if they are
        reliable.
    rows: the speed of the model by number of rows, by target.
    schedules: the trials of token merging, by target. prunings: those of pruning, () where nothing was tried.
    left_out: (what, why).
    """

    job: Job
    made: tuple[Made, ...]
    finals: tuple[Made, ...]
    medians_ms: dict[str, list[float]]
    disturbed: str
    front: tuple[Finalist, ...]
    bench: Bench
    choice: Choice
    rows: dict[str, RowTable]
    schedules: dict[str, Schedules]
    prunings: tuple[Pruning, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def chosen(self) -> Made:
        return next(each for each in self.finals if each.variant == self.choice.best.variant)
