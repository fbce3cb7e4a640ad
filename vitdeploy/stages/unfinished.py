"""Saved state of a long stage, to resume after an interruption: arrays in one file, replaced atomically."""

from __future__ import annotations

import contextlib
import os
import uuid
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STATE = "state.npz"


def save_state(folder: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Replace the state in `folder`, which is made when needed, in one step. OSError if the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{STATE}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        with made.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):  # another run has finished the stage, and cleared the folder
            made.replace(folder / STATE)
    finally:
        made.unlink(missing_ok=True)


def load_state(folder: Path) -> dict[str, npt.NDArray[Any]] | None:
    """The state last saved there; None if there is none, or it cannot be read."""
    try:
        with np.load(folder / STATE, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
