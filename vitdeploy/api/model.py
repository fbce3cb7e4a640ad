"""A model to work on: a built-in name, a folder, a checkpoint, an ONNX file, or a module in memory."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.api import artifacts, values
from vitdeploy.errors import InputError
from vitdeploy.graph.io.bound import bindings
from vitdeploy.models.source import Source
from vitdeploy.pipeline import early, setting
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.runner import type_name
from vitdeploy.spec import Postprocess, PreprocessSpec, Task, task_read_by
from vitdeploy.stages.reference_model import Overrides, find_reference_model


def model(
    source: artifacts.ModelLike | None = None,
    *,
    checkpoint: str | Path | None = None,
    image_size: int | tuple[int, int] | None = None,
    heads: int | None = None,
    text_features: str | Path | None = None,
    function: str | None = None,
    preprocess: PreprocessSpec | None = None,
    postprocess: Postprocess | None = None,
    labels: str | Path | Sequence[str] | None = None,
    task: Task | None = None,
    normal: str | Path | None = None,
    bind: Mapping[str, float | Sequence[float] | str | Path | npt.NDArray[Any]] | None = None,
) -> artifacts.Model:
    """Load a model and describe it.

    Args:
        source: a built-in name such as "vit_tiny_patch16_224", "timm:NAME", "hf:FOLDER_OR_REPOSITORY", an .onnx file or
            its folder, or a `torch.nn.Module` in memory, which is copied. None with only a checkpoint: its keys
            then determine the architecture.
        checkpoint: .safetensors, .pt or .pth with plain weights, or JAX .npz.
        image_size: one side, or (height, width). Default: the checkpoint's.
        heads: number of attention heads. Default: from the config file.
        text_features: a .npy of float32 [classes, width], for zero-shot classification with CLIP or SigLIP.
        function: "package.module:function", which returns the module.
        preprocess: the preprocessing of its images, overriding the model's files.
        postprocess: the meaning of a detector's outputs, overriding the model's files.
        labels: class names in the order of the outputs, or a file with one per line.
        task: the task, if the outputs do not identify it.
        normal: for the task "anomaly", a folder of images of good parts, or a folder of MVTec AD: the model's patch
            tokens are compared with theirs.
        bind: a value for each further input of an ONNX file or of your own module: a number, numbers, an array, or a
            .npy or .npz file, which becomes a constant; or "input" if each image brings its own value, for your own
            module with type and shape: "input:float32:1x64x64".

    Raises:
        UnknownModelError, MissingFileError, CheckpointError, PickleError, UserCodeError, InputError: the model cannot
            be loaded; the message says why, and how to fix it.

    >>> import vitdeploy as vd
    >>> vd.model("vit_w32d2h2_patch8_32").preprocess.crop
    (32, 32)
    """
    if isinstance(source, artifacts.Model):
        return source

    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    label_file = _label_file(labels)
    if source is None or isinstance(source, str | Path):
        early.check_model(None if source is None else str(source), checkpoint, label_file)
        given = Source(
            model=None if source is None else str(source),
            checkpoint=_path(checkpoint),
            image_size=size,
            heads=heads,
            text_features=_path(text_features),
            function=function,
            task=task,
            normal=_path(normal),
            bind=bindings(_written(bind or {})),
        )
    else:
        given = _in_memory(source, (checkpoint, heads, text_features, function), preprocess, size, task)
        later = task == "anomaly" or task_read_by(task) is not None  # derived from the module's outputs
        given = dataclasses.replace(given, normal=_path(normal), task=task if later else None)
        given = dataclasses.replace(given, bind=bindings(_written(bind or {})))
    return read_model(given, Overrides(preprocess, postprocess, label_file))


def read_model(source: Source, overrides: Overrides, progress: Progress = silent) -> artifacts.Model:
    """Load the model of a source, with overrides of its files; fit it to its normal images. Errors as in `model`."""

    return artifacts.Model(find_reference_model(setting.fitted(source, overrides, progress), overrides), overrides)


def _in_memory(
    module: object,
    useless: tuple[object, ...],
    preprocess: PreprocessSpec | None,
    size: tuple[int, int] | None,
    task: Task | None,
) -> Source:

    if any(value is not None for value in useless):
        raise InputError(
            "a module in memory takes no further source arguments",
            found="checkpoint, heads, text_features or function",
            expected="only the module",
            fix="leave them out",
        )
    if not hasattr(module, "state_dict"):
        raise InputError(
            "source is not a model",
            found=type_name(module),
            expected="a name, a path, or a torch.nn.Module",
            fix="list the built-in names: vitdeploy export list",
        )
    from vitdeploy.models.external.module import save_module

    saved_task = None if task == "anomaly" else task_read_by(task) or task  # anomaly works on any tokens
    file = save_module(module, values.unnamed_folder("model"), preprocess=preprocess, image_size=size, task=saved_task)
    return Source(module=file)


def _written(bind: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with arrays and tensors written to temporary files."""
    arrays = {name: value for name, value in bind.items() if hasattr(value, "__array__")}
    if not arrays:
        return dict(bind)
    folder, values_of = values.unnamed_folder("bind"), dict(bind)
    for name, value in arrays.items():
        values_of[name] = folder / f"{name}.npy"
        np.save(values_of[name], value.numpy(force=True) if hasattr(value, "numpy") else np.asarray(value))
    return values_of


def _label_file(labels: str | Path | Sequence[str] | None) -> Path | None:
    if labels is None or isinstance(labels, str | Path):
        return _path(labels)
    if any("\n" in label for label in labels):
        raise InputError(
            "a class name contains a line break",
            found=repr(next(x for x in labels if "\n" in x)),
            expected="class names on one line",
        )
    file = values.unnamed_folder("labels") / "labels.txt"
    file.write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    return file


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)
