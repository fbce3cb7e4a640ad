"""`vitdeploy verify A --against B --data DIR`: does A still give B's answers?"""

# Annotations of options are evaluated: no future import.

import dataclasses
from dataclasses import dataclass
from typing import Any

import click

from vitdeploy.api.options import Bisect, Described, Options, SourceOptions, There, Verify, VerifyOn, option
from vitdeploy.cli.options import NOTHING_SHOWN, Console, api, call, command_of, to_source, with_images
from vitdeploy.errors import GateError
from vitdeploy.extensions import wing


@dataclass(frozen=True)
class Instead(Options):
    bisect: bool = option(False, "Find where the error enters instead, and what fixes it.")


@command_of(
    Verify,
    *((SourceOptions, "data"), (Described, "target"), (Instead, "skip_bad"), (There, "trust")),
    *(("emulate", "skip_bad"), ("executor", "accept_known_bad"), ("jobs", "accept_known_bad")),
)
def command(
    console: Console, options: Verify, source: SourceOptions, described: Described, instead: Instead, there: There
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
    if (options.executor is not None or options.jobs) and (instead.bisect or there.on is not None):
        raise click.UsageError("--executor and --jobs share out an evaluation: leave --bisect and --on out.")
    if there.on is not None and (instead.bisect or options.emulate):
        raise click.UsageError("--on runs a whole engine: leave --bisect and --emulate out.")
    api("values").require_pinned(there.expect_digest, [options.artifact])
    original = api("artifacts").Named(options.against, to_source(None, source))
    options = dataclasses.replace(with_images(options, described), against=original)
    if instead.bisect:
        bounds = options.max_drop, options.min_agreement, described.labels, described.annotations
        if any(bound is not None for bound in bounds):
            raise click.UsageError("--bisect judges nothing: leave --max-drop, --min-agreement and labels out.")
        for flag, value in (("--trust", options.trust), ("--accept-known-bad", options.accept_known_bad)):
            if value:
                raise click.UsageError(f"--bisect compiles the parts that it runs: leave {flag} out.")
        cause = call("bisect", options.passed_on(Bisect))
        console.finish(cause.document, cause.text, None, cause.fix)
    elif there.on is not None:
        outcomes = call("verify_on", options.passed_on(VerifyOn), there.on)
        kind = api("verify").Verification
        wing("devices.command").finish_devices(console, outcomes, kind.document, kind.lines, _unmet)
    else:
        found = call("verify", options)
        console.finish(found.document(), found.lines(), None)
        error = _unmet(found)
        if error is not None:
            raise error


def _unmet(found: Any) -> GateError | None:
    from vitdeploy.verification.gate import proves_nothing

    if found.status not in ("fail", "undecided"):
        return None
    return GateError(
        "the gate is not met" if found.status == "fail" else "the gate is not provably met",
        found="; ".join(found.reasons),
        fix=f"{NOTHING_SHOWN if proves_nothing(found.found.gate) else 'evaluate on more images'}, or raise the budget",
    )
