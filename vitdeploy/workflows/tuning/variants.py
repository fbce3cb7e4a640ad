"""Variants to try: a target, a precision, and further changes of the graph; their steps, and where a search begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError, InputError, RecipeError
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.plan import engine_plan, judge_plan
from vitdeploy.pipeline.schedule import LoadedRecipe, prepared
from vitdeploy.progress import Progress
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.spec import Precision
from vitdeploy.stages.rows import pruning_step
from vitdeploy.stages.search import score_step
from vitdeploy.stages.step import OPTIMIZE, Candidate, Step
from vitdeploy.stages.workers import HERE, Workers

FLOATS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """One way to run a model. `merges`: of tokens, (block, tokens that remain) each. `rows`: that the blocks compute,
    None for one per token. `prune`: the least share of MACs that goes, None for none. `raised`: with the layers
    out of plain INT8 that the recipe's `high_precision` allows."""

    target: str
    precision: Precision
    merges: tuple[tuple[int, int], ...] = ()
    rows: int | None = None
    prune: float | None = None
    raised: bool = False

    @property
    def name(self) -> str:
        """The artifact name, with the further changes."""
        merged = "+".join(f"{block}:{count}" for block, count in self.merges)
        changes = [f"tokens {merged}"] * bool(merged) + [f"rows {self.rows}"] * (self.rows is not None)
        changes += [] if self.prune is None else [f"pruned {self.prune:g}"]
        changes += ["high precision"] * self.raised
        return " ".join([f"{self.target}-{self.precision}", *changes])

    @property
    def plain(self) -> Variant:
        """The same without what changes the graph, and all in plain INT8."""
        return Variant(self.target, self.precision)

    @property
    def changes_answers(self) -> bool:
        """Whether its float graph is another one, with other answers."""
        return bool(self.merges) or self.prune is not None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.target, self.precision, True)

    def recipe(self, base: Recipe) -> Recipe:
        """The recipe that makes this variant, for the target alone."""
        changes = {
            "token_merging": dict(self.merges) or "none",
            "align_rows": self.rows or "none",
            "prune": self.prune or "none",
        }
        further = {
            "precision": self.precision,
            "targets": (self.target,),
            "optimize": base.optimize.model_copy(update=changes),
            "high_precision": base.high_precision if self.raised else 0.0,
        }
        return base.model_copy(update=further)


def float_variants(target: str) -> list[Variant]:
    """A variant for every float precision of the target; the runtime tells whether this machine supports it."""
    return [Variant(target, precision) for precision in FLOATS if precision in TARGETS[target].precisions]


# --- What is made of a variant: its steps, and where a worker process has them from -----------------------------------

# The float graph that nothing is merged in and nothing is pruned of, for a variant that has another one itself. Its
# first word is the kind.
UNCHANGED = f"{OPTIMIZE} unchanged"


def job_of(job: Job, variant: Variant) -> Job:
    return replace(job, recipe=variant.recipe(job.recipe))


def scored_plan(job: Job, variant: Variant, workers: Workers = HERE) -> list[Step]:
    """From the original to the distance of a variant's answers from those of the float graph: its own, or `UNCHANGED`
    where its answers are others even in float. `job`: of the search."""
    own, candidate = job_of(job, variant), variant.candidate
    reference = UNCHANGED if variant.changes_answers else OPTIMIZE
    return [*engine_plan(own, [candidate], workers), score_step(candidate, reference, job.data)]


def judged_plan(job: Job, variant: Variant) -> list[Step]:
    """The answers of the original, and of a variant's engine, to the evaluation samples. `job`: of the search."""
    return judge_plan(job_of(job, variant), [variant.candidate])


def pruning_plan(job: Job) -> list[Step]:
    """What can be pruned of the graph of a search."""
    return [*engine_plan(job, ()), pruning_step(job.data)]


@dataclass(frozen=True)
class VariantSteps:
    """A variant of a search, as the source of steps; None: what can be pruned of its graph."""

    search: LoadedRecipe
    variant: Variant | None

    @property
    def store(self) -> Path:
        return self.search.store

    def plan(self) -> list[Step]:
        [job] = prepared(self.search)
        if self.variant is None:
            return pruning_plan(job)
        return [*scored_plan(job, self.variant), *judged_plan(job, self.variant)]


# --- A recipe as the starting point of a search -----------------------------------------------------------------------


def begin_search(
    recipe: Recipe,
    targets: Sequence[str],
    bounds: Mapping[str, float | None],
    store: Path,
    skip_bad: bool,
    function: str | None = None,
    module: Path | None = None,
) -> LoadedRecipe:
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
    return LoadedRecipe(base.model_dump_json(exclude_unset=True), store, skip_bad, function, module)


def prepare_search(search: LoadedRecipe, progress: Progress) -> Job:
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
