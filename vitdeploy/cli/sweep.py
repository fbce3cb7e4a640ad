"""`vitdeploy sweep RECIPES -o DIR`: many recipes, one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.api.tables import Column, Table
from vitdeploy.cli.console import Console, command_line, output_options
from vitdeploy.cli.sources import model_option

if TYPE_CHECKING:
    from vitdeploy.document.report import Report
    from vitdeploy.document.sweep import SweepDocument


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
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@output_options
def command(
    console: Console,
    recipes: tuple[Path, ...],
    output: Path,
    function: str | None,
    overrides: tuple[str, ...],
    jobs: int,
    skip_bad: bool,
) -> None:
    """Run many recipes and compare them in one table.

    Recipes run one after the other, so that each is measured alone. Each bundle goes to OUTPUT/<its name>; sweep.html
    has the table of all. With --jobs, stages that measure nothing run first, for that many recipes at a time; each of
    them already uses several cores. Stages in the store are reused. A recipe that fails does not end the others: the
    exit code is that of the first failure, or 5 if a budget is not met.

    With --model all recipes use that one module. For several modules, `vitdeploy export --model` writes a folder for
    each, and a recipe names the folder.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.recipe.load import load_recipe

    for path in recipes:
        load_recipe(path, overrides, function)  # before all that is heavy is imported

    from vitdeploy.pipeline.run import default_store
    from vitdeploy.publish import check_replaceable, storage_errors
    from vitdeploy.report.html import render_sweep
    from vitdeploy.runtime.atomic import write_atomic
    from vitdeploy.stages.files import OUTPUT_NAMES, write_json
    from vitdeploy.workflows.executors import Processes
    from vitdeploy.workflows.sweep import Entry, load_all, sweep

    store = default_store().root
    entries = [Entry(recipe, overrides, store, skip_bad, function) for recipe in recipes]
    for recipe in load_all(entries):
        check_replaceable(output / recipe.name, OUTPUT_NAMES)
    with console:
        executor = Processes(jobs) if jobs > 1 else None
        document = sweep(entries, output, executor, console.progress, console.note)
        with storage_errors(output):
            output.mkdir(parents=True, exist_ok=True)
            write_json(output / "sweep.json", document)
            write_atomic(output / "sweep.html", render_sweep(document).encode())
    console.finish(document, [_table(document)], output, f"open {command_line(output / 'sweep.html')}")
    failed = [row.error for row in document.recipes if row.error is not None]
    if failed:
        click.get_current_context().exit(failed[0].exit_code)
    unmet = [row.name for row in document.recipes if row.report is not None and _unmet(row.report)]
    if unmet:
        raise GateError("a budget is not met, or not provably", found=", ".join(unmet))


def _unmet(report: Report) -> bool:
    """Of any of its image sizes."""
    gates = [report.verdict.gate, *(each.gate for each in report.sizes or ())]
    return "fail" in gates or "undecided" in gates


def _table(document: SweepDocument) -> Table:
    """The recommended artifact of every recipe."""
    columns = (
        Column("recipe"),
        Column("recommended", 90, left=True),
        Column("value", 60, least=6),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("samples/s", 40),
        Column("budget", 70, left=True),
    )
    rows: list[tuple[str, ...]] = []
    for row in document.recipes:
        report = row.report
        if report is None:
            rows.append((row.name, f"failed: {row.error.message if row.error else ''}"))
            continue
        name = report.verdict.stands_for_all or ""
        engine, bench = report.engine(name), report.bench.row(name) if report.bench else None
        value = engine.verify.value if engine else report.engines[0].verify.reference_value
        rows.append(
            (
                row.name,
                name if report.verdict.recommended else f"{name}, not decided",
                "" if value is None else f"{value:.2f}",
                f"{engine.verify.agreement:.2f}" if engine else "",
                f"{bench.latency_ms.p50:.2f}" if bench else "",
                f"{bench.throughput:.1f}" if bench else "",
                report.verdict.gate,
            )
        )
    return Table(columns, tuple(rows))
