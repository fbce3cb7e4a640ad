"""`vitdeploy run RECIPE -o DIR`: the whole pipeline."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vitdeploy.cli.console import Console, command_line, human_bytes, output_options
from vitdeploy.cli.measured import claim, claims_of, ratio_text
from vitdeploy.cli.sources import model_option
from vitdeploy.cli.steps import tell_finished
from vitdeploy.cli.table import Column, Line, Table
from vitdeploy.cli.unmet import unmet_fix

if TYPE_CHECKING:
    from vitdeploy.bench.row import Row
    from vitdeploy.document.report import Report
    from vitdeploy.pipeline.job import Job


GUARDED = " (the guard of every run whose budget bounds neither drop nor agreement)"


@click.command("run")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The bundle's folder. Default: out/<recipe's name>"
)
@model_option
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field of the recipe.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Reuse finished stages of earlier runs.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@click.option("--dry-run", is_flag=True, help="Check every input and show the plan; compute nothing.")
@output_options
def command(
    console: Console,
    recipe: Path,
    output: Path | None,
    function: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    skip_bad: bool,
    dry_run: bool,
) -> None:
    """Run the whole pipeline: recipe in, proven bundle out.

    Checkpoint -> ONNX -> INT8 -> engines -> verified -> benched -> one folder. Exit code 5 when the budget is not met.
    RECIPE is a YAML file. Relative paths in it start at its own folder:

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

    With --model the original is the module that your own function returns, with the weights of source.checkpoint if the
    recipe has one. The recipe then names no model.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.early import check_recipe
    from vitdeploy.pipeline.recipe import load_recipe
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES
    from vitdeploy.publish import check_replaceable

    loaded = load_recipe(recipe, overrides, function)
    out = output or Path("out") / loaded.name
    check_replaceable(out, OUTPUT_NAMES)
    check_recipe(loaded)

    from vitdeploy.pipeline.assemble import run_pipeline
    from vitdeploy.pipeline.job import prepare
    from vitdeploy.pipeline.plan import make_plan
    from vitdeploy.pipeline.run import default_store, preview

    store = default_store()
    with console:
        jobs = prepare(loaded, skip_bad=skip_bad, progress=console.progress, function=function)
        several = len(jobs) > 1
        for note in dict.fromkeys(note for job in jobs for note in (*job.reference_model.notes, *job.data.notes)):
            console.note(note)
        if dry_run:
            rows = [(_at(job, name, several), there) for job in jobs for name, there in preview(make_plan(job), store)]
            plan = [f"{'reuse' if there else 'make ':<5}  {name}" for name, there in rows]
            plan += ["make   bench", f"make   bundle {out}"]
            document = {"plan": [{"step": name, "reuse": there} for name, there in rows], "output": str(out)}
            console.finish(document, plan, None)
            return
        report, outcomes = run_pipeline(
            jobs,
            loaded,
            out,
            store,
            resume=resume,
            progress=lambda job: functools.partial(_progress, console, job, several),
            finished=lambda job, step, reused: tell_finished(console, _at(job, step.name, several), step, reused),
            note=lambda job, text: console.note(_at(job, text, several)),
        )
    lines: list[Line] = []
    for outcome in outcomes:
        lines += [f"{outcome.job.size}:"] if several else []
        warnings = [f"warning: {text}" for text in outcome.report.warnings]
        lines += [_table(outcome.report), "", *warnings, outcome.verdict.sentence, *outcome.verdict.remarks]
        lines += [""] if several else []
    example = "TOKENS.npz" if jobs[0].reference_model.preprocess is None else "IMAGE"
    predict = command_line("vitdeploy", "predict", out, example)
    console.finish(report, lines, out, f"open {command_line(out / 'report.html')}, or: {predict}")
    unmet = [outcome for outcome in outcomes if outcome.verdict.gate.status in ("fail", "undecided")]
    if unmet:
        from vitdeploy.verify.gate import guards

        failed = any(outcome.verdict.gate.status == "fail" for outcome in unmet)
        reasons = [_at(each.job, reason, several) for each in unmet for reason in each.verdict.gate.reasons]
        raise GateError(
            f"the budget is {'not met' if failed else 'not provably met'}",
            found="; ".join(reasons),
            wanted=f"{unmet[0].job.budget}{GUARDED if guards(loaded.to_budget()) else ''}",
            fix=f"{unmet_fix(reasons)}. The bundle is written all the same, without the engines that fail it; "
            "--set bundle.include_failed=true keeps them",
        )


def _at(job: Job, text: str, several: bool) -> str:
    """The text, with the job's image size where there are several."""
    return f"{job.size}: {text}" if several else text


def _progress(console: Console, job: Job, several: bool, text: str, done: int, total: int) -> None:
    console.progress(_at(job, text, several), done, total)


def _p99(row: Row) -> str:
    return next(claim(each, 2) for each in claims_of(row) if each.name == "p99")


def _table(report: Report) -> Table:
    assert report.bench is not None
    first = report.engines[0].verify
    columns = (
        Column("artifact"),
        Column(first.metric or "", 90, least=6),
        Column("agreement", 80),
        Column("p50 ms", 100, least=7),
        Column("p99 ms", 40, least=8),
        Column(f"{report.data.noun}s/s", 50, least=8),
        Column("size", 30, least=8),
        Column("latency / original", 70, left=True),
    )
    rows = []
    for row in report.bench.results:
        name, engine = row.artifact, report.engine(row.artifact)
        value = engine.verify.value if engine else first.reference_value
        ratio = report.bench.ratio(name, "original")
        against = ratio_text(ratio) if ratio else ""
        rows.append(
            (
                name,
                "" if value is None else f"{value:.2f}",
                f"{engine.verify.agreement:.2f}" if engine else "",
                f"{row.latency_ms.p50:.2f}",
                _p99(row),
                f"{row.throughput:.1f}",
                human_bytes(engine.bytes) if engine else "",
                f"{against} {' '.join(row.flags)}".strip(),
            )
        )
    return Table(columns, tuple(rows))
