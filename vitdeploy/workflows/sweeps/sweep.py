"""Many recipes: what can be made side by side is, what is measured has the machine for itself, and one table of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.report import Report
from vitdeploy.document.sweep import SweepDocument, SweptRecipe
from vitdeploy.errors import VitdeployError
from vitdeploy.pipeline.assemble import run_pipeline
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.outcome import now
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.recipe.grid import refuse_same_names
from vitdeploy.recipe.load import load_recipe
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.host import describe_host
from vitdeploy.stages.step import Step
from vitdeploy.store.places import shared_store
from vitdeploy.store.store import Store
from vitdeploy.workflows.executors import Executor


@dataclass(frozen=True)
class Entry:
    """One recipe of a sweep, as passed to a worker process. `skip_bad`, `function` as for `vitdeploy run`; `grid`, the
    file, and `choices`, (field, label), of a cell of a grid."""

    recipe: Path
    overrides: tuple[str, ...]
    store: Path
    skip_bad: bool
    function: str | None = None
    grid: Path | None = None
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def file(self) -> Path:
        """Where a user finds the recipe."""
        return self.grid or self.recipe

    def load(self) -> Recipe:
        return load_recipe(self.recipe, self.overrides, self.function)

    def prepare(self) -> tuple[Job, ...]:
        return prepare(self.load(), skip_bad=self.skip_bad, progress=silent, function=self.function)


def load_all(entries: Sequence[Entry]) -> list[Recipe]:
    """Every recipe, before any work is done.

    Raises:
        InputError: two have one name, which their bundles are called by. Errors of recipes propagate.
    """
    recipes = [entry.load() for entry in entries]
    refuse_same_names([(recipe.name, entry.file) for recipe, entry in zip(recipes, entries, strict=True)])
    return recipes


def make_ahead(entry: Entry) -> None:
    """Make what a recipe needs, up to the first step that measures times, into the store."""
    for job in entry.prepare():
        run_plan(_unmeasured(make_plan(job)), Store(entry.store, shared_store()), resume=True, progress=silent)


def _unmeasured(plan: Sequence[Step]) -> list[Step]:
    """The steps that measure nothing, and neither need what does."""
    left_out: set[str] = set()
    kept = []
    for step in plan:
        if step.measured or left_out.intersection(step.inputs):
            left_out.add(step.name)
        else:
            kept.append(step)
    return kept


def sweep(
    entries: Sequence[Entry], out: Path, executor: Executor | None, progress: Progress, told: Callable[[str], None]
) -> SweepDocument:
    """Run all recipes, with the bundle of each at `out`/<its name>, and return sweep.json.

    A recipe that fails does not end the others.

    Args:
        executor: runs the steps that measure nothing ahead of time, several recipes in parallel. Then, or without one,
            one recipe after the other is run and measured, in this process and its children alone.
        told: called with a line on each recipe that is finished, or failed.
    """
    recipes = load_all(entries)
    errors = _make_all_ahead(entries, executor, progress) if executor is not None else {}
    rows = []
    progress("measure", 0, len(entries))
    for done, (entry, recipe) in enumerate(zip(entries, recipes, strict=True), start=1):
        try:
            if entry in errors:
                raise errors[entry]
            report = _measure(entry, recipe, out / recipe.name, told)
            told(f"{recipe.name}: {report.verdict.sentence}")
            rows.append(_row(entry, recipe, report, None))
        except VitdeployError as error:
            told(f"{recipe.name}: {error}")
            rows.append(_row(entry, recipe, None, error))
        progress("measure", done, len(entries))
    return SweepDocument(1, now(), tuple(rows), describe_host())


def _make_all_ahead(entries: Sequence[Entry], executor: Executor, progress: Progress) -> dict[Entry, VitdeployError]:
    """The errors of the recipes that failed."""
    errors = {}
    progress("make", 0, len(entries))
    for done, (index, error) in enumerate(executor.map(make_ahead, entries), start=1):
        if error is not None:
            errors[entries[index]] = error
        progress("make", done, len(entries))
    return errors


def _row(entry: Entry, recipe: Recipe, report: Report | None, error: VitdeployError | None) -> SweptRecipe:
    found = ErrorFacts.of(error) if error is not None else None
    return SweptRecipe(recipe.name, str(entry.file), report, found, dict(entry.choices) or None)


def _measure(entry: Entry, recipe: Recipe, out: Path, told: Callable[[str], None]) -> Report:
    def finished(job: Job, step: Step, reused: bool) -> None:
        if step.measured and reused:
            told(f"{recipe.name}: {step.name} was chosen by times that were measured earlier on this device")

    jobs = entry.prepare()
    for note in dict.fromkeys(note for job in jobs for note in job.data.notes):
        told(f"{recipe.name}: {note}")
    report, _ = run_pipeline(
        jobs,
        recipe,
        out,
        Store(entry.store, shared_store()),
        resume=True,
        progress=lambda job: silent,
        finished=finished,
        note=lambda job, text: told(f"{recipe.name}: {text}"),
    )
    return report
