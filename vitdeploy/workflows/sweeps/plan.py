"""The plan of a sweep with its cost. Models are read and data is listed; nothing is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.document.sweep_plan import PlannedRecipe, PlannedStage, PlanTotal, SweepPlanDocument
from vitdeploy.errors import VitdeployError
from vitdeploy.pipeline.outcome import now
from vitdeploy.progress import Progress
from vitdeploy.runtime.host import describe_host
from vitdeploy.stages.step import Outline
from vitdeploy.store.log import read_log
from vitdeploy.store.store import Store, files_digest
from vitdeploy.workflows.sweeps.cost import Costs, added, measuring
from vitdeploy.workflows.sweeps.entries import Entry, Outlined, load_all, outline
from vitdeploy.workflows.sweeps.finished import FinishedRecipes


@dataclass
class _Stage:
    step: Outline
    there: bool
    recipes: dict[str, None] = field(default_factory=dict)


def plan_sweep(
    entries: Sequence[Entry], out: Path, store: Store, progress: Progress, *, resume: bool, anywhere: bool
) -> SweepPlanDocument:
    """What `sweep` would do with these arguments. A recipe that would fail is in the plan with its error.

    Args:
        anywhere: estimate stages also by what other kinds of machines took, as those of a cluster.

    Raises:
        InputError: two recipes have one name. Errors of recipes and of a shared store propagate.
    """
    finished, costs = FinishedRecipes(out), Costs(read_log(store.root), anywhere=anywhere)
    rows: list[PlannedRecipe] = []
    stages: dict[str, _Stage] = {}
    asked = 0
    recipes = load_all(entries)
    for done, (entry, recipe) in enumerate(zip(entries, recipes, strict=True)):
        progress("plan", done, len(entries))
        row = PlannedRecipe(recipe.name, str(entry.file), False, None, None, None, dict(entry.choices) or None)
        try:
            outlined = outline(entry, recipe, entry.prepare())
        except VitdeployError as error:
            rows.append(_with(row, error=ErrorFacts.of(error)))
            continue
        if resume and finished.find(outlined) is not None:
            rows.append(_with(row, finished=True))
            continue
        time = measuring(outlined)
        rows.append(_with(row, seconds=time.seconds, most=time.most))
        for plan in outlined.plans:
            asked += len(plan)
            _look(outlined, plan, stages, store)
    progress("plan", len(entries), len(entries))
    planned = tuple(_planned(stage, costs) for stage in stages.values())
    return SweepPlanDocument(1, now(), tuple(rows), planned, _total(asked, planned, rows), describe_host())


def _with(
    row: PlannedRecipe,
    *,
    finished: bool = False,
    error: ErrorFacts | None = None,
    seconds: float | None = None,
    most: float | None = None,
) -> PlannedRecipe:
    return PlannedRecipe(row.name, row.recipe, finished, error, seconds, most, row.axes)


def _look(outlined: Outlined, plan: Sequence[Outline], stages: dict[str, _Stage], store: Store) -> None:
    """Add the stages of a plan, by their keys. For the digest of what is not there stands a word that has its key: two
    stages have one key then where they would make the same of the same."""
    digests: dict[str, str] = {}
    for step in plan:
        key = step.key(digests)
        known = all(not digests[name].startswith("planned:") for name in step.inputs)
        record = store.look(key) if known else None
        folder = store.folder(key)
        there = record is not None and (not folder.is_dir() or step.usable(folder))
        digests[step.name] = files_digest(record.files) if record is not None and there else f"planned:{key}"
        stages.setdefault(key, _Stage(step, there)).recipes[outlined.recipe.name] = None


def _planned(stage: _Stage, costs: Costs) -> PlannedStage:
    seconds, size, seen = (None, None, 0) if stage.there else costs.of(stage.step)
    return PlannedStage(stage.step.name, tuple(stage.recipes), stage.there, seconds, size, seen)


def _total(asked: int, stages: Sequence[PlannedStage], recipes: Sequence[PlannedRecipe]) -> PlanTotal:
    to_make = [stage for stage in stages if not stage.there]
    return PlanTotal(
        asked=asked,
        distinct=len(stages),
        there=len(stages) - len(to_make),
        to_make=len(to_make),
        unknown=sum(not stage.seen for stage in to_make),
        seconds=added([stage.seconds for stage in to_make if stage.seconds is not None]),
        bytes=added([stage.bytes for stage in to_make if stage.bytes is not None]),
        measuring=sum(recipe.seconds or 0.0 for recipe in recipes),
        measuring_most=sum(recipe.most or 0.0 for recipe in recipes),
    )
