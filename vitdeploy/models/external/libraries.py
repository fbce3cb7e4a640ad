"""Where other people's code went wrong, in one line."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path

import vitdeploy
from vitdeploy.models.source import last_line


def where(error: BaseException) -> str:
    """The error, with the last line of the user's own code that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "-packages" not in f.filename]
    ours = str(Path(vitdeploy.__file__).parent)
    frames = [f for f in frames if not f.filename.startswith((ours, "<"))]
    frames = [f for f in frames if f.filename != importlib.__file__]
    line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {last_line(error)}{line}"
