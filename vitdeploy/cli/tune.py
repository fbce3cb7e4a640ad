"""`vitdeploy tune RECIPE -o DIR`: the engine to ship, of all that can be made here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, Number, human_bytes, interval, output_options
from vitdeploy.cli.steps import tell_finished

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
@click.option("--target", "targets", multiple=True, help="Search for this target alone; may be repeated.")
@click.option("--max-drop", type=Number(min=0), help="Points of accuracy that may be lost at most.")
@click.option("--min-agreement", type=Number(min=0, max=100), help="Percent of the original's answers, at least.")
@click.option("--max-latency", type=Number(min=0, min_open=True), help="Milliseconds, p50 of a single stream.")
@click.option("--time-budget", type=Duration(), help="90s, 20m, 1h: begin nothing new after half of it.")
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
    overrides: tuple[str, ...],
    resume: bool,
    skip_bad: bool,
) -> None:
    """The engine to ship: every precision, mixed precision and token merging, tried and judged on this machine.

    Ends with the Pareto front, a verdict and the recipe of what to ship. The budget is the recipe's, where no option
    sets another. Exit code 5 when nothing is proven to meet it.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.recipe import load_recipe
    from vitdeploy.pipeline.run import default_store
    from vitdeploy.pipeline.tuning.prepare import prepare_search
    from vitdeploy.pipeline.tuning.tuner import Tuner
    from vitdeploy.pipeline.tuning.write import OUTPUT_NAMES, RECIPE_FILE, write_tuned
    from vitdeploy.publish import check_replaceable

    loaded = load_recipe(recipe, overrides)
    bounds = {"max_drop": max_drop, "min_agreement": min_agreement, "max_latency": max_latency}
    out = output or Path("out") / f"{loaded.name}-tuned"
    check_replaceable(out, OUTPUT_NAMES)
    with console:
        job = prepare_search(loaded, targets, bounds, skip_bad=skip_bad, progress=console.progress)
        for note in (*job.origin.notes, *job.data.notes):
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
    lines = [*_variants(document), "", *_finalists(document), ""]
    lines += [f"warning: {text}" for text in document["warnings"]]
    lines += [document["verdict"]["sentence"], *document["verdict"]["remarks"]]
    lines += [f"not tried: {each['what']}: {each['why']}" for each in document["left_out"]]
    console.finish(document, lines, out, f"open {out / 'tune.html'}, or: vitdeploy run {out / RECIPE_FILE} -o DIR")
    gate = tuned.choice.gate
    if gate.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if gate.status == 'fail' else 'not provably met'} by any variant",
            found=f"{tuned.choice.best.name}: {'; '.join(gate.reasons)}",
            wanted=str(job.budget),
            fix="the result is written all the same; raise the budget, or evaluate on more images",
        )


def _variants(document: dict[str, Any]) -> list[str]:
    wide = max(len(each["name"]) for each in document["variants"]) + 2
    lines = [f"{'variant':<{wide}}{document['unit']:>24}{'expected agreement':>20}{'ms':>9}{'size':>10}"]
    for each in sorted(document["variants"], key=lambda each: (each["distance"], each["latency_ms"])):
        expected = f"{each['expected']['agreement']:.2f}" if each["expected"] else ""
        lines.append(
            f"{each['name']:<{wide}}{each['distance']:>24.3g}{expected:>20}{each['latency_ms']:>9.2f}"
            f"{human_bytes(each['bytes']):>10}{'  on the front' if each['finalist'] else ''}"
        )
    return lines


def _finalists(document: dict[str, Any]) -> list[str]:
    ratios = {r["a"]: r for r in document["bench"]["ratios"] if (r["b"], r["metric"]) == ("original", "latency")}
    rows = {row["artifact"]: row for row in document["bench"]["results"]}
    wide = max(len(name) for name in rows) + 2
    metric = document["engines"][0]["verify"]["metric"] or ""
    reference = document["engines"][0]["verify"]["reference_value"]
    lines = [f"{'finalist':<{wide}}{metric:>10}{'agreement':>11}{'p50 ms':>9}  latency / original"]
    lines.append(f"{'original':<{wide}}{_number(reference):>10}{'':>11}{rows['original']['latency_ms']['p50']:>9.2f}")
    for each in document["engines"]:
        name, verify = each["artifact"], each["verify"]
        ratio = interval(ratios[name]["ratio"], ratios[name]["ci95"])
        lines.append(
            f"{name:<{wide}}{_number(verify['value']):>10}{verify['agreement']:>11.2f}"
            f"{rows[name]['latency_ms']['p50']:>9.2f}  {ratio} {' '.join(rows[name]['flags'])}".rstrip()
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
