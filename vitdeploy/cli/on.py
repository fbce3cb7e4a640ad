"""`--on DEVICE[,DEVICE]` of bench, verify and compile: the option, and what is printed of many devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.api.tables import Line
from vitdeploy.cli.complete import complete_devices
from vitdeploy.cli.console import Console

if TYPE_CHECKING:
    from vitdeploy.errors import VitdeployError
    from vitdeploy.workflows.on_devices import Outcome

on_option = click.option(
    "--on",
    shell_complete=complete_devices,
    metavar="DEVICE[,DEVICE]",
    help="Run there: names or labels of `vitdeploy devices list`, or local.",
)


def finish_devices(
    console: Console,
    outcomes: Sequence[Outcome[Any]],
    document_of: Callable[[Any], dict[str, Any]],
    lines_of: Callable[[Any], Sequence[Line]],
    unmet: Callable[[Any], VitdeployError | None] = lambda found: None,
    together: tuple[dict[str, Any], Sequence[Line]] = ({}, ()),
) -> None:
    """Print what came of each device, its errors too, and leave with the worst of these, if there is one; `unmet` says
    of what was found whether a gate is not met. `together`: what is said of all of them."""
    from vitdeploy.workflows.on_devices import worst

    documents: list[dict[str, Any]] = []
    lines: list[Line] = []
    for outcome in outcomes:
        name = outcome.device.name
        if outcome.error is not None:
            documents.append({"device": name, "error": outcome.error.to_dict()})
            continue
        documents.append({"device": name, **document_of(outcome.found)})
        lines += [f"on {name}:" if len(outcomes) > 1 else "", *lines_of(outcome.found)]
    lines += together[1]
    console.finish({"devices": documents, **together[0]}, [line for line in lines if line], None)
    told = (each.error or unmet(each.found) for each in outcomes)
    errors = [error for error in told if error is not None]
    for error in errors:
        click.echo(str(error), err=True)
    if errors:
        click.get_current_context().exit(worst(errors).exit_code)
