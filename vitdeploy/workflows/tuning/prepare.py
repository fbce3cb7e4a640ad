"""Turn a recipe into the starting point of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitdeploy.errors import CapabilityError, InputError, RecipeError
from vitdeploy.pipeline.job import Job
from vitdeploy.progress import Progress
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.workflows.making.making import GivenRecipe
from vitdeploy.workflows.tuning.variants import Variant


def begin_search(
    recipe: Recipe,
    targets: Sequence[str],
    bounds: Mapping[str, float | None],
    store: Path,
    skip_bad: bool,
    function: str | None = None,
    module: Path | None = None,
) -> GivenRecipe:
    """What is searched: the recipe in FP32 for all targets, without anything that the search is to choose; its
    `high_precision` bounds what may be raised.

    Args:
        targets: in the place of the recipe's, where there are any.
        bounds: fields of the budget; None keeps what the recipe says.

    Raises:
        RecipeError: more than one image size.
    """
    if recipe.source.image_sizes is not None:
        raise RecipeError("the recipe", ["$.source.image_sizes: one size is tuned at a time; give image_size"])
    budget = recipe.budget.model_copy(update={key: bound for key, bound in bounds.items() if bound is not None})
    chosen = tuple(targets) or recipe.targets
    kept = {"budget": budget, "targets": chosen, "high_precision": recipe.high_precision}
    base = Variant(chosen[0], "fp32").recipe(recipe).model_copy(update=kept)
    return GivenRecipe(base.model_dump_json(exclude_unset=True), store, skip_bad, function, module)


def prepare_search(search: GivenRecipe, progress: Progress) -> Job:
    """The job of a search.

    Raises:
        RecipeError: an unknown target.
        InputError: a bound on the accuracy, no labels, and a metric that agreement does not bound.
        CapabilityError: an encoder-decoder, or a model that takes no images. Errors of `prepare` propagate.
    """
    [job] = search.prepare(progress)
    recipe, task = job.recipe, job.reference_model.task
    if recipe.budget.max_drop is not None and recipe.data.labels == "none" and task != "classification":
        raise InputError(
            "max_drop cannot be proven without labels",
            found=f"data: {{labels: none}}, for {task}",
            wanted="labels, or a bound on the agreement with the original",
            fix="--min-agreement in its place",
        )
    if task in FLOWS or job.reference_model.preprocess is None:
        raise CapabilityError(
            "only models of images are tuned by this version, and only such of one graph",
            found=f"the task {task}",
            wanted="a model of one graph that takes images",
            fix="vitdeploy run RECIPE makes its engines; `float_parts` and `ignore` say what of them stays in float",
        )
    return job
