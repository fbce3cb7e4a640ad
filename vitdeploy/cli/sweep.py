"""`vitdeploy sweep RECIPES -o DIR`: many recipes, one table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, output_options


@click.command("sweep")
@click.argument("recipes", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default="out/sweep", show_default=True)
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
    console: Console, recipes: tuple[Path, ...], output: Path, overrides: tuple[str, ...], jobs: int, skip_bad: bool
) -> None:
    """Many recipes, one table.

    One recipe after the other is run and measured, and its bundle written to OUTPUT/<its name>, with the table of all
    in sweep.html. With --jobs, what measures nothing is made before that, so many recipes at a time; each of them uses
    several cores already. What is in the store from earlier runs is reused. A recipe that fails does not end the
    others; the exit code is that of the first that failed, or 5 where a budget is not met.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.executors import Processes
    from vitdeploy.pipeline.run import default_store
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES, write_json
    from vitdeploy.pipeline.sweep import Entry, load_all, sweep
    from vitdeploy.publish import check_replaceable, storage_errors
    from vitdeploy.report.html import render_sweep
    from vitdeploy.runtime.atomic import write_atomic

    store = default_store().root
    entries = [Entry(recipe, overrides, store, skip_bad) for recipe in recipes]
    for recipe in load_all(entries):
        check_replaceable(output / recipe.name, OUTPUT_NAMES)
    with console:
        executor = Processes(jobs) if jobs > 1 else None
        document = sweep(entries, output, executor, console.progress, console.note)
        with storage_errors(output):
            output.mkdir(parents=True, exist_ok=True)
            write_json(output / "sweep.json", document)
            write_atomic(output / "sweep.html", render_sweep(document).encode())
    console.finish(document, _table(document), output, f"open {output / 'sweep.html'}")
    failed = [row["error"] for row in document["recipes"] if row["error"] is not None]
    if failed:
        click.get_current_context().exit(failed[0]["exit_code"])
    unmet = [row["name"] for row in document["recipes"] if row["report"]["verdict"]["gate"] in ("fail", "undecided")]
    if unmet:
        raise GateError("a budget is not met, or not provably", found=", ".join(unmet))


def _table(document: Mapping[str, Any]) -> list[str]:
    """The recommended artifact of every recipe."""
    width = max(len(row["name"]) for row in document["recipes"]) + 2
    lines = [
        f"{'recipe':<{width}}{'recommended':<26}{'value':>8}{'agreement':>11}{'p50 ms':>9}{'samples/s':>11}  budget"
    ]
    for row in document["recipes"]:
        report = row["report"]
        if report is None:
            lines.append(f"{row['name']:<{width}}failed: {row['error']['message']}")
            continue
        name = report["verdict"]["leading"]
        engine = next((each for each in report["engines"] if each["artifact"] == name), None)
        bench = next(each for each in report["bench"]["results"] if each["artifact"] == name)
        verified = engine["verify"] if engine else {"value": report["engines"][0]["verify"]["reference_value"]}
        shown = name if report["verdict"]["recommended"] else f"{name}, not decided"
        value, agreement = verified["value"], verified.get("agreement")
        lines.append(
            f"{row['name']:<{width}}{shown:<26}{'' if value is None else format(value, '.2f'):>8}"
            f"{'' if agreement is None else format(agreement, '.2f'):>11}{bench['latency_ms']['p50']:>9.2f}"
            f"{bench['throughput']:>11.1f}  {report['verdict']['gate']}"
        )
    return lines
