"""The gate's own judgement: what fails, and what its table says."""

from tests.faults.gate import Row, load, save, table


def row(*outcomes, wanted=2, missing=""):
    made = Row("files", wanted, missing=missing)
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
    assert lines[2] == "| files | 3 | 1 | 1 | 0 | 1 | 0 | 2.0 | 20 | 0 |"
    assert lines[3].startswith("| files | 1 of 2 |")
    assert lines[5:] == ["files: HANG  case 2  seed 7", "files: 1 cases, and 2 are wanted", "files: no tmpfs here"]
