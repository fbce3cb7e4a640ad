"""A module in memory for other processes of the same run: with its code, which may be a notebook's.

cloudpickle writes classes of a notebook or of the user's own files by value, so that a measuring process needs none of
these. The file lies in a folder that only this user can read, is named by no recipe and no bundle, and is read by
processes of the run that wrote it.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
from torch import nn

import vitdeploy
from vitdeploy.errors import UserCodeError
from vitdeploy.models.external.module import INSTALLED, copied, from_module, require_module
from vitdeploy.models.family import LoadedModel
from vitdeploy.models.source import last_line
from vitdeploy.spec import PreprocessSpec, Task

STANDARD, OURS = Path(sysconfig.get_path("stdlib")), Path(vitdeploy.__file__).parent


def save_module(
    module: object,
    folder: Path,
    *,
    preprocess: PreprocessSpec | None = None,
    image_size: tuple[int, int] | None = None,
    task: Task | None = None,
) -> Path:
    """Save a copy of a module, and its description, to a file in `folder`; `open_module` reads it.

    Raises:
        UserCodeError: not a torch.nn.Module, or one that cannot be copied or written.
    """
    model = require_module(module, "what is given is no model")
    name = type(model).__name__
    options = {"preprocess": preprocess, "image_size": image_size, "task": task}
    file = folder / f"{name}.pickle"
    try:
        with _by_value(model):
            file.write_bytes(cloudpickle.dumps((copied(model, name), options)))
    except UserCodeError:
        raise
    except Exception as error:  # open files, locks, generators in attributes
        raise UserCodeError(
            f"{name} cannot be given to other processes, which measure it",
            found=f"{type(error).__name__}: {last_line(error)}",
            wanted="a module whose attributes can be pickled",
            fix="take the attribute away, or give a function that builds it: model(function='package.module:function')",
        ) from None
    return file


def open_module(
    file: Path, image_size: tuple[int, int] | None = None, preprocess: PreprocessSpec | None = None
) -> LoadedModel:
    """Read what `save_module` wrote, as the original of a job; a size and preprocessing that are given count. Errors as
    in `from_module`."""
    module, options = cloudpickle.loads(file.read_bytes())  # written by this run, in a folder of this user's alone
    options["image_size"] = image_size or options["image_size"]
    options["preprocess"] = preprocess or options["preprocess"]
    return from_module(module, name=file.stem, **options)


@contextlib.contextmanager
def _by_value(model: nn.Module) -> Iterator[None]:
    """Classes of the user's own files are written whole: another process may not find these."""
    names = {type(layer).__module__ for layer in model.modules()}
    own = [module for name in sorted(names) if (module := sys.modules.get(name)) is not None and _is_own(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType) -> bool:
    file: Any = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None:
        return False
    path = Path(file)
    return not (INSTALLED & set(path.parts) or path.is_relative_to(STANDARD) or path.is_relative_to(OURS))
