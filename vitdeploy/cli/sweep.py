"""`vitdeploy sweep RECIPES -o DIR`: many recipes, one table."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import (
    Console,
    command_line,
    memory_options,
    model_option,
    output_options,
    recorded,
    report_bundle_option,
    wait_option,
)


@click.command("sweep")
@click.argument("recipes", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default="out/sweep", show_default=True)
@model_option
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field of every recipe.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many recipes are made at the same time. What is measured always runs alone.",
)
@click.option(
    "--executor",
    metavar="processes|ray[:HOST:PORT]",
    help="Where they are made: on this machine, or on a Ray cluster; --jobs limits how many at a time.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the recipes of grids to DIR, and run nothing.",
)
@click.option("--dry-run", is_flag=True, help="Check every input; show the stages and what they cost; make nothing.")
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Keep the bundles of OUTPUT that an earlier sweep has finished, with their measurements.",
)
@click.option(
    "--minutes", type=click.FloatRange(min=0, min_open=True), help="Begin no recipe that would end after so many."
)
@click.option("--cost-per-hour", type=click.FloatRange(min=0, min_open=True), help="Of all machines together.")
@click.option("--max-cost", type=click.FloatRange(min=0, min_open=True), help="As --minutes, by what an hour costs.")
@click.option("--watch", is_flag=True, help="Write sweep.html from the beginning, as a page that reloads itself.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@memory_options
@report_bundle_option
@wait_option
@output_options
def command(
    console: Console,
    recipes: tuple[Path, ...],
    output: Path,
    function: str | None,
    overrides: tuple[str, ...],
    jobs: int,
    executor: str | None,
    write: Path | None,
    dry_run: bool,
    resume: bool,
    minutes: float | None,
    cost_per_hour: float | None,
    max_cost: float | None,
    watch: bool,
    skip_bad: bool,
    history: str | None,
    trackers: tuple[str, ...],
    report_bundle: bool,
) -> None:
    """Run many recipes, or those of grids, and compare them in one table.

    Recipes run one after the other, so that each is measured alone. Each bundle goes to OUTPUT/<its name>; sweep.html
    has the table of all. With --jobs or --executor, stages that measure nothing run first, several at a time and each
    once for all recipes; each of them already uses several cores. Stages in the store are reused. A recipe that fails
    does not end the others: the exit code is that of the first failure, or 5 if a budget is not met or the time was
    over. The same command again runs what failed and what was not begun.

    On a Ray cluster, nodes that were started with --resources='{"vitdeploy_device": 1}' also measure.

    With --model all recipes use that one module. For several modules, `vitdeploy export --model` writes a folder for
    each, and a recipe names the folder.

    A grid is one recipe in many variants, as in the matrix of a CI job. A field is called as --set calls it:

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
    """
    from vitdeploy.api.sweep import sweep, write_recipes
    from vitdeploy.errors import GateError

    limit = _limit(minutes, cost_per_hour, max_cost)
    if write is not None:
        written = write_recipes(recipes, write, overrides=overrides, function=function)
        names = [str(path) for path in written]
        console.finish({"recipes": names}, names, write, command_line("vitdeploy", "run", written[0]))
        return
    if dry_run:
        _plan(console, recipes, output, overrides, function, executor, skip_bad, resume, cost_per_hour)
        return
    with recorded(history, trackers, bundle=report_bundle, progress=console) as record:
        found = sweep(
            recipes,
            output,
            overrides=overrides,
            function=function,
            jobs=jobs,
            executor=executor,
            skip_bad=skip_bad,
            resume=resume,
            minutes=limit,
            watch=watch,
            progress=console,
        )
        console.finish(found.document, found.lines(), output, f"open {command_line(found.report)}")
        record(found)
    if found.errors:
        click.get_current_context().exit(found.errors[0].exit_code)
    if found.not_begun:
        raise GateError(
            "the time was over before all recipes were measured",
            found=f"not begun: {', '.join(found.not_begun)}",
            wanted=f"{len(found.document.recipes)} recipes in {limit:g} minutes",
            fix="the same command goes on with them",
        )
    if found.unmet:
        raise GateError("a budget is not met, or not provably", found=", ".join(found.unmet))


def _limit(minutes: float | None, cost_per_hour: float | None, max_cost: float | None) -> float | None:
    """In minutes, whichever ends first."""
    if max_cost is None:
        return minutes
    if cost_per_hour is None:
        raise click.UsageError("--max-cost needs --cost-per-hour.")
    return min(60 * max_cost / cost_per_hour, minutes if minutes is not None else float("inf"))


def _plan(
    console: Console,
    recipes: tuple[Path, ...],
    output: Path,
    overrides: tuple[str, ...],
    function: str | None,
    executor: str | None,
    skip_bad: bool,
    resume: bool,
    cost_per_hour: float | None,
) -> None:
    from vitdeploy.api.sweep import plan_sweep

    found = plan_sweep(
        recipes,
        output,
        overrides=overrides,
        function=function,
        executor=executor,
        skip_bad=skip_bad,
        resume=resume,
        cost_per_hour=cost_per_hour,
        progress=console,
    )
    console.finish(found.document, found.lines(), None)
    if found.errors:
        click.get_current_context().exit(found.errors[0].exit_code)
