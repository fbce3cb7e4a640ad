"""What a node of the tests measures with."""

from __future__ import annotations

from pathlib import Path

from tests.command_line import command_line, undisturbed
from vitdeploy.workflows.sweep import Entry, _MeasuredThere, measure_there


def measured_shortly(entry: Entry) -> _MeasuredThere:
    """`measure_there` with the short bench of tests."""
    with undisturbed(Path.cwd()), command_line(Path.cwd(), entry.store, short_bench=True):
        return measure_there(entry)
