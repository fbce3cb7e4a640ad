"""Each promise of SECURITY.md names the tests that hold it."""

import re
from pathlib import Path

import vitdeploy

ROOT = Path(vitdeploy.__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_every_promise_has_a_test_and_every_test_is_there():
    promises = TEXT.partition("## Promises")[2].partition("## Limits")[0]
    rows = [line for line in promises.splitlines() if line.startswith("| ")][1:]  # below the names of the columns
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(rows) > 15 and all("::" in row for row in rows)
    lacking = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not lacking
