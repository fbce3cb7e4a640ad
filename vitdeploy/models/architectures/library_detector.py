"""A detector of transformers, built from what its config.json would say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitdeploy.errors import CapabilityError
from vitdeploy.models.source import cannot_import, last_line, library

_NEEDED = "5.23"  # whose names of tensors the tables of keys have


def detector_of(name: str, settings: Mapping[str, Any], part: str) -> Any:
    """transformers' `<name>ForObjectDetection`, with first weights. `part`: a module that it has under the names of
    today, and not under earlier ones.

    Raises:
        MissingPackageError: transformers is not installed.
        CapabilityError: it cannot be imported, is too old, or builds no such model.
    """
    why = f"{name}, whose module is transformers' own,"
    transformers = library("transformers", why)
    try:  # its classes are imported when they are looked up
        config = getattr(transformers, f"{name}Config", None)
        detector = getattr(transformers, f"{name}ForObjectDetection", None)
    except Exception as error:
        raise cannot_import("transformers", why, error) from None
    try:
        model = None if config is None or detector is None else detector(config(**settings))
    except (ValueError, TypeError) as error:
        raise CapabilityError(
            f"transformers {transformers.__version__} cannot build this {name}",
            found=last_line(error),
            fix="export it where it was trained, and bring the ONNX file",
        ) from None
    if model is None or part not in dict(model.named_modules()):
        raise CapabilityError(
            f"transformers here is too old for checkpoints of {name}'s original repository",
            found=f"transformers {transformers.__version__}",
            wanted=f"a version that names the layers of {name} as {_NEEDED} does",
            fix="pip install --upgrade transformers",
        )
    return model
