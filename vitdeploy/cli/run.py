"""`vitdeploy run RECIPE -o DIR`: the whole line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, human_bytes, interval, output_options


@click.command("run")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The bundle's folder. Default: out/<recipe's name>"
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override a field of the recipe.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Reuse finished stages of earlier runs.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@click.option("--dry-run", is_flag=True, help="Check every input and show the plan; compute nothing.")
@output_options
def command(
    console: Console,
    recipe: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    resume: bool,
    skip_bad: bool,
    dry_run: bool,
) -> None:
    """The whole line: recipe in, proven bundle out.

    Checkpoint -> ONNX -> INT8 -> engines -> verified -> benched -> one folder. Exit code 5 when the budget is not met.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.assemble import bench_job, write_run
    from vitdeploy.pipeline.job import prepare
    from vitdeploy.pipeline.plan import make_plan
    from vitdeploy.pipeline.recipe import load_recipe
    from vitdeploy.pipeline.run import default_store, preview, run_plan
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES
    from vitdeploy.store.publish import check_replaceable

    loaded = load_recipe(recipe, overrides)
    out = output or Path("out") / loaded.name
    check_replaceable(out, OUTPUT_NAMES)
    store = default_store()
    with console:
        job = prepare(loaded, skip_bad=skip_bad, progress=console.progress)
        for note in job.origin.notes:
            console.note(note)
        plan = make_plan(job)
        if dry_run:
            rows = preview(plan, store)
            lines = [f"{'reuse' if there else 'make ':<5}  {name}" for name, there in rows]
            lines += ["make   bench", f"make   bundle {out}"]
            document = {"plan": [{"step": name, "reuse": there} for name, there in rows], "output": str(out)}
            console.finish(document, lines, None)
            return
        artifacts = run_plan(
            plan,
            store,
            resume=resume,
            progress=console.progress,
            finished=lambda step, reused: console.detail(f"{'reused' if reused else 'made'} {step.name}"),
        )
        bench = bench_job(job, artifacts, console.progress)
        verdict, report = write_run(job, artifacts, bench, out)
    example = "TOKENS.npz" if job.origin.preprocess is None else "IMAGE"
    console.finish(
        report,
        [*_table(report), "", verdict.sentence, *verdict.remarks],
        out,
        f"open {out / 'report.html'}, or: vitdeploy predict {out} {example}",
    )
    if verdict.gate.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if verdict.gate.status == 'fail' else 'not provably met'}",
            found="; ".join(verdict.gate.reasons),
            wanted=f"budget {loaded.to_budget()}",
            fix="the bundle is written all the same; raise the budget, or evaluate on more images",
        )


def _table(report: dict[str, Any]) -> list[str]:
    verified = {engine["artifact"]: engine for engine in report["engines"]}
    ratios = {(r["a"], r["b"]): r for r in report["bench"]["ratios"] if r["metric"] == "latency"}
    first = report["engines"][0]["verify"]
    metric, noun = first["metric"] or "", report["data"]["noun"]
    wide, rate = max(8, len(metric) + 2), max(10, len(noun) + 5)
    lines = [
        f"{'artifact':<24}{metric:>{wide}}{'agreement':>11}{'p50 ms':>9}{'p99 ms':>9}{noun + 's/s':>{rate}}{'size':>10}"
        "  latency / original"
    ]
    for row in report["bench"]["results"]:
        name, engine = row["artifact"], verified.get(row["artifact"])
        value = engine["verify"]["value"] if engine else first["reference_value"]
        agreement = f"{engine['verify']['agreement']:.2f}" if engine else ""
        ratio = ratios.get((name, "original"))
        lines.append(
            f"{name:<24}{'' if value is None else format(value, '.2f'):>{wide}}{agreement:>11}"
            f"{row['latency_ms']['p50']:>9.2f}{row['latency_ms']['p99']:>9.2f}{row['throughput']:>{rate}.1f}"
            f"{human_bytes(engine['bytes']) if engine else '':>10}"
            f"  {interval(ratio['ratio'], ratio['ci95']) if ratio else ''} {' '.join(row['flags'])}".rstrip()
        )
    return lines
