"""`vitdeploy verify A --against B --data DIR`: does A still give B's answers?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.complete import complete_models, complete_targets
from vitdeploy.cli.options import (
    Console,
    Number,
    accept_option,
    expect_option,
    label_options,
    on_option,
    output_options,
    source_options,
    text_options,
    to_source,
    trust_option,
)
from vitdeploy.extensions import wing

if TYPE_CHECKING:
    from vitdeploy.api.verify import Verification
    from vitdeploy.errors import GateError


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
@text_options
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
@click.option(
    "--executor",
    metavar="processes|ray[:HOST:PORT]",
    help="Where images are evaluated, in shards: by processes of this machine, or on a Ray cluster.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="How many shards at a time, by processes without --executor. Default: one for each core or CPU.",
)
@accept_option
@on_option
@expect_option
@trust_option
@output_options
def command(
    console: Console,
    artifact: str,
    against: str,
    data: Path,
    labels: str | None,
    annotations: Path | None,
    texts: Path | None,
    template: str | None,
    target: str | None,
    num_samples: int | None,
    seed: int,
    max_drop: float | None,
    min_agreement: float | None,
    bisect: bool,
    emulate: bool,
    skip_bad: bool,
    executor: str | None,
    jobs: int | None,
    accept_known_bad: tuple[str, ...],
    on: str | None,
    expect_digest: str | None,
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

    Many images are evaluated in shards, which are stored: the same command goes on where it was. With --executor they
    are shared out to processes, or to the nodes of a Ray cluster; the numbers are the same. That is for
    classification, detection, instance segmentation, segmentation and depth; other tasks are evaluated at once.

    With --on each device builds and runs the artifact's engine, and the original runs here.
    """
    if (executor is not None or jobs is not None) and (bisect or on is not None):
        raise click.UsageError("--executor and --jobs share out an evaluation: leave --bisect and --on out.")
    if on is not None and (bisect or emulate):
        raise click.UsageError("--on runs a whole engine: leave --bisect and --emulate out.")
    from vitdeploy.api.bundle import Named
    from vitdeploy.api.images import images
    from vitdeploy.api.values import require_pinned
    from vitdeploy.api.verify import Verification, verify
    from vitdeploy.api.verify import bisect as find_cause

    require_pinned(expect_digest, [artifact])
    original = Named(against, to_source(None, options))
    chosen = images(data, labels, annotations=annotations, texts=texts, template=template)
    common: dict[str, Any] = {
        "target": target,
        "num_samples": num_samples,
        "seed": seed,
        "skip_bad": skip_bad,
        "progress": console,
    }
    if bisect:
        if max_drop is not None or min_agreement is not None or labels is not None or annotations is not None:
            raise click.UsageError("--bisect judges nothing: leave --max-drop, --min-agreement and labels out.")
        if trust is not None:
            raise click.UsageError("--bisect compiles the parts that it runs: leave --trust out.")
        if accept_known_bad:
            raise click.UsageError("--bisect compiles the parts that it runs: leave --accept-known-bad out.")
        told = find_cause(artifact, original, chosen, **common)
        console.finish(told.document, told.text, None, told.fix)
        return
    bounds: dict[str, Any] = {
        "max_drop": max_drop,
        "min_agreement": min_agreement,
        "trust": trust,
        "accept_known_bad": accept_known_bad,
    }
    if on is not None:
        wing("devices.command").finish_devices(
            console,
            wing("devices.api").verify_on(on, artifact, original, chosen, **bounds, **common),
            Verification.document,
            Verification.lines,
            _unmet,
        )
        return
    found = verify(artifact, original, chosen, emulate=emulate, executor=executor, jobs=jobs or 0, **bounds, **common)
    console.finish(found.document(), found.lines(), None)
    error = _unmet(found)
    if error is not None:
        raise error


def _unmet(found: Verification) -> GateError | None:
    from vitdeploy.cli.options import NOTHING_SHOWN
    from vitdeploy.errors import GateError
    from vitdeploy.verification.gate import proves_nothing

    if found.status not in ("fail", "undecided"):
        return None
    return GateError(
        "the gate is not met" if found.status == "fail" else "the gate is not provably met",
        found="; ".join(found.reasons),
        fix=f"{NOTHING_SHOWN if proves_nothing(found.found.gate) else 'evaluate on more images'}, or raise the budget",
    )
