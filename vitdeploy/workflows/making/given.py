"""What a run or a search is begun with, as a worker process has it."""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.recipe.load import validate
from vitdeploy.stages.step import Step


class RecipeSource(Hashable, Protocol):
    """Where jobs come from: a small value that can be pickled."""

    @property
    def store(self) -> Path:
        """The root of the store."""
        ...

    def prepare(self) -> tuple[Job, ...]:
        """As `pipeline.job.prepare`."""
        ...


@dataclass(frozen=True)
class GivenRecipe:
    """A recipe that was read: `recipe` in JSON, `store`: its root; the others as for `pipeline.job.prepare`."""

    recipe: str
    store: Path
    skip_bad: bool
    function: str | None = None
    module: Path | None = None

    def prepare(self, progress: Progress = silent) -> tuple[Job, ...]:
        """Its jobs. Errors of `pipeline.job.prepare` propagate."""
        code = self.function or (self.module.stem if self.module else None)
        recipe = validate(json.loads(self.recipe), "the recipe", code)
        how = {"function": self.function, "module": self.module}
        return prepare(recipe, skip_bad=self.skip_bad, progress=progress, **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AtSize:
    """A recipe at its image size number `size`, as the source of steps."""

    recipe: RecipeSource
    size: int

    @property
    def store(self) -> Path:
        return self.recipe.store

    def plan(self) -> list[Step]:
        return make_plan(_jobs(self.recipe)[self.size])


@functools.lru_cache(maxsize=2)
def _jobs(recipe: RecipeSource) -> tuple[Job, ...]:
    return recipe.prepare()
