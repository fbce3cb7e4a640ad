"""A model as named by the user, and imports of the libraries that it comes from."""

import importlib
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from vitdeploy.errors import CapabilityError, MissingPackageError
from vitdeploy.spec import PreprocessSpec, Task

# --- The user's description of a model: plain data, without PyTorch. `load` builds the model from it ------------------


@dataclass(frozen=True)
class Source:
    """Where a model comes from: plain data, which can also be passed to a measuring process.

    `image_size` is (height, width), if it differs from the checkpoint's. `preprocess` replaces the preprocessing in
    the model's own files, which is then not read. `heads`: for a bare state dict that does not show it.
    `text_features`: a .npy of float32 [classes, width], which makes a CLIP or SigLIP tower a zero-shot classifier.
    `function` is `package.module:function`, and comes from the command line only; if `weights` is given, it must return
    weights with that digest. `only_batch`: the fixed batch size for an ONNX file.
    `module`: the file of a module in memory, which this user's own process has just written. `task`: the task to
    interpret the outputs as, if they do not show it.
    `bind`: "NAME=VALUE" for each further input of an ONNX file or a user's module, see `graph.io.bound`.
    `normal`: the folder of normal images of an anomaly model; `memory`: the file of the bank fitted on them.
    """

    model: str | None = None
    checkpoint: Path | None = None
    image_size: tuple[int, int] | None = None
    heads: int | None = None
    text_features: Path | None = None
    function: str | None = None
    weights: str | None = None
    only_batch: int | None = None
    module: Path | None = None
    task: Task | None = None
    normal: Path | None = None
    memory: Path | None = None
    preprocess: PreprocessSpec | None = None
    bind: tuple[str, ...] = ()

    @property
    def size(self) -> tuple[int, int] | None:
        """The requested (height, width): `image_size`, else the crop of `preprocess`."""
        return self.image_size or (self.preprocess.crop if self.preprocess is not None else None)

    @property
    def name(self) -> str:
        if self.module is not None:
            return self.module.stem
        return self.function or self.model or (self.checkpoint.name if self.checkpoint else "model")


# --- Import third-party libraries, and report failures in one line ----------------------------------------------------


def library(name: str, why: str) -> ModuleType:
    """Import the package `name`; an error says what needs it (`why`).

    Raises:
        MissingPackageError, CapabilityError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(error.name or name, "models", why) from None
    except Exception as error:
        raise cannot_import(name, why, error) from None


def cannot_import(name: str, why: str, error: BaseException) -> CapabilityError:
    """Return the error for a failed import with its root cause, which transformers wraps in a sentence of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return CapabilityError(
        f"{why} needs the package {name}, which is installed here but cannot be imported",
        found=f"{type(error).__name__}: {last_line(error)}",
        fix=f"install compatible builds of torch, torchvision and {name}",
    )


def last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def where(error: BaseException) -> str:
    """Describe the error, with the last line of the user's own code in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "-packages" not in f.filename]
    ours = str(Path(__file__).parents[1])
    frames = [f for f in frames if not f.filename.startswith((ours, "<"))]
    frames = [f for f in frames if f.filename != importlib.__file__]
    line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {last_line(error)}{line}"
