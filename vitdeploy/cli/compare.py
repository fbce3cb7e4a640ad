"""`vitdeploy compare A B`: what B has lost or gained against A, as a gate for CI."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.api.options import Compare, Labelled, Recorded
from vitdeploy.cli.options import Console, call, command_of, recording, with_images
from vitdeploy.errors import GateError
from vitdeploy.paths import is_dir


@command_of(Compare, ("data", "target"), (Labelled, "target"), ("folder", "trust"), Recorded, waits=True)
def command(console: Console, options: Compare, labelled: Labelled, recorded: Recorded) -> None:
    """Compare two bundles, or two reports: a gate against lost answers and slower engines.

    Bundles run here: engines of one target and precision answer the images of --data, and are measured in turns.
    Reports (report.json) are compared by their numbers; that is weaker, since they were not measured in turns. Exit
    code 5 when a limit is not kept, or not provably kept.
    """
    if options.junit is not None and not is_dir(Path(options.junit).parent):
        raise click.BadParameter(f"no folder {Path(options.junit).parent}", param_hint="--junit")
    if options.data is not None:
        options = with_images(options, labelled)
    elif labelled != Labelled():
        raise click.UsageError("--labels and --annotations need --data.")
    with recording(console, recorded) as record:
        found = call("compare", options)
        console.finish(found.document, found.lines(), options.folder)
        record(found)
    if found.status in ("fail", "undecided"):
        raise GateError(
            "the gate is not met" if found.status == "fail" else "the gate is not provably met",
            found="; ".join(found.reasons),
            fix="evaluate on more images, measure for longer (--duration), or raise the limit",
        )
