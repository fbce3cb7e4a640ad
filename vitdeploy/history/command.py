"""`vitdeploy history DIR`: all recorded results as series, and where they changed."""

# Annotations of options are evaluated: no future import.

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.api.option import Options, option, required
from vitdeploy.api.options import (
    OUTPUT,
    TRACKERS,
)
from vitdeploy.cli.options import Console, command_line, command_of
from vitdeploy.extensions import wing


@dataclass(frozen=True)
class HistoryOptions(Options):
    where: str = field(metadata=required(place="one", metavar="DIR-or-URI"))
    folder: Path | None = option(None, OUTPUT, help="Write a page (HTML) to this file.", kind="file", required=False)
    trackers: Sequence[str] = option((), TRACKERS)


@command_of(HistoryOptions, name="history")
def command(console: Console, options: HistoryOptions) -> None:
    """Show the series of a history: an artifact on a machine each, with the last latency and every change.

    Results get into a history by --history of run, bench, compare and sweep. A change is told with what is another one
    on both sides: the runtime, the driver, vitdeploy, the model. Results that are not decided are shown and no part of
    the search. Files that are none of a history are named and left out. The exit code is 0 whatever has changed.

    \b
    Example:
      vitdeploy history results
    """
    module, page = wing("history.api"), options.folder
    found = module.read_history(options.where, page, progress=console)
    lines = found.lines()
    if options.trackers:
        lines += module.report_to(options.trackers, options.where, progress=console).lines()
    console.finish(found.document, lines, page, f"open {command_line(page)}" if page else "")
