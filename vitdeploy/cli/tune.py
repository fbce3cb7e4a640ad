"""`vitdeploy tune RECIPE -o DIR`: the engine to ship, of all that can be made here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vitdeploy.api.options import Bounds, TuneRecipe
from vitdeploy.cli.options import Console, call, command_line, command_of, loaded_recipe, unmet_fix
from vitdeploy.errors import GateError


@command_of(TuneRecipe, (Bounds, "time_budget"), waits=True)
def command(console: Console, options: TuneRecipe, bounds: Bounds) -> None:
    """Find the engine to ship: try every precision, mixed precision and token merging on this machine.

    Prints the Pareto front and a verdict, and writes the recipe of the engine to ship. Options override the recipe's
    budget. Exit code 5 when nothing is proven to meet it.
    """
    loaded = loaded_recipe(options)
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
            wanted=found.budget,
            fix=f"{unmet_fix(found.reasons)}. The result is written all the same",
        )
