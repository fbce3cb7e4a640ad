"""A bundle that another one takes the place of while it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from vitdeploy.bundle.read import MANIFEST_FILE
from vitdeploy.runtime import choice


def replace_while_loading(
    bundle: Path, patch: pytest.MonkeyPatch, moments: Collection[int], error: Exception | None = None
) -> list[int]:
    """The numbers, from 1, of the engines that are loaded. At these moments, once the engine's files were hashed, a
    bundle of the same files with the name "new-NUMBER" takes the place; then the engine fails with the `error`."""
    made: list[int] = []
    make = choice.make_runner

    def late(*given: Any, **more: Any) -> Any:
        made.append(number := len(made) + 1)
        if number in moments:
            other = shutil.copytree(bundle, bundle.parent / f"new {number}")
            document = json.loads((other / MANIFEST_FILE).read_text(encoding="utf-8"))
            (other / MANIFEST_FILE).write_text(json.dumps({**document, "name": f"new-{number}"}), encoding="utf-8")
            bundle.rename(bundle.parent / f"old {number}")
            other.rename(bundle)
            if error is not None:
                raise error
        return make(*given, **more)

    patch.setattr(choice, "make_runner", late)
    return made
