"""Progress where there is no terminal: a line a quarter of the way."""

import pytest

from vitdeploy.cli.console import Console


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_is_told_at_each_quarter_and_where_the_way_becomes_longer(quiet, capsys):
    with Console(False, 0, quiet) as console:
        console.progress("load", 0, 1)
        for done in range(9):
            console.progress("bench", done, 8)
        for done in range(8, 17):
            console.progress("bench", done, 16)
    told = capsys.readouterr()
    counts = ["0/8", "2/8", "4/8", "6/8", "8/8", "8/16", "12/16", "16/16"]
    assert told.err.splitlines() == ([] if quiet else ["load", *(f"bench  {count}" for count in counts)])
    assert told.out == ""
