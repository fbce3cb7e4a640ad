"""The recipes of a sweep, and what each would make."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.outcome import TOOLS
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import silent
from vitdeploy.recipe.grid import refuse_same_names
from vitdeploy.recipe.load import load_recipe
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.stages.step import Outline
from vitdeploy.stages.tools import package_versions
from vitdeploy.store.key import canonical_json
from vitdeploy.store.sources import code_version


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


@dataclass(frozen=True)
class Outlined:
    """A recipe that was looked at: its steps for each of its image sizes, and `key`: what its result is a function of,
    but for the machine that measures."""

    entry: Entry
    recipe: Recipe
    plans: tuple[tuple[Outline, ...], ...]
    key: str


def outline(entry: Entry, recipe: Recipe, jobs: Sequence[Job]) -> Outlined:
    """What the `jobs` of an entry, which `Entry.prepare` gives, would make."""
    plans = tuple(tuple(step.outline() for step in make_plan(job)) for job in jobs)
    steps = [planned_keys(plan) for plan in plans]
    tools = {"code": code_version(everything=True), **package_versions(TOOLS)}
    parts = {"recipe": recipe.model_dump(mode="json"), "steps": steps, "tools": tools}
    return Outlined(entry, recipe, plans, hashlib.sha256(canonical_json(parts).encode()).hexdigest())


def planned_keys(plan: Sequence[Outline]) -> dict[str, str]:
    """A key for each step, as if none were made: that of an input stands in the place of its digest. Two recipes that
    have one of these keys make the same there."""
    keys: dict[str, str] = {}
    for step in plan:
        keys[step.name] = step.key({name: f"planned:{keys[name]}" for name in step.inputs})
    return keys


def unmeasured(plan: Sequence[Outline]) -> list[Outline]:
    """The steps that measure nothing, and neither need what does."""
    left_out: set[str] = set()
    kept = []
    for step in plan:
        if step.measured or left_out.intersection(step.inputs):
            left_out.add(step.name)
        else:
            kept.append(step)
    return kept
