"""Commands of the documents as a reader's shell runs them: `python` and `vitdeploy` are this process's own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.command_line import ROOT

PROGRAMS = {"python": "", "vitdeploy": " -c 'from vitdeploy.cli.main import main; main()'"}


def reader_environment(folder: Path) -> dict[str, str]:
    """The environment of such a shell; `folder` is new and gets the two programs."""
    folder.mkdir()
    for name, arguments in PROGRAMS.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}"{arguments} "$@"\n', encoding="utf-8")
        program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
