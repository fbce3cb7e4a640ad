"""`vitdeploy tune RECIPE -o DIR`: the engine to ship, of all that can be made here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.console import Console, Number, command_line, human_bytes, output_options
from vitdeploy.cli.measured import ratio_text
from vitdeploy.cli.sources import model_option
from vitdeploy.cli.steps import tell_finished
from vitdeploy.cli.table import Column, Line, Table
from vitdeploy.cli.unmet import unmet_fix

if TYPE_CHECKING:
    from vitdeploy.document.tuning import TuneDocument

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """ "90s", "20m", "1.5h", in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time like 90s, 20m or 1h.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


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
@click.option("--time-budget", type=Duration(), help="90s, 20m, 1h: begin nothing new after half of it.")
@model_option
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field of the recipe.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Reuse finished stages of earlier runs.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@output_options
def command(
    console: Console,
    recipe: Path,
    output: Path | None,
    targets: tuple[str, ...],
    max_drop: float | None,
    min_agreement: float | None,
    max_latency: float | None,
    time_budget: float | None,
    function: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    skip_bad: bool,
) -> None:
    """Find the engine to ship: try every precision, mixed precision and token merging on this machine.

    Prints the Pareto front and a verdict, and writes the recipe of the engine to ship. Options override the recipe's
    budget. Exit code 5 when nothing is proven to meet it.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.early import check_recipe
    from vitdeploy.pipeline.recipe import load_recipe
    from vitdeploy.pipeline.stages.files import RECIPE_FILE, TUNED_NAMES
    from vitdeploy.publish import check_replaceable

    loaded = load_recipe(recipe, overrides, function)
    bounds = {"max_drop": max_drop, "min_agreement": min_agreement, "max_latency": max_latency}
    out = output or Path("out") / f"{loaded.name}-tuned"
    check_replaceable(out, TUNED_NAMES)
    check_recipe(loaded.model_copy(update={"precision": "fp32"}), targets or None)  # every precision is tried

    from vitdeploy.pipeline.run import default_store
    from vitdeploy.pipeline.tuning.prepare import prepare_search
    from vitdeploy.pipeline.tuning.tuner import Tuner
    from vitdeploy.pipeline.tuning.write import write_tuned

    with console:
        job = prepare_search(loaded, targets, bounds, skip_bad=skip_bad, progress=console.progress, function=function)
        for note in (*job.reference_model.notes, *job.data.notes):
            console.note(note)
        tuner = Tuner(
            job,
            default_store(),
            resume,
            console.progress,
            lambda step, reused: tell_finished(console, step.name, step, reused),
            time_budget,
        )
        for note in tuner.foresee():
            console.note(note)
        tuned = tuner.run()
        document = write_tuned(tuned, out)
    lines: list[Line] = [_variants(document), "", _finalists(document), ""]
    lines += [f"warning: {text}" for text in document.warnings]
    lines += [document.verdict.sentence, *document.verdict.remarks]
    lines += [f"not tried: {each.what}: {each.why}" for each in document.left_out]
    model = ("--model", function) if function else ()
    then = command_line("vitdeploy", "run", out / RECIPE_FILE, *model, "-o", "DIR")
    console.finish(document, lines, out, f"open {command_line(out / 'tune.html')}, or: {then}")
    gate = tuned.choice.gate
    if gate.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if gate.status == 'fail' else 'not provably met'} by any variant",
            found=f"{tuned.choice.best.name}: {'; '.join(gate.reasons)}",
            wanted=str(job.budget),
            fix=f"{unmet_fix(gate.reasons)}. The result is written all the same",
        )


def _variants(document: TuneDocument) -> Table:
    columns = (
        Column("variant"),
        Column(document.unit, 60, least=10),
        Column("expected agreement", 80),
        Column("ms", 100, least=7),
        Column("size", 40, least=8),
        Column("on the front", 90, left=True),
    )
    rows = [
        (
            each.name,
            f"{each.distance:.3g}",
            f"{each.expected.agreement:.2f}" if each.expected else "",
            f"{each.latency_ms:.2f}",
            human_bytes(each.bytes),
            "yes" if each.finalist else "",
        )
        for each in sorted(document.variants, key=lambda each: (each.distance, each.latency_ms))
    ]
    return Table(columns, tuple(rows))


def _finalists(document: TuneDocument) -> Table:
    rows = {row.artifact: row for row in document.bench.results}
    first = document.engines[0].verify
    columns = (
        Column("finalist"),
        Column(first.metric or "", 60, least=8),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("latency / original", 70, left=True),
    )
    original = f"{rows['original'].latency_ms.p50:.2f}"
    cells = [("original", _number(first.reference_value), "", original, "")]
    for each in document.engines:
        name, verify = each.artifact, each.verify
        found = document.bench.ratio(name, "original")
        ratio = ratio_text(found) if found else ""
        cells.append(
            (
                name,
                _number(verify.value),
                f"{verify.agreement:.2f}",
                f"{rows[name].latency_ms.p50:.2f}",
                f"{ratio} {' '.join(rows[name].flags)}".rstrip(),
            )
        )
    return Table(columns, tuple(cells))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
