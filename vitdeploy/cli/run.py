"""`vitdeploy run RECIPE -o DIR`: the whole pipeline."""

from __future__ import annotations

import functools
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
    unmet_fix,
    wait_option,
    worker_options,
)


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
@click.option("--require-recommendation", is_flag=True, help="Exit code 5 too if the verdict recommends nothing.")
@functools.partial(worker_options, what="stages are made, up to what is measured")
@memory_options
@report_bundle_option
@wait_option
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
    require_recommendation: bool,
    executor: str | None,
    jobs: int | None,
    history: str | None,
    trackers: tuple[str, ...],
    report_bundle: bool,
) -> None:
    """Run the whole pipeline: recipe in, proven bundle out.

    Checkpoint -> ONNX -> INT8 -> engines -> verified -> benched -> one folder. Exit code 5 when the budget is not met.
    The verdict has one of three grades: recommended, leading (others may be as fast), or no ranking.
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
    from vitdeploy.api.deploy import plan, run
    from vitdeploy.errors import GateError
    from vitdeploy.publish import check_replaceable
    from vitdeploy.recipe.load import load_recipe
    from vitdeploy.stages.step import OUTPUT_NAMES

    loaded = load_recipe(recipe, overrides, function)
    out = output or Path("out") / loaded.name
    if dry_run:
        check_replaceable(out, OUTPUT_NAMES)
        given = {"function": function, "skip_bad": skip_bad, "executor": executor, "jobs": jobs or 0}
        steps = plan(loaded, progress=console, **given)  # type: ignore[arg-type]
        lines = [f"{'reuse' if each.reuse else 'make ':<5}  {each.name}" for each in steps]
        document = {"plan": [{"step": each.name, "reuse": each.reuse} for each in steps], "output": str(out)}
        console.finish(document, [*lines, "make   bench", f"make   bundle {out}"], None)
        return
    with recorded(history, trackers, bundle=report_bundle, progress=console) as record:
        how = {"function": function, "resume": resume, "skip_bad": skip_bad, "executor": executor, "jobs": jobs or 0}
        made = run(loaded, out, progress=console, **how)  # type: ignore[arg-type]
        example = "TOKENS.npz" if made.bundle.manifest.preprocess is None else "IMAGE"
        predict = command_line("vitdeploy", "predict", out, example)
        console.finish(made.document, made.tables, out, f"open {command_line(made.report)}, or: {predict}")
        record(made)
    if made.status in ("fail", "undecided"):
        raise GateError(
            f"the budget is {'not met' if made.status == 'fail' else 'not provably met'}",
            found="; ".join(made.reasons),
            wanted=made.budget,
            fix=f"{unmet_fix(made.reasons)}. The bundle is written all the same, without the engines that fail it; "
            "--set bundle.include_failed=true keeps them",
        )
    if require_recommendation and made.grade != "recommended":
        raise GateError(
            f"the verdict is {made.grade!r}: {made.document.verdict.sentence}",
            found="; ".join(made.document.verdict.remarks[:1]),
            wanted="a recommendation (--require-recommendation)",
            fix="run the same command on a quiet machine: only the bench is measured again. "
            "The bundle is written, with engines whose answers are verified",
        )
