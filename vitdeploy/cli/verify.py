"""`vitdeploy verify A --against B --data DIR`: does A still give B's answers?"""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.console import Console, Number, interval, output_options


@click.command("verify")
@click.argument("artifact")
@click.option("--against", required=True, help="The original: a built-in model, a bundle, a folder or an .onnx file.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Weights of the built-in model.")
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Images, best with one folder a class.")
@click.option("--target", help="Which engine of a bundle, or what a graph is compiled for.")
@click.option("--num-samples", type=click.IntRange(min=1), help="Evaluate on this many images. Default: all.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Choice of the images.")
@click.option("--max-drop", type=Number(min=0), help="Gate: points of top-1 that may be lost.")
@click.option("--min-agreement", type=Number(0, 100), help="Gate: percent of equal answers.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@output_options
def command(
    console: Console,
    artifact: str,
    against: str,
    checkpoint: Path | None,
    data: Path,
    target: str | None,
    num_samples: int | None,
    seed: int,
    max_drop: float | None,
    min_agreement: float | None,
    skip_bad: bool,
) -> None:
    """An artifact against the original, on the same images.

    First the same tensor goes through both (a difference is the graph's), then the same image (a difference is the
    preprocessing's). With class folders, top-1 and top-5 of both and the paired drop with its 95 % interval. Exit code
    5 when a gate is not met, or not provably met.
    """
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.comparison import verify_subjects
    from vitdeploy.pipeline.subjects import opened
    from vitdeploy.spec import Budget

    with console, opened(target=target, checkpoint=checkpoint) as find:
        found, gate = verify_subjects(
            find(artifact)[0],
            find(against)[0],
            data,
            num_samples=num_samples,
            seed=seed,
            skip_bad=skip_bad,
            budget=Budget(max_drop=max_drop, min_agreement=min_agreement),
            progress=console.progress,
        )
    lines = [f"{found['artifact']} against {found['against']} on {found['n']} images"]
    if found["top1"] is not None:
        lines += [
            f"top-1       {found['top1']:.2f} %, original {found['reference_top1']:.2f} %, "
            f"drop {interval(found['drop'], found['drop_ci95'])} points",
            f"top-5       {found['top5']:.2f} %, original {found['reference_top5']:.2f} %",
        ]
    lines += [
        f"agreement   {interval(found['agreement'], found['agreement_ci95'])} %",
        f"KL          {found['kl']:.2e} nats; cosine {found['cosine_mean']:.6f} (least {found['cosine_min']:.6f}); "
        f"largest difference {found['max_difference']:.1e}",
        f"diagnosis   {found['diagnosis']}",
    ]
    if gate.status != "none":
        lines.append(f"gate        {gate.status}" + "".join(f"; {reason}" for reason in gate.reasons))
    console.finish(found, lines, None)
    if gate.status in ("fail", "undecided"):
        raise GateError(
            "the gate is not met" if gate.status == "fail" else "the gate is not provably met",
            found="; ".join(gate.reasons),
            fix="evaluate on more images, or raise the budget",
        )
