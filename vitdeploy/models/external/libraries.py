"""Import other people's code, and report its errors in one line."""

from __future__ import annotations

import importlib
import traceback
from pathlib import Path
from types import ModuleType

import vitdeploy
from vitdeploy.errors import CapabilityError, MissingPackageError


def library(name: str, why: str) -> ModuleType:
    """The imported package of that name; an error says what needs it, `why`.

    Raises:
        MissingPackageError, CapabilityError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name or name, name, why) from None
    except Exception as error:
        raise cannot_import(name, why, error) from None


def cannot_import(name: str, why: str, error: BaseException) -> CapabilityError:
    """The error by its root: transformers wraps what went wrong in a sentence of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return CapabilityError(
        f"{why} needs the package {name}, which is installed here but cannot be imported",
        found=f"{type(error).__name__}: {last_line(error)}",
        fix=f"install builds of torch, torchvision and {name} that belong together",
    )


def where(error: BaseException) -> str:
    """The error, with the last line of the user's own code that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "-packages" not in f.filename]
    ours = str(Path(vitdeploy.__file__).parent)
    frames = [f for f in frames if not f.filename.startswith((ours, "<"))]
    frames = [f for f in frames if f.filename != importlib.__file__]
    line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {last_line(error)}{line}"


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
