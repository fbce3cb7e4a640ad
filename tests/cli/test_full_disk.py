"""What a command prints goes to a disk too, which may be full."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitdeploy.cli import watched
from vitdeploy.errors import WorkerError

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@pytest.fixture(params=["", "1"], ids=["buffered", "unbuffered"])
def environment(request):
    return {**os.environ, "PYTHONUNBUFFERED": request.param}


# One prints more than is buffered and loads PyTorch before, the other prints a line.
LONG, SHORT = ("export", "list"), ("devices", "list")


@pytest.mark.parametrize(("verb", "both"), [(LONG, False), (SHORT, False), (SHORT, True)], ids=str)
def test_a_full_disk_under_the_output_is_exit_code_4(verb, both, environment):
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vitdeploy.cli.main", *verb],
            stdout=full,
            stderr=full if both else subprocess.PIPE,
            env=environment,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    if not both:
        assert "VD4101  no space left to write a file or the output of this command\n" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_ends_a_command_without_an_error(environment):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "vitdeploy.cli.main", *SHORT]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    os.close(write)
    assert done.returncode == 1 and b"VD" not in done.stderr and b"Broken pipe" not in done.stderr


def test_the_process_that_watches_says_it_by_its_exit_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vitdeploy", "inspect", "--json"])
    with io.TextIOWrapper(FULL.open("wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        assert watched._tell(WorkerError("the command was ended")) == 4
