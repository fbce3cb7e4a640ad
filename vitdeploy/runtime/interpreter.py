"""How a process of our own is started: a module of ours, and nothing of the current folder.

`python -m` looks for every module, those of Python itself too, in the current folder first. That may be a bundle or a
data set of somebody else's, and a `json.py` in it is code.
"""

from __future__ import annotations

import sys
from pathlib import Path

import vitdeploy

HOME = str(Path(vitdeploy.__file__).resolve().parents[1])


def module_argv(module: str) -> tuple[str, ...]:
    """The arguments of a process that runs a module of vitdeploy as `python -m` does, but without the current folder on
    its path (Python 3.11 has -P for that); vitdeploy itself is the one that is running."""
    path = f"import sys; sys.path[:] = [*filter(None, sys.path), {HOME!r}]"
    return sys.executable, "-c", f"{path}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
