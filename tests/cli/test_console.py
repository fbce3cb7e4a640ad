"""What is told while the work goes on: a line a phase, and on a terminal one that lives."""

import pytest

from vitdeploy.cli.console import Console


@pytest.mark.parametrize("quiet", [False, True])
def test_without_a_terminal_a_phase_is_one_line(quiet, capsys):
    with Console(False, 0, quiet) as console:
        console.progress("load", 0, 1)
        for done in range(9):
            console.progress("bench", done, 8)
        for done in range(8, 17):
            console.progress("bench", done, 16)
    told = capsys.readouterr()
    assert told.err.splitlines() == ([] if quiet else ["load", "bench"])
    assert told.out == ""
