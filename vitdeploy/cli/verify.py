"""`vitdeploy verify A --against B --data DIR`: does A still give B's answers?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.bundle_options import trust_option
from vitdeploy.cli.complete import complete_models, complete_targets
from vitdeploy.cli.console import Console, Number, interval, output_options
from vitdeploy.cli.evaluation import evaluation, label_options
from vitdeploy.cli.on import finish_devices, on_option
from vitdeploy.cli.sources import source_options, to_source

if TYPE_CHECKING:
    from vitdeploy.document.verification import Verification
    from vitdeploy.errors import GateError
    from vitdeploy.pipeline.on_devices import Outcome
    from vitdeploy.pipeline.subjects import Subject
    from vitdeploy.pipeline.tasks.adapter import DataChoice
    from vitdeploy.spec import Budget
    from vitdeploy.verify.gate import Gate


@click.command("verify")
@click.argument("artifact", shell_complete=complete_models)
@click.option(
    "--against",
    required=True,
    shell_complete=complete_models,
    help="The original: a built-in model, a bundle, a folder or an .onnx file.",
)
@source_options()
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Images, best with labels; or an .npz.")
@label_options
@click.option(
    "--target",
    shell_complete=complete_targets,
    help="Which engine of a bundle, by target or name, or what a graph is compiled for.",
)
@click.option("--num-samples", type=click.IntRange(min=1), help="Evaluate on this many images. Default: all.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Choice of the images.")
@click.option("--max-drop", type=Number(min=0), help="Gate: points of top-1 that may be lost.")
@click.option("--min-agreement", type=Number(0, 100), help="Gate: percent of equal answers.")
@click.option("--bisect", is_flag=True, help="Find where the error enters instead, and what fixes it.")
@click.option("--emulate", is_flag=True, help="Evaluate a graph typed for a GPU here, with its types' storage.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@on_option
@trust_option
@output_options
def command(
    console: Console,
    artifact: str,
    against: str,
    data: Path,
    labels: str | None,
    annotations: Path | None,
    target: str | None,
    num_samples: int | None,
    seed: int,
    max_drop: float | None,
    min_agreement: float | None,
    bisect: bool,
    emulate: bool,
    skip_bad: bool,
    on: str | None,
    trust: Path | None,
    **options: Any,
) -> None:
    """Compare an artifact with the original on the same images.

    First the same tensor goes through both: a difference comes from the graph. Then the same image goes through both:
    a difference comes from the preprocessing. With labels, the accuracy of both is printed, and the paired drop with
    its 95 % interval. Exit code 5 when a gate is not met, or not provably met. The options on weights apply to the
    original.

    --bisect instead finds which part and which layer, its input or its weight, makes the engine's answers differ from
    those of its float graph. It uses 32 calibration images (--num-samples), never evaluation images.

    --emulate evaluates a graph that `quantize` typed for a GPU, or that of a bundle, on this machine's CPU: every
    tensor is rounded to its type, sums are in float32. That finds overflow and lost answers without the GPU. It says
    nothing about speed.

    With --on each device builds and runs the artifact's engine, and the original runs here.
    """
    if on is not None and (bisect or emulate):
        raise click.UsageError("--on runs a whole engine: leave --bisect and --emulate out.")
    _check_early(artifact, against, data, annotations, target)
    if bisect:
        if max_drop is not None or min_agreement is not None or labels is not None or annotations is not None:
            raise click.UsageError("--bisect judges nothing: leave --max-drop, --min-agreement and labels out.")
        if trust is not None:
            raise click.UsageError("--bisect compiles the parts that it runs: leave --trust out.")
        from vitdeploy.pipeline.bisection import bisect_artifact

        with console:
            told = bisect_artifact(
                artifact,
                against,
                data,
                target=target,
                num_samples=num_samples,
                seed=seed,
                skip_bad=skip_bad,
                progress=console.progress,
            )
        console.finish(told.document, told.lines, None, told.then)
        return
    from vitdeploy.pipeline.comparison import verify_subjects
    from vitdeploy.pipeline.subjects import emulation_offered, opened
    from vitdeploy.spec import Budget

    choice = evaluation(data, labels, annotations, num_samples, seed)
    budget = Budget(max_drop=max_drop, min_agreement=min_agreement)
    offer = contextlib.nullcontext() if emulate or on is not None else emulation_offered(artifact, target)
    source = to_source(None, options)
    with console, offer, opened(target=target, source=source, emulated=emulate, trust=trust) as find:
        if on is not None:
            outcomes = _verify_on(console, on, artifact, find(against)[0], choice, target, trust, skip_bad, budget)
        else:
            found = verify_subjects(
                find(artifact)[0],
                find(against)[0],
                choice,
                skip_bad=skip_bad,
                budget=budget,
                progress=console.progress,
                note=console.note,
            )
    noun = "sequence" if data.suffix == ".npz" else "image"
    if on is not None:
        finish_devices(
            console,
            outcomes,
            lambda judged: judged.document(),
            lambda judged: _lines(judged, noun),
            lambda judged: _unmet(judged.gate),
        )
        return
    console.finish(found.document(), _lines(found, noun), None)
    error = _unmet(found.gate)
    if error is not None:
        raise error


def _check_early(artifact: str, against: str, data: Path, annotations: Path | None, target: str | None) -> None:
    """What is wrong with names and paths, before anything heavy is imported."""
    from vitdeploy.pipeline.early import check_artifact, check_data, check_engine, require_annotations

    if target is not None:
        check_engine(target)
    for text in (artifact, against):
        check_artifact(text)
    check_data(data)
    require_annotations(annotations)


def _verify_on(
    console: Console,
    on: str,
    artifact: str,
    theirs: Subject,
    choice: DataChoice,
    target: str | None,
    trust: Path | None,
    skip_bad: bool,
    budget: Budget,
) -> list[Outcome[Verification]]:
    """What is found of each device."""
    import tempfile

    from vitdeploy.devices.registry import find_devices
    from vitdeploy.pipeline.device_artifact import find_device_artifacts
    from vitdeploy.pipeline.on_devices import verify_on

    devices = find_devices(on)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
        device_artifact = find_device_artifacts(artifact, target=target, work=Path(work), trust=trust)[0]
        return verify_on(
            device_artifact,
            theirs,
            choice,
            devices,
            skip_bad=skip_bad,
            budget=budget,
            progress=console.progress,
            note=console.note,
        )


def _lines(found: Verification, noun: str) -> list[str]:
    from vitdeploy.document.engine import VerifiedClassification, VerifiedFeatures

    verified, gate = found.verified, found.gate
    lines = [f"{found.artifact} against {found.against} on {verified.n} {noun}s"]
    if verified.metric is not None:
        lines.append(
            f"{verified.metric + ' ':<12}{verified.value:.2f} %, original {verified.reference_value:.2f} %, "
            f"drop {interval(verified.drop or 0.0, verified.drop_ci95)} points"
        )
    if isinstance(verified, VerifiedClassification) and verified.top5 is not None:
        lines.append(f"top-5       {verified.top5:.2f} %, original {verified.reference_top5:.2f} %")
    agreement = interval(verified.agreement, verified.agreement_ci95)
    lines.append(f"agreement   {agreement} % ({verified.agreement_of})")
    distance = [f"KL {verified.kl:.2e} nats"] if isinstance(verified, VerifiedClassification) else []
    if isinstance(verified, VerifiedClassification | VerifiedFeatures):
        distance.append(f"cosine {verified.cosine_mean:.6f} (least {verified.cosine_min:.6f})")
    lines += [
        f"distance    {'; '.join([*distance, 'largest difference ' + format(verified.max_difference, '.1e')])}",
        f"diagnosis   {verified.diagnosis}",
    ]
    lines += found.remarks
    lines += [f"warning: {text}" for text in found.warnings]
    if gate.status != "none":
        lines.append(f"gate        {gate.status}" + "".join(f"; {reason}" for reason in gate.reasons))
    return lines


def _unmet(gate: Gate) -> GateError | None:
    from vitdeploy.errors import GateError

    if gate.status not in ("fail", "undecided"):
        return None
    return GateError(
        "the gate is not met" if gate.status == "fail" else "the gate is not provably met",
        found="; ".join(gate.reasons),
        fix="evaluate on more images, or raise the budget",
    )
