"""`vitdeploy history DIR`: show recorded results as series with their changes."""

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
    folder: Path | None = option(None, OUTPUT, help="Write an HTML page to this file.", kind="file", required=False)
    trackers: Sequence[str] = option((), TRACKERS)


@command_of(HistoryOptions, name="history")
def command(console: Console, options: HistoryOptions) -> None:
    """Show the series of a history (one artifact on one machine each) with the last latency and every change.

    run, bench, compare and sweep add results with --history. Each change lists what differs before and after: the
    runtime, the driver, vitdeploy, the model. Undecided results are shown, but left out of change detection. Files that
    do not belong to the history are listed and skipped. The exit code is 0 also if there are changes.

    \b
    Example:
      vitdeploy history results
    """
    wing("history.row").open_place(options.where).names()  # an error about it comes before slow imports
    module, page = wing("history.api"), options.folder
    history = module.read_history(options.where, page, progress=console)
    lines = history.lines()
    if options.trackers:
        lines += module.report_to(options.trackers, options.where, progress=console).lines()
    console.finish(history.document, lines, page, f"open {command_line(page)}" if page else "")
