"""Sweeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.api.calls import takes
from vitdeploy.api.options import (
    Sweep,
)
from vitdeploy.api.values import Column, Line, Reporter, Shown, Table, reporting, unnamed_folder
from vitdeploy.benchmark.run import ExpectedTime, spelt
from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.report import Report
from vitdeploy.document.sweep import Estimate, PlannedStage, SweepDocument, SweepPlanDocument
from vitdeploy.pipeline.run import default_store
from vitdeploy.publish import check_replaceable, replacing, storage_errors
from vitdeploy.recipe import grid, load
from vitdeploy.report.html import render_sweep
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.stages.step import OUTPUT_NAMES, in_words, json_text
from vitdeploy.store.store import store_folder
from vitdeploy.workflows.executors import executor_of
from vitdeploy.workflows.sweep import Entry, RecipeSweep
from vitdeploy.workflows.sweep import plan_sweep as plan_entries

# --- Many recipes, and one table of their results ---------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Swept(Shown):
    """The bundles of many recipes, each in `folder`/<its name>; `document` is the sweep.json."""

    folder: Path
    document: SweepDocument

    @property
    def report(self) -> Path:
        """The page with the table of all."""
        return self.folder / "sweep.html"

    @property
    def errors(self) -> tuple[ErrorFacts, ...]:
        """The errors of the recipes that failed, in their order."""
        return tuple(row.error for row in self.document.recipes if row.error is not None)

    @property
    def unmet(self) -> tuple[str, ...]:
        """The names of the recipes whose budget is not met, or not provably, at any of their image sizes."""
        return tuple(row.name for row in self.document.recipes if row.report is not None and _unmet(row.report))

    @property
    def not_begun(self) -> tuple[str, ...]:
        """The names of the recipes that were not started within the time limit."""
        return tuple(row.name for row in self.document.recipes if row.not_begun is not None)

    def lines(self) -> list[Line]:
        lines: list[Line] = [_table(self.document)]
        if (stages := self.document.stages) is not None:
            shared = f"{stages.distinct} distinct of {stages.asked} in all recipes"
            lines.append(f"stages run in advance: {stages.made} ({shared})")
        if self.not_begun:
            count = f"{len(self.not_begun)} of {len(self.document.recipes)} recipes"
            lines.append(f"not started: {count}: {', '.join(self.not_begun)}")
        return lines


@takes(Sweep)
def sweep(options: Sweep) -> Swept:
    """Run many recipes one by one, so that each is measured alone. A failed recipe does not stop the others: its error
    is in the result.

    A second call continues: finished bundles are kept, the other recipes are run.

    Raises:
        MissingFileError, RecipeError: a recipe or grid is invalid. InputError: two recipes have the same name, or the
            executor is unknown. OutputError: the folder of a bundle holds something else. WorkerError,
            MissingPackageError: the executor failed or is not installed.

    >>> import vitdeploy as vd
    >>> found = vd.sweep([RECIPE], progress=False)
    >>> [row.name for row in found.document.recipes], found.errors
    (['digits'], ())
    """
    entries = _entries(options)
    home, ahead = _home(options.folder), executor_of(options.executor, options.jobs)
    for entry in entries:
        check_replaceable(home / entry.name, OUTPUT_NAMES)

    def write_page(document: SweepDocument) -> None:
        with storage_errors(home):
            home.mkdir(parents=True, exist_ok=True)
            write_atomic(home / "sweep.html", render_sweep(document).encode())

    seconds = options.minutes * 60 if options.minutes is not None else None
    reporter = reporting(options.progress)
    with reporter:
        if options.watch:
            reporter.note(f"live progress: {home / 'sweep.html'}")
        document = RecipeSweep(
            entries,
            home,
            reporter.progress,
            reporter.note,
            ahead,
            seconds,
            options.resume,
            write_page if options.watch else None,
        ).run()
        write_page(document)
        with storage_errors(home):
            write_atomic(home / "sweep.json", json_text(document).encode())
    return Swept(home, document)


def _entries(options: Sweep) -> list[Entry]:
    """The checked recipes of files and grids."""
    listed, store = grid.list_recipes(options.recipes, options.overrides, options.function), store_folder().absolute()
    return [
        Entry(each.recipe, store, options.skip_bad, options.function, file=each.file, choices=each.choices)
        for each in listed
    ]


def _home(folder: str | Path | None) -> Path:
    return Path(folder) if folder is not None else unnamed_folder("sweep")


def write_recipes(
    recipes: Sequence[str | Path], folder: str | Path, *, overrides: Sequence[str] = (), function: str | None = None
) -> list[Path]:
    """Write the recipes of grids to `folder`, each as a file for `vitdeploy run`; run nothing. Return the files.

    Other arguments and errors as in `sweep`.

    Raises:
        OutputError: the folder holds something else.
    """
    home = Path(folder)
    texts = {
        f"{each.recipe.name}.yaml": load.recipe_text(each.recipe, home, f"From {each.file.name}, by vitdeploy sweep.")
        for each in grid.list_recipes(recipes, overrides, function)
    }
    with replacing(home, tuple(texts)) as work:
        for name, text in texts.items():
            (work / name).write_text(text, encoding="utf-8")
    return [home / name for name in texts]


def _unmet(report: Report) -> bool:
    gates = [report.verdict.gate, *(each.gate for each in report.sizes or ())]
    return "fail" in gates or "undecided" in gates


def _table(document: SweepDocument) -> Table:
    """The recommended artifact of every recipe."""
    columns = (
        Column("recipe"),
        Column("recommended", 90, left=True),
        Column("value", 60, least=6),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("samples/s", 40),
        Column("budget", 70, left=True),
    )
    rows: list[tuple[str, ...]] = []
    for row in document.recipes:
        report = row.report
        if report is None:
            rows.append((row.name, f"failed: {row.error.message}" if row.error else f"not started: {row.not_begun}"))
            continue
        name = report.verdict.stands_for_all or ""
        engine, bench = report.engine(name), report.bench.row(name) if report.bench else None
        value = engine.verify.value if engine else report.engines[0].verify.reference_value
        rows.append(
            (
                row.name,
                name if report.verdict.recommended else f"{name} (not decided)",
                "" if value is None else f"{value:.2f}",
                f"{engine.verify.agreement:.2f}" if engine else "",
                f"{bench.latency_ms.p50:.2f}" if bench else "",
                f"{bench.throughput:.1f}" if bench else "",
                report.verdict.gate,
            )
        )
    return Table(columns, tuple(rows))


# --- The plan of a sweep, and its cost --------------------------------------------------------------------------------


UNKNOWN = "unknown"


@dataclass(frozen=True, repr=False)
class SweepPlan(Shown):
    """The recipes and stages of a planned sweep, in `document`. `cost_per_hour`: for all machines together, in any
    currency; None: unknown."""

    document: SweepPlanDocument
    cost_per_hour: float | None = None

    @property
    def errors(self) -> tuple[ErrorFacts, ...]:
        """The errors that recipes would fail with, in their order."""
        return tuple(recipe.error for recipe in self.document.recipes if recipe.error is not None)

    def lines(self) -> list[Line]:
        failing = [f"{each.name} would fail: {each.error.message}" for each in self.document.recipes if each.error]
        table: list[Line] = [_sweep_plan_table(self.document.stages)] if self.document.stages else []
        return [*table, *failing, _of_stages(self.document), _of_recipes(self.document), *self._together()]

    def _together(self) -> list[str]:
        total = self.document.total
        if total.to_make and total.seconds is None:
            return []
        seconds = total.measuring + (total.seconds.median if total.seconds else 0.0)
        if not seconds:
            return []
        least = "at least " if total.unknown else ""
        cost = f", cost at least {seconds / 3600 * self.cost_per_hour:.2f}" if self.cost_per_hour is not None else ""
        return [f"total time, run sequentially: {least}{spelt(seconds)}{cost}"]


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
    """Preview `sweep`: check every input, run nothing. Arguments and errors as in `sweep`; a recipe that would fail is
    in the plan with its error.

    The seconds and bytes of stages are estimated from earlier stages of this store on this kind of machine (with Ray,
    on any machine). Stages without earlier results are unknown.

    >>> import vitdeploy as vd
    >>> found = vd.plan_sweep([RECIPE], progress=False)
    >>> found.document.total.distinct == found.document.total.there + found.document.total.to_make, found.errors
    (True, ())
    """
    how: Any = {"overrides": overrides, "function": function, "executor": executor, "skip_bad": skip_bad}
    return planned(Sweep(recipes, folder, resume=resume, progress=progress, **how), cost_per_hour)


def planned(options: Sweep, cost_per_hour: float | None) -> SweepPlan:
    """The plan of `sweep`."""
    executor_of(options.executor, 1)
    anywhere, reporter = (options.executor or "").startswith("ray"), reporting(options.progress)
    with reporter:
        found = plan_entries(
            _entries(options),
            _home(options.folder),
            default_store(),
            reporter.progress,
            resume=options.resume,
            anywhere=anywhere,
        )
    return SweepPlan(found, cost_per_hour)


def _sweep_plan_table(stages: Sequence[PlannedStage]) -> Table:
    """One row for all stages with the same name."""
    columns = (
        Column("stage"),
        Column("for recipes", 60),
        Column("distinct", 50),
        Column("stored", 80),
        Column("to run", 100),
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
        in_words(name),
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
    least, most = min(estimate.least for estimate in found), max(each.most for each in found)
    return f"{least:.1f}" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f}-{most:.1f}"


def _sum(found: Sequence[Estimate], count: int, unit: float) -> str:
    """The sum of the medians, in a unit; "+ unknown" if some are missing."""
    if not count:
        return ""
    total = f"{sum(each.median for each in found) / unit:.1f}"
    return UNKNOWN if not found else total if len(found) == count else f"{total} + {UNKNOWN}"


def _of_stages(document: SweepPlanDocument) -> str:
    total = document.total
    line = f"stages: {total.asked} in total, {total.distinct} distinct, {total.there} stored, {total.to_make} to run"
    if total.seconds is not None and total.bytes is not None:
        least, most = spelt(total.seconds.least), spelt(total.seconds.most)
        span = f" ({least} to {most})" if least != most else ""
        line += f": about {spelt(total.seconds.median)}{span} and {total.bytes.median / 1e6:.1f} MB"
    if total.unknown:
        names = {stage.name for stage in document.stages if not stage.there and not stage.seen}
        rest = " more" if total.unknown < total.to_make else ""
        line += f"; {UNKNOWN} for {total.unknown}{rest}: no similar stage in this store ({', '.join(sorted(names))})"
    return line


def _of_recipes(document: SweepPlanDocument) -> str:
    count = len(document.recipes)
    done, failing = sum(each.finished for each in document.recipes), sum(bool(each.error) for each in document.recipes)
    line = f"recipes: {count}, {done} already finished, {count - done - failing} to measure"
    if count - done - failing:
        line += f", {ExpectedTime(document.total.measuring, document.total.measuring_most)}"
    return line
