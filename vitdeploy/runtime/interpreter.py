"""Starts a process that runs a module of ours, and imports nothing from the current folder.

`python -m` looks for every module, those of Python itself too, in the current folder first. That may be a bundle or a
data set of somebody else's, and a `json.py` in it is code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vitdeploy

HOME = str(Path(vitdeploy.__file__).resolve().parents[1])

# Also what an empty entry of PYTHONPATH became: the current folder by its name. An entry that names it is meant so.
_OUTSIDE = f"""import os, sys
try:
    here = os.path.realpath(os.getcwd())
except OSError:
    here = None
named = [os.path.realpath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
sys.path[:] = [entry for entry in sys.path if entry and (os.path.realpath(entry) != here or here in named)]
sys.path.append({HOME!r})
import runpy
"""


def module_argv(module: str) -> tuple[str, ...]:
    """The arguments of a process that runs a module of vitdeploy as `python -m` does, but without the current folder on
    its path (Python 3.11 has -P for that); vitdeploy itself is the one that is running."""
    return sys.executable, "-c", f"{_OUTSIDE}runpy.run_module({module!r}, None, '__main__', True)"
