"""The gate's own judgement: what fails, what is skipped, what its table says, and what a row's end says of it."""

import json
import subprocess
import sys

import pytest

import tests.scale.__main__ as gate_command
from tests.conftest import IN_SCALE
from tests.scale.__main__ import ROOT, ROWS, run_row
from tests.scale.row import Missing, Row, load, save, table


def row(**facts):
    return Row("promised", date="2026-01-02", machine="2 cores", seconds=7, **facts)


def test_what_passes():
    assert row(right=["a"]).passed and row(skipped="no sshd").passed
    assert not row().passed
    assert not row(right=["a"], wrong=["b"]).passed and not row(skipped="no sshd", wrong=["b"]).passed


def test_a_check_is_noted_with_what_was_found():
    made = row()
    assert made.check(True, "equal", "3 more") and not made.check(False, "found", "3 more")
    assert (made.right, made.wrong) == (["equal"], ["found: 3 more"])


@pytest.mark.parametrize(
    ("found", "expected", "wrong"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 2, "b": 1}, ["same: a, b differs"]),
        ({"a": 1, "b": 2}, {"a": 1}, ["same: b differs"]),
        ({}, {}, ["same: nothing differs"]),
    ],
)
def test_tables_are_the_same_in_all_that_they_have(found, expected, wrong):
    made = row()
    assert made.same(found, expected, "same") == (not wrong)
    assert made.wrong == wrong


def test_the_table(tmp_path):
    rows = [row(right=["a"], seen={"memory": "7 MB", "rate": "3"}), row(skipped="no sshd"), row(wrong=["b"]), row()]
    save(rows, tmp_path / "x" / "scale.json")
    assert load(tmp_path / "x" / "scale.json") == rows
    assert table(rows).splitlines() == [
        "| promise |  | seen | took, s |",
        "|---|---|---|---|",
        "| promised | right | memory 7 MB; rate 3 | 7 |",
        "| promised | skipped |  | 7 |",
        "| promised | WRONG |  | 7 |",
        "| promised | WRONG |  | 7 |",
        "",
        "on 2 cores, 2026-01-02",
        "skipped: promised: no sshd",
        "WRONG: promised: b",
        "WRONG: promised: nothing was checked",
    ]


def lacking(full, work, made):
    raise Missing("install it")


def crashing(full, work, made):
    raise ZeroDivisionError("nobody expected that")


def test_what_a_row_lacks_is_why_it_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, "here", ("promised", "tests.scale.test_row:lacking"))
    assert gate_command._one("here", False, tmp_path) == 0
    assert load(tmp_path / "here.json")[0].skipped == "install it"


@pytest.mark.parametrize(("seconds", "said"), [(60.0, "exit status"), (0.0, "no end")])
def test_a_row_that_ends_without_its_result_is_wrong(tmp_path, monkeypatch, seconds, said):
    monkeypatch.setitem(ROWS, "absent", ("promised", "nowhere:run"))  # here, and not in the row's own process
    monkeypatch.setattr(gate_command, "limit_seconds", lambda full: seconds)
    found = run_row("absent", False, tmp_path)
    assert not found.passed and found.wrong[0].startswith(said) and "absent.log" in found.wrong[0]


def test_an_error_of_a_row_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setitem(ROWS, "here", ("promised", "tests.scale.test_row:crashing"))
    with pytest.raises(ZeroDivisionError):
        gate_command._one("here", False, tmp_path)
    assert not (tmp_path / "here.json").exists()


@IN_SCALE
def test_one_row_as_a_command(tmp_path):
    pytest.importorskip("ruptures", reason="pip install 'vitdeploy[data]'")
    words = [sys.executable, "-m", "tests.scale", "--only", "history", "-o", tmp_path]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + (tmp_path / "history.log").read_text()
    assert "scale: all right" in done.stdout and "| right | planted at 201 of 300, found at 201" in done.stdout
    (found,) = json.loads((tmp_path / "scale.json").read_text())
    assert found["wrong"] == [] and len(found["right"]) == 4
