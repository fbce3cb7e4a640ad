"""The gate's own judgement: what fails, what its table says, and how its pieces come together."""

import json
import subprocess
import sys

import pytest

import tests.faults.__main__ as gate_command
from tests.faults.__main__ import (
    FIGURES,
    ROOT,
    Figure,
    cases_in,
    collected,
    in_order,
    limit_seconds,
    rows_file,
    run_figure,
)
from tests.faults.gate import Row, load, save, table


def row(*outcomes, expected=2, missing="", **facts):
    made = Row("files", expected, missing=missing, date="2026-01-02", **{"machine": "2 cores", **facts})
    for number, outcome in enumerate(outcomes):
        made.add(f"case {number}", outcome, seconds=number, peak_mb=10 * number, note="seed 7")
    return made


def test_what_fails():
    assert row("clean", "accepted").passed
    assert not row("clean").passed
    assert row("clean", missing="no tmpfs here").passed
    assert not any(row("clean", "clean", bad, missing="only in part").passed for bad in ("crash", "hang", "wrong"))


def test_the_table_names_what_is_bad_and_what_is_missing(tmp_path):
    rows = [row("clean", "accepted", "hang"), row("clean"), row(missing="no tmpfs here")]
    save(rows, tmp_path / "x" / "faults.json")
    assert load(tmp_path / "x" / "faults.json") == rows
    lines = table(rows).splitlines()
    assert lines[2] == "| files | 3 | 1 | 1 | 0 | 1 | 0 | 2.0 | 20 | 0 | 2026-01-02 |"
    assert lines[3].startswith("| files | 1 of 2 |")
    assert lines[5:7] == ["", "on 2 cores: all"]
    assert lines[7:] == ["files: HANG  case 2  seed 7", "files: 1 cases, and 2 are expected", "files: no tmpfs here"]


def test_the_table_says_what_was_run_on_which_machine():
    lines = table([row(), row(machine="64 cores"), row()]).splitlines()
    assert lines[5:8] == ["", "on 2 cores: files; files", "on 64 cores: files"]


def test_a_row_knows_its_day_and_its_machine():
    made = Row("files", 0)
    assert made.date.startswith("20") and "cores of " in made.machine


def test_the_longest_come_first_in_the_full_form_and_each_once():
    assert in_order(["server", "kills", "server"], full=False) == ["server", "kills"]
    assert in_order(["server", "kills", "server"], full=True) == ["kills", "server"]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_more_time_than_it_takes_and_than_is_asked_for(monkeypatch, name):
    assert limit_seconds(name, full=False) > 300
    assert limit_seconds(name, full=True) > 2 * 60 * FIGURES[name].minutes
    before = limit_seconds(name, full=True)
    monkeypatch.setenv("VITDEPLOY_FAULT_SECONDS", "36000")
    assert limit_seconds(name, full=True) == before + 36000


def test_one_figure_is_run_and_the_others_stay_as_they_were(tmp_path):
    for name, full in (("kills", False), ("one-key", False), ("server", True)):
        save([row("clean", "clean")], rows_file(tmp_path, name, full))
    words = [sys.executable, "-m", "tests.faults", "--only", "one-key", "-o", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "one-key: ended after" in done.stderr
    rows = load(tmp_path / "faults.json")
    assert rows[0] == row("clean", "clean") and rows[0].date != rows[1].date
    assert [each.figure for each in rows[1:]] == [each.figure for each in load(rows_file(tmp_path, "one-key", False))]
    assert sum(len(each.cases) for each in rows[1:]) == cases_in(tmp_path / "one-key.log") == 46
    assert "not run in this form: malformed, devices, full-disk" in done.stdout
    assert collected(tmp_path, full=True)[0] == [row("clean", "clean")]
    assert json.loads((tmp_path / "full" / "server.json").read_text())[0]["date"] == "2026-01-02"


@pytest.mark.parametrize(("seconds", "outcome"), [(60.0, "crash"), (0.0, "hang")])
def test_a_figure_that_ends_without_its_rows_has_one_that_fails(tmp_path, monkeypatch, seconds, outcome):
    monkeypatch.setitem(FIGURES, "absent", Figure("nowhere:run", 1))  # here, and not in the figure's own process
    monkeypatch.setattr(gate_command, "limit_seconds", lambda name, full: seconds)
    run_figure("absent", False, tmp_path)
    (made,) = load(rows_file(tmp_path, "absent", False))
    assert [case.outcome for case in made.cases] == [outcome] and not made.passed
    assert "absent.log" in made.cases[0].note
