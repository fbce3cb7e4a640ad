"""`vitdeploy history DIR`: all recorded results as series, and where they changed."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import Console, command_line, output_options, report_option


@click.command("history")
@click.argument("where", metavar="DIR-or-URI")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a page (HTML) to this file."
)
@report_option
@output_options
def command(console: Console, where: str, output: Path | None, trackers: tuple[str, ...]) -> None:
    """Show the series of a history: an artifact on a machine each, with the last latency and every change.

    Results get into a history by --history of run, bench, compare and sweep. A change is told with what is another one
    on both sides: the runtime, the driver, vitdeploy, the model. Results that are not decided are shown and no part of
    the search. Files that are none of a history are named and left out. The exit code is 0 whatever has changed.
    """
    from vitdeploy.history.api import read_history, report_to

    found = read_history(where, output, progress=console)
    sent = report_to(trackers, where, progress=console).lines() if trackers else []
    console.finish(found.document, [*found.lines(), *sent], output, f"open {command_line(output)}" if output else "")
