"""What a sweep would do, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.folders import unnamed_folder
from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.shown import Shown
from vitdeploy.api.sweep import entries_of
from vitdeploy.api.tables import Column, Line, Table

if TYPE_CHECKING:
    from vitdeploy.document.errors import ErrorFacts
    from vitdeploy.document.sweep_plan import Estimate, PlannedStage, SweepPlanDocument

UNKNOWN = "unknown"


@dataclass(frozen=True, repr=False)
class SweepPlan(Shown):
    """The recipes and stages of a sweep before it is run. `cost_per_hour`: of all machines, in any currency; None: not
    known."""

    document: SweepPlanDocument
    cost_per_hour: float | None = None

    @property
    def errors(self) -> tuple[ErrorFacts, ...]:
        """The errors that recipes would fail with, in their order."""
        return tuple(recipe.error for recipe in self.document.recipes if recipe.error is not None)

    def lines(self) -> list[Line]:
        failing = [f"{each.name} would fail: {each.error.message}" for each in self.document.recipes if each.error]
        table: list[Line] = [_table(self.document.stages)] if self.document.stages else []
        return [*table, *failing, _of_stages(self.document), _of_recipes(self.document), *self._together()]

    def _together(self) -> list[str]:
        from vitdeploy.benchmark.expected import spelt

        total = self.document.total
        if total.to_make and total.seconds is None:
            return []
        seconds = total.measuring + (total.seconds.median if total.seconds else 0.0)
        if not seconds:
            return []
        least = "at least " if total.unknown else ""
        cost = f", for {seconds / 3600 * self.cost_per_hour:.2f} at the least" if self.cost_per_hour is not None else ""
        return [f"one after the other: {least}{spelt(seconds)}{cost}"]


def plan_sweep(
    recipes: Sequence[str | Path],
    folder: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    function: str | None = None,
    executor: str | None = None,
    skip_bad: bool = False,
    resume: bool = True,
    cost_per_hour: float | None = None,
    progress: bool | Reporter = True,
) -> SweepPlan:
    """Preview `sweep`: every input is checked, and nothing is made. Arguments and errors as there; a recipe that would
    fail is in the plan with its error.

    Seconds and bytes of stages are those that such stages had before on this kind of machine; with Ray, on any whose
    stages are in this store. What nothing is known of is unknown.

    >>> import vitdeploy as vd
    >>> found = vd.plan_sweep([RECIPE], progress=False)
    >>> found.document.total.distinct == found.document.total.there + found.document.total.to_make, found.errors
    (True, ())
    """
    entries = entries_of(recipes, overrides, function, skip_bad)

    from vitdeploy.pipeline.run import default_store
    from vitdeploy.workflows.named_executor import executor_of
    from vitdeploy.workflows.sweeps.plan import plan_sweep as plan_entries

    executor_of(executor, 1)
    anywhere, home = (executor or "").startswith("ray"), Path(folder) if folder is not None else unnamed_folder("sweep")
    reporter = reporting(progress)
    with reporter:
        found = plan_entries(entries, home, default_store(), reporter.progress, resume=resume, anywhere=anywhere)
    return SweepPlan(found, cost_per_hour)


def _table(stages: Sequence[PlannedStage]) -> Table:
    """A row for all stages of one name."""
    columns = (
        Column("stage"),
        Column("for recipes", 60),
        Column("distinct", 50),
        Column("there", 80),
        Column("to make", 100),
        Column("seconds each", 70),
        Column("seconds", 90),
        Column("MB", 65),
    )
    named: dict[str, list[PlannedStage]] = {}
    for stage in stages:
        named.setdefault(stage.name, []).append(stage)
    return Table(columns, tuple(_row(name, found) for name, found in named.items()))


def _row(name: str, stages: Sequence[PlannedStage]) -> tuple[str, ...]:
    to_make = [stage for stage in stages if not stage.there]
    seconds = [stage.seconds for stage in to_make if stage.seconds is not None]
    sizes = [stage.bytes for stage in to_make if stage.bytes is not None]
    return (
        name,
        str(sum(len(stage.recipes) for stage in stages)),
        str(len(stages)),
        str(len(stages) - len(to_make)),
        str(len(to_make)),
        _span(seconds) if to_make else "",
        _sum(seconds, len(to_make), 1.0),
        _sum(sizes, len(to_make), 1e6),
    )


def _span(found: Sequence[Estimate]) -> str:
    if not found:
        return UNKNOWN
    least, most = min(each.least for each in found), max(each.most for each in found)
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f}-{most:.1f}"


def _sum(found: Sequence[Estimate], count: int, unit: float) -> str:
    """The medians together, in a unit; "+ unknown" where some are."""
    if not count:
        return ""
    total = f"{sum(each.median for each in found) / unit:.1f}"
    return UNKNOWN if not found else total if len(found) == count else f"{total} + {UNKNOWN}"


def _of_stages(document: SweepPlanDocument) -> str:
    from vitdeploy.benchmark.expected import spelt

    total = document.total
    said = f"stages: {total.asked} asked for, {total.distinct} distinct, {total.there} there, {total.to_make} to make"
    if total.seconds is not None and total.bytes is not None:
        least, most = spelt(total.seconds.least), spelt(total.seconds.most)
        span = f" ({least} to {most})" if least != most else ""
        said += f": about {spelt(total.seconds.median)}{span} and {total.bytes.median / 1e6:.1f} MB"
    if total.unknown:
        names = {stage.name for stage in document.stages if not stage.there and not stage.seen}
        rest = " more" if total.unknown < total.to_make else ""
        said += (
            f"; {UNKNOWN} for {total.unknown}{rest}: this store has seen none like them ({', '.join(sorted(names))})"
        )
    return said


def _of_recipes(document: SweepPlanDocument) -> str:
    from vitdeploy.benchmark.expected import Expected

    count = len(document.recipes)
    done, failing = sum(each.finished for each in document.recipes), sum(bool(each.error) for each in document.recipes)
    said = f"recipes: {count}, {done} finished already, {count - done - failing} to measure"
    if count - done - failing:
        said += f", {Expected(document.total.measuring, document.total.measuring_most)}"
    return said
