"""Import other people's libraries, and report what goes wrong in one line."""

from __future__ import annotations

import importlib
from types import ModuleType

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


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
