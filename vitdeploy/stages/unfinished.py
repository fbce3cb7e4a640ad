"""Saved state of a long stage, to resume after an interruption: arrays in one file, replaced atomically."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO

import numpy as np

from vitdeploy.quantization.observer import Arrays
from vitdeploy.runtime.trust import open_atomic
from vitdeploy.zip_members import DAMAGED

STATE = "state.npz"


def save_state(folder: Path, arrays: Arrays) -> None:
    """Replace the state in `folder`, which is made when needed, in one step. OSError if the disk is full."""
    folder.mkdir(parents=True, exist_ok=True)
    # Another run may have finished the stage, and cleared the folder.
    with contextlib.suppress(FileNotFoundError), open_atomic(folder / STATE) as file:
        save_arrays(file, arrays)


def load_state(folder: Path) -> Arrays | None:
    """The state last saved there; None if there is none, or it cannot be read."""
    return load_arrays(folder / STATE)


def save_arrays(file: Path | IO[bytes], arrays: Arrays) -> None:
    """Write arrays, as `load_arrays` reads them."""
    np.savez(file, **arrays)  # type: ignore[arg-type]


def load_arrays(file: Path) -> Arrays | None:
    """The arrays in a file; None if there is none, or it cannot be read."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except DAMAGED:
        return None
