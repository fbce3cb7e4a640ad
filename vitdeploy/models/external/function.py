"""Load the module, with its weights, that a user's own function returns; the working folder is searched too."""

from __future__ import annotations

import contextlib
import difflib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitdeploy.errors import CheckpointError, UserCodeError
from vitdeploy.models.checkpoints.load_state import load_state
from vitdeploy.models.checkpoints.read import read_tensors
from vitdeploy.models.checkpoints.unsupported import refuse_state
from vitdeploy.models.external.adapted import SEED
from vitdeploy.models.external.libraries import where
from vitdeploy.models.external.module import described, require_module
from vitdeploy.models.external.working_folder import shown_folder
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.spec import PreprocessSpec, Task

WANTED = "a function that takes nothing and returns a torch.nn.Module"


def from_function(
    reference: str,
    image_size: tuple[int, int] | None,
    checkpoint: Path | None = None,
    task: Task | None = None,
    preprocess: PreprocessSpec | None = None,
) -> LoadedModel:
    """Call `package.module:function` without arguments; the result gets the weights of `checkpoint` if given.

    `preprocess` None: as the module's `pretrained_cfg` says (timm's modules have it), else as `described` assumes.

    Raises:
        UserCodeError: no such module or function, it fails, or it returns something other than a torch.nn.Module.
        CheckpointError, MissingFileError, PickleError, NonFiniteWeightsError: the checkpoint does not fit the module.
    """
    model = _call(_function(reference), reference)
    notes = [f"{reference} returned a {type(model).__name__}"]
    if checkpoint is not None:
        state, remarks = read_tensors(checkpoint)
        try:
            told = load_state(model, state, str(checkpoint))
        except CheckpointError:
            refuse_state(str(checkpoint), state)  # which says what it is, where that is known
            raise
        notes += [*remarks, *told, f"its weights are those of {checkpoint.name}"]
    return described(model, reference, image_size, preprocess=preprocess, task=task, notes=notes)


def _function(reference: str) -> Callable[[], Any]:
    module_name, _, function_name = reference.partition(":")
    if not module_name or not function_name:
        raise UserCodeError(
            f"{reference!r} names no function",
            wanted="package.module:function",
            fix="for build() in my_model.py: --model my_model:build",
        )
    folder = shown_folder()
    if (file := folder.hidden(module_name)) is not None:
        raise UserCodeError(
            f"{module_name} in the working folder has the name of another module, which is loaded already",
            found=file,
            wanted="a name of its own",
            fix="rename the file",
        )
    try:
        with folder.build():
            module = folder.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserCodeError(
            f"{module_name} cannot be imported",
            found=where(error),
            wanted="a module on the Python path, or in the working folder",
            fix=f"name it without .py: {module_name[:-3]}:{function_name}" if module_name.endswith(".py") else "",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1)
        raise UserCodeError(
            f"{module_name} has no function {function_name!r}",
            found=", ".join(names)[:200] or "no function",
            wanted=WANTED,
            fix=f"did you mean {module_name}:{near[0]}?" if near else "",
        )
    return function


def _call(function: Callable[[], Any], reference: str) -> nn.Module:
    try:
        # The model is built again in other processes; weights that it draws must be the same there.
        with _seeded(), shown_folder().build():
            model = function()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{reference} failed", found=where(error), wanted=WANTED) from None
    return require_module(model, f"{reference} returned no model").float().eval()


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """The generators of PyTorch, numpy and Python, seeded, and afterwards as they were before."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(SEED)
            np.random.seed(SEED)
            random.seed(SEED)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
