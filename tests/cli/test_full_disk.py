"""What a command prints goes to a disk too, which may be full."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from vitdeploy.cli import watched
from vitdeploy.errors import WorkerError

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
def test_a_full_disk_under_the_output_is_exit_code_4(both):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vitdeploy.cli.main", "export", "list"],
            stdout=full,
            stderr=full if both else subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    if not both:
        assert "VD4101  no space left to write a file or what this command prints\n" in done.stderr
        assert "Traceback" not in done.stderr


def test_the_process_that_watches_says_it_by_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vitdeploy", "inspect", "--json"])
    with io.TextIOWrapper(FULL.open("wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        assert watched._tell(WorkerError("the command was ended")) == 4
