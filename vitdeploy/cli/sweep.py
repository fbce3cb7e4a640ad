"""`vitdeploy sweep RECIPES -o DIR`: many recipes, one table."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.console import Console, command_line, output_options
from vitdeploy.cli.options import memory_options, report_bundle_option
from vitdeploy.cli.sources import model_option


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
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@memory_options
@report_bundle_option
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
    skip_bad: bool,
    history: str | None,
    trackers: tuple[str, ...],
    report_bundle: bool,
) -> None:
    """Run many recipes, or those of grids, and compare them in one table.

    Recipes run one after the other, so that each is measured alone. Each bundle goes to OUTPUT/<its name>; sweep.html
    has the table of all. With --jobs or --executor, stages that measure nothing run first, for several recipes at a
    time; each of them already uses several cores. Stages in the store are reused. A recipe that fails does not end the
    others: the exit code is that of the first failure, or 5 if a budget is not met.

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
    from vitdeploy.api.history import recorded
    from vitdeploy.api.sweep import sweep, write_recipes
    from vitdeploy.errors import GateError

    if write is not None:
        written = write_recipes(recipes, write, overrides=overrides, function=function)
        names = [str(path) for path in written]
        console.finish({"recipes": names}, names, write, command_line("vitdeploy", "run", written[0]))
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
            progress=console,
        )
        console.finish(found.document, found.lines(), output, f"open {command_line(found.report)}")
        record(found)
    if found.errors:
        click.get_current_context().exit(found.errors[0].exit_code)
    if found.unmet:
        raise GateError("a budget is not met, or not provably", found=", ".join(found.unmet))
