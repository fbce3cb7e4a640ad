"""`vitdeploy compare A B`: what B has lost or gained against A, as a gate for CI."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import (
    Console,
    Number,
    label_options,
    memory_options,
    output_options,
    recorded,
    trust_option,
    wait_option,
)
from vitdeploy.paths import is_dir


@click.command("compare")
@click.argument("baseline", type=click.Path(path_type=Path))
@click.argument("candidate", type=click.Path(path_type=Path))
@click.option("--max-drop", type=Number(min=0), help="Gate: points of accuracy that may be lost.")
@click.option("--max-slowdown", type=Number(min=0), help="Gate: percent by which latency and time per image may grow.")
@click.option("--data", type=click.Path(path_type=Path), help="Images, best with labels, that both bundles answer.")
@label_options
@click.option("--target", shell_complete=complete_targets, help="Compare the engines of this target only.")
@click.option(
    "--duration",
    type=Number(min=0, min_open=True, max=3600),
    default=10.0,
    show_default=True,
    help="Seconds an engine and scenario of the bench.",
)
@click.option("--no-bench", "bench", is_flag=True, default=True, flag_value=False, help="Compare answers alone.")
@click.option("--skip-bad", is_flag=True, help="Go on without unreadable images, and count them.")
@click.option(
    "--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write the checks as JUnit's XML to this file."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write compare.json and compare.html here.")
@trust_option
@memory_options
@wait_option
@output_options
def command(
    console: Console,
    baseline: Path,
    candidate: Path,
    max_drop: float | None,
    max_slowdown: float | None,
    data: Path | None,
    labels: str | None,
    annotations: Path | None,
    target: str | None,
    duration: float,
    bench: bool,
    skip_bad: bool,
    junit: Path | None,
    output: Path | None,
    trust: Path | None,
    history: str | None,
    trackers: tuple[str, ...],
) -> None:
    """Compare two bundles, or two reports: a gate against lost answers and slower engines.

    Bundles run here: engines of one target and precision answer the images of --data, and are measured in turns.
    Reports (report.json) are compared by their numbers; that is weaker, since they were not measured in turns. Exit
    code 5 when a limit is not kept, or not provably kept.
    """
    from vitdeploy.api.compare import compare
    from vitdeploy.api.images import images
    from vitdeploy.errors import GateError

    if junit is not None and not is_dir(junit.parent):
        raise click.BadParameter(f"no folder {junit.parent}", param_hint="--junit")
    if not bench and max_slowdown is not None:
        raise click.UsageError("--max-slowdown needs the bench that --no-bench leaves out.")
    if data is None and (labels is not None or annotations is not None):
        raise click.UsageError("--labels and --annotations need --data.")
    with recorded(history, trackers, progress=console) as record:
        found = compare(
            baseline,
            candidate,
            images(data, labels, annotations=annotations) if data is not None else None,
            output,
            max_drop=max_drop,
            max_slowdown=max_slowdown,
            target=target,
            duration=duration,
            bench=bench,
            junit=junit,
            skip_bad=skip_bad,
            trust=trust,
            progress=console,
        )
        console.finish(found.document, found.lines(), output)
        record(found)
    if found.status in ("fail", "undecided"):
        raise GateError(
            "the gate is not met" if found.status == "fail" else "the gate is not provably met",
            found="; ".join(found.reasons),
            fix="evaluate on more images, measure for longer (--duration), or raise the limit",
        )
