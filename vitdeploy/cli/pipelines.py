"""`vitdeploy run|tune|sweep`: from recipes to bundles, and to the engine to ship."""

# Annotations of options are evaluated: no future import.

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.api.option import Options, advanced, option
from vitdeploy.api.options import (
    BudgetOptions,
    RecordedBundle,
    Run,
    Sweep,
    TuneRecipe,
)
from vitdeploy.cli.options import Console, api, call, command_line, command_of, recording, unmet_fix
from vitdeploy.errors import GateError
from vitdeploy.paths import require_recipe

if TYPE_CHECKING:
    from vitdeploy.recipe.recipe import Recipe


@dataclass(frozen=True)
class Further(Options):
    dry_run: bool = option(False, "Check every input and show the plan; compute nothing.")
    require_recommendation: bool = advanced(False, "Exit with code 5 also if the verdict recommends no engine.")


@command_of(Run, (Further, "executor"), RecordedBundle, waits=True)
def run(console: Console, options: Run, further: Further, recorded: RecordedBundle) -> None:
    """Run the whole pipeline: recipe in, verified bundle out.

    Checkpoint -> ONNX -> INT8 -> engines -> verify -> bench -> one folder. Exit code 5 if the budget is not met. The
    verdict has one of three grades: recommended, leading (others may be as fast), or no ranking. RECIPE is a YAML file;
    its relative paths start at its own folder:

    \b
    vitdeploy: 1
    name: mine
    source: {model: vit_tiny_patch16_224, checkpoint: weights.safetensors}
    preprocess: {resize: 248, crop: 224, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}
    data: {path: images}                        # one sub-folder per class; or labels: none
    targets: [openvino-cpu, onnxruntime-cpu]
    precision: int8                             # fp32, fp16, bf16, int8, mixed
    budget: {max_drop: 1.0, min_agreement: 98}
    bench: {duration: 10}

    With --model, the original is the module that your own function returns, with the weights of source.checkpoint if
    the recipe has one. The recipe then names no model.

    \b
    Example:
      vitdeploy run recipes/digits.yaml -o out/digits
    """
    loaded = _loaded(options)
    out = Path(options.folder or Path("out") / loaded.name)
    options = dataclasses.replace(options, recipe=loaded, overrides=(), folder=out)
    if further.dry_run:
        steps = api("deploy").planned(options)
        document = {"plan": [{"step": step.name, "reuse": step.reuse} for step in steps], "output": str(out)}
        console.finish(document, [*map(str, steps), "run    bench", f"run    bundle {out}"], None)
        return
    with recording(console, recorded) as record:
        made = call("run", options)
        example = "TOKENS.npz" if made.bundle.manifest.preprocess is None else "IMAGE"
        predict = command_line("vitdeploy", "predict", out, example)
        console.finish(made.document, made.tables, out, f"open {command_line(made.report)}, or: {predict}")
        record(made)
    if made.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if made.status == 'fail' else 'not provably met'}",
            found="; ".join(made.reasons),
            expected=made.budget,
            fix=f"{unmet_fix(made.reasons)}. The bundle was written without the engines that fail it; "
            "--set bundle.include_failed=true keeps them",
        )
    if further.require_recommendation and made.grade != "recommended":
        raise GateError(
            f"the verdict is {made.grade!r}: {made.document.verdict.sentence}",
            found="; ".join(made.document.verdict.remarks[:1]),
            expected="a recommendation (--require-recommendation)",
            fix="run the same command on a quiet machine: only the bench is repeated. "
            "The bundle was written; its engines have verified answers",
        )


def _loaded(options: Run | TuneRecipe) -> "Recipe":
    require_recipe(Path(str(options.recipe)))
    from vitdeploy.recipe.load import given_recipe

    return given_recipe(options.recipe, options.overrides, options.function)


@command_of(TuneRecipe, (BudgetOptions, "time_budget"), waits=True)
def tune(console: Console, options: TuneRecipe, bounds: BudgetOptions) -> None:
    """Find the best engine: try every precision, mixed precision and token merging on this machine.

    Prints the Pareto front and a verdict, and writes the recipe of the best engine. Options override the recipe's
    budget. Exit code 5 if no variant provably meets it.

    \b
    Example:
      vitdeploy tune recipes/digits.yaml --max-drop 1 --time-budget 10m
    """
    loaded = _loaded(options)
    out = options.folder or Path("out") / f"{loaded.name}-tuned"
    options = dataclasses.replace(options, recipe=loaded, overrides=(), folder=out, budget=vars(bounds))
    found = call("tune_recipe", options)
    model = ("--model", options.function) if options.function else ()
    then = command_line("vitdeploy", "run", found.recipe, *model, "-o", "DIR")
    console.finish(found.document, found.lines(), out, f"open {command_line(found.report)}, or: {then}")
    if found.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if found.status == 'fail' else 'not provably met'} by any variant",
            found=f"{found.best}: {'; '.join(found.reasons)}",
            expected=found.budget,
            fix=f"{unmet_fix(found.reasons)}. The result was written",
        )


@dataclass(frozen=True)
class Previews(Options):
    write: Path | None = option(None, "Write the recipes of grids to DIR; run nothing.", metavar="DIR")
    dry_run: bool = option(False, "Check every input and show the stages with their cost; run nothing.")


@dataclass(frozen=True)
class CostLimit(Options):
    cost_per_hour: float | None = advanced(None, "Cost of all machines together per hour.", min=0, above=True)
    max_cost: float | None = advanced(
        None, "Like --minutes, as a cost limit (with --cost-per-hour).", min=0, above=True
    )

    def check(self) -> None:
        if self.max_cost is not None and self.cost_per_hour is None:
            self.refuse("<max_cost> needs <cost_per_hour>.")

    def limit(self, minutes: float | None) -> float | None:
        """The earlier of both limits, in minutes."""
        if self.max_cost is None or self.cost_per_hour is None:
            return minutes
        return min(60 * self.max_cost / self.cost_per_hour, minutes if minutes is not None else float("inf"))


@command_of(Sweep, (Previews, "resume"), (CostLimit, "watch"), RecordedBundle, waits=True)
def sweep(console: Console, options: Sweep, previews: Previews, costs: CostLimit, recorded: RecordedBundle) -> None:
    """Run many recipes, or those of grids, and compare them in one table.

    Recipes run one by one, so that each is measured alone. Each bundle goes to OUTPUT/<its name>; sweep.html has the
    table of all. With --jobs or --executor, stages without measurements run first, in parallel and once for all
    recipes; each of them already uses several cores. Stages in the store are reused. A failed recipe does not stop the
    others: the exit code is that of the first failure, or 5 if a budget is not met or the time limit was reached. Run
    the same command again to run failed recipes and those not started.

    On a Ray cluster, nodes started with --resources='{"vitdeploy_device": 1}' also measure.

    With --model, all recipes use this module. For several modules, `vitdeploy export --model` writes a folder for each,
    and a recipe names the folder.

    A grid is one recipe in many variants, like the matrix of a CI job. Fields are named as in --set:

    \b
    grid: 1
    name: mine
    base: mine.yaml                             # the recipe whose fields the axes override
    axes:
      precision: [fp32, int8]
      targets: [[onnxruntime-cpu], [openvino-cpu]]
      source:                                   # values with names
        tiny: {model: vit_tiny_patch16_224, checkpoint: tiny.safetensors}
        small: {model: vit_small_patch16_224, checkpoint: small.safetensors}
    exclude: [{source: small, precision: fp32}]
    include: [{precision: int8, bench.duration: 20}]

    \b
    Example:
      vitdeploy sweep recipes/digits.yaml recipes/transformer_reverse.yaml -o out/swept
    """
    limit, home = costs.limit(options.minutes), Path(options.folder or "")
    for recipe in options.recipes:
        require_recipe(Path(recipe))
    if previews.write is not None:
        how = {"overrides": options.overrides, "function": options.function}
        written = api("sweep").write_recipes(options.recipes, previews.write, **how)
        names = [str(path) for path in written]
        console.finish({"recipes": names}, names, previews.write, command_line("vitdeploy", "run", written[0]))
        return
    if previews.dry_run:
        planned = api("sweep").planned(options, costs.cost_per_hour)
        console.finish(planned.document, planned.lines(), None)
        if planned.errors:
            click.get_current_context().exit(planned.errors[0].exit_code)
        return
    with recording(console, recorded) as record:
        found = call("sweep", dataclasses.replace(options, minutes=limit))
        console.finish(found.document, found.lines(), home, f"open {command_line(found.report)}")
        record(found)
    if found.errors:
        click.get_current_context().exit(found.errors[0].exit_code)
    if found.not_begun:
        raise GateError(
            "the time limit was reached before all recipes were measured",
            found=f"not started: {', '.join(found.not_begun)}",
            expected=f"{len(found.document.recipes)} recipes in {limit:g} minutes",
            fix="run the same command again: it continues with them",
        )
    if found.unmet:
        raise GateError("a budget is not met, or not provably met", found=", ".join(found.unmet))
