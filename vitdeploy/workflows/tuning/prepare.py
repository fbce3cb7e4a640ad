"""Turn a recipe into the starting point of a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from vitdeploy.errors import CapabilityError, InputError, RecipeError
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.progress import Progress
from vitdeploy.recipe.load import validate
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.workflows.tuning.variants import Variant


def prepare_search(
    recipe: Recipe,
    targets: Sequence[str],
    bounds: Mapping[str, float | None],
    *,
    skip_bad: bool,
    progress: Progress,
    function: str | None = None,
    module: Path | None = None,
) -> Job:
    """The job in FP32 for all targets, without anything that the search is to choose; the recipe's `high_precision`
    bounds what it may.

    Args:
        targets: in the place of the recipe's, where there are any.
        bounds: fields of the budget; None keeps what the recipe says.
        function, module: as for `prepare`.

    Raises:
        RecipeError: an unknown target, or more than one image size.
        InputError: a bound on the accuracy, no labels, and a metric that agreement does not bound.
        CapabilityError: an encoder-decoder, or a model that takes no images. Errors of `prepare` propagate.
    """
    if recipe.source.image_sizes is not None:
        raise RecipeError("the recipe", ["$.source.image_sizes: one size is tuned at a time; give image_size"])
    budget = recipe.budget.model_copy(update={key: bound for key, bound in bounds.items() if bound is not None})
    chosen = tuple(targets) or recipe.targets
    kept = {"budget": budget, "targets": chosen, "high_precision": recipe.high_precision}
    base = Variant(chosen[0], "fp32").recipe(recipe).model_copy(update=kept)
    checked = validate(base.model_dump(exclude_unset=True), "the recipe", function or (module.stem if module else None))
    [job] = prepare(checked, skip_bad=skip_bad, progress=progress, function=function, module=module)
    if budget.max_drop is not None and recipe.data.labels == "none" and job.reference_model.task != "classification":
        raise InputError(
            "max_drop cannot be proven without labels",
            found=f"data: {{labels: none}}, for {job.reference_model.task}",
            wanted="labels, or a bound on the agreement with the original",
            fix="--min-agreement in its place",
        )
    if job.reference_model.task in FLOWS or job.reference_model.preprocess is None:
        raise CapabilityError(
            "only models of images are tuned by this version, and only such of one graph",
            found=f"the task {job.reference_model.task}",
            wanted="a model of one graph that takes images",
            fix="vitdeploy run RECIPE makes its engines; `float_parts` and `ignore` say what of them stays in float",
        )
    return job
