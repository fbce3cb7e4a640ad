"""`vitdeploy tune RECIPE -o DIR`: the engine to ship, of all that can be made here."""

from __future__ import annotations

import functools
from pathlib import Path

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import (
    Console,
    Duration,
    Number,
    command_line,
    model_option,
    output_options,
    unmet_fix,
    wait_option,
    worker_options,
)


@click.command("tune")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Folder for the result. Default: out/<recipe's name>-tuned"
)
@click.option(
    "--target",
    "targets",
    shell_complete=complete_targets,
    multiple=True,
    help="Search for this target alone; may be repeated.",
)
@click.option("--max-drop", type=Number(min=0), help="Points of accuracy that may be lost at most.")
@click.option("--min-agreement", type=Number(min=0, max=100), help="Percent of the original's answers, at least.")
@click.option("--max-latency", type=Number(min=0, min_open=True), help="Milliseconds, p50 of a single stream.")
@click.option("--max-memory", type=click.IntRange(min=1), help="Bytes, peak of a process that loads it and answers.")
@click.option(
    "--time-budget",
    type=Duration(),
    help="90s, 20m, 1h: begin nothing new after half of it; waiting for other measurements does not count.",
)
@model_option
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field of the recipe.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Reuse finished stages of earlier runs.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@functools.partial(worker_options, what="variants are made, up to what is measured")
@wait_option
@output_options
def command(
    console: Console,
    recipe: Path,
    output: Path | None,
    targets: tuple[str, ...],
    max_drop: float | None,
    min_agreement: float | None,
    max_latency: float | None,
    max_memory: int | None,
    time_budget: float | None,
    function: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    skip_bad: bool,
    executor: str | None,
    jobs: int | None,
) -> None:
    """Find the engine to ship: try every precision, mixed precision and token merging on this machine.

    Prints the Pareto front and a verdict, and writes the recipe of the engine to ship. Options override the recipe's
    budget. Exit code 5 when nothing is proven to meet it.
    """
    from vitdeploy.api.tune import tune_recipe
    from vitdeploy.errors import GateError
    from vitdeploy.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides, function)
    out = output or Path("out") / f"{loaded.name}-tuned"
    bounds = {
        "max_drop": max_drop,
        "min_agreement": min_agreement,
        "max_latency": max_latency,
        "max_memory": max_memory,
    }
    found = tune_recipe(
        loaded,
        out,
        function=function,
        targets=targets,
        budget=bounds,
        time_budget=time_budget,
        resume=resume,
        skip_bad=skip_bad,
        executor=executor,
        jobs=jobs or 0,
        progress=console,
    )
    model = ("--model", function) if function else ()
    then = command_line("vitdeploy", "run", found.recipe, *model, "-o", "DIR")
    console.finish(found.document, found.lines(), out, f"open {command_line(found.report)}, or: {then}")
    if found.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if found.status == 'fail' else 'not provably met'} by any variant",
            found=f"{found.best}: {'; '.join(found.reasons)}",
            wanted=found.budget,
            fix=f"{unmet_fix(found.reasons)}. The result is written all the same",
        )
