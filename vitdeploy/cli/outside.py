"""The command imports nothing from the folder that the user is in: a folder `onnx` there is no package of that name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import vitdeploy

SAFE_PATH = "PYTHONSAFEPATH"  # read by Python 3.11 and newer


@contextlib.contextmanager
def outside_working_folder() -> Iterator[None]:
    """This process, and the Python processes that it starts, import nothing from the folder that the user is in.

    The `vitdeploy` command has that folder on no path; `python -m vitdeploy.cli.main` begins with it.
    """
    path, safe = list(sys.path), os.environ.get(SAFE_PATH)
    try:
        here = os.path.realpath(Path.cwd())
    except OSError:  # it was removed
        here = ""
    named = {os.path.realpath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    home = str(Path(vitdeploy.__file__).resolve().parents[1])
    kept = [each for each in path if each and (os.path.realpath(each) != here or here in named)]
    sys.path[:] = kept if home in map(os.path.realpath, kept) else [*kept, home]
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        sys.path[:] = path
        if safe is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = safe
