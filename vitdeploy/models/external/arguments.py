"""Arguments of a module's `forward` besides the image, bound to values: a mask, a size, text features.

A graph declares the shape and type of each input. A module does not, so each form of a value is tried on a few images
of noise; if several forms run, their outputs must agree.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.graph.io.bound import asked_inputs, constants, file_of, named, value_of, without_folders
from vitdeploy.models import source
from vitdeploy.runtime.inputs import random_inputs
from vitdeploy.spec import TensorSpec

# Minimum number of trial images: not a usual number of channels, coordinates or heads, to identify the batch axis.
TRIAL_BATCH = 5
# Two outputs agree up to this share of the largest value.
TOLERANCE = 1e-4
SHOWN = 3
_PLAIN = re.compile(r"\b(int|float|bool|tuple|list|sequence)\b", re.IGNORECASE)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, eq=False)
class Passing:
    """One form of a value: a number, a tuple of numbers, or a tensor. `repeated`: the tensor [1, ...] is repeated for
    each image of a batch."""

    value: Any
    repeated: bool = False

    def __str__(self) -> str:
        if not isinstance(self.value, Tensor):
            return "numbers" if isinstance(self.value, tuple) else type(self.value).__name__
        dtype, shape = str(self.value.dtype).removeprefix("torch."), list(self.value.shape)
        sizes = ", ".join(map(str, ["batch", *shape[1:]] if self.repeated else shape))
        return f"{dtype} [{sizes}]" + ("" if self.repeated else " for all images together")

    def for_images(self, image: Tensor, value: Any) -> Any:
        """Return the argument for `value` with images [batch, ...]."""
        return value.expand(image.shape[0], *value.shape[1:]) if self.repeated else value


Passings = Mapping[str, Passing]


def parameters_of(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Return the parameters of its `forward` by name; none if Python cannot inspect them."""
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return {}


def image_keyword(model: nn.Module, bound: Sequence[str]) -> str | None:
    """Return the keyword for the image if bound arguments precede it; None if the image is the first argument."""
    names = list(parameters_of(model))
    place = next((number for number, name in enumerate(names) if name not in bound), 0)
    return names[place] if place else None


def trial_batch(bind: Sequence[str]) -> int:
    """Return the number of trial images: unequal to all axis lengths of the values, to identify the batch axis."""
    lengths = {length for text in bind for length in value_of(text).shape}
    return next(count for count in itertools.count(TRIAL_BATCH, 2) if count not in lengths)


def declared_inputs(bind: Sequence[str], what: str) -> tuple[TensorSpec, ...]:
    """Return the per-image inputs, each [batch, ...].

    Raises:
        CheckpointError: an input has no type and shape. InputError: its declaration cannot be read.
    """
    found = []
    for name, tensor in asked_inputs(bind).items():
        if tensor is None:
            raise CheckpointError(
                f"the input {name} of {what} has no type and shape",
                found=f"{name}=input, but modules do not declare inputs",
                expected="its type, and its sizes for one image",
                fix=f"for example --bind {name}=input:float32:1x64x64, or {name}=input:float32 for one number",
            )
        found.append(tensor)
    return tuple(found)


def example_inputs(inputs: Sequence[TensorSpec], batch: int) -> tuple[Tensor, ...]:
    """Return `random_inputs` as tensors, in order."""
    return tuple(map(torch.from_numpy, random_inputs(inputs, batch).values()))


def require_arguments(model: nn.Module, bind: Sequence[str], what: str) -> None:
    """Check the names of `bind` against the parameters of `forward`.

    Raises:
        CheckpointError: a name is not a further parameter or has two values, or a further parameter has no value.
    """
    parameters, names = parameters_of(model), [named(text)[0] for text in bind]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"the input {twice} is bound twice",
            found=", ".join(without_folders(text for text in bind if named(text)[0] == twice)),
            expected="one value for each input",
        )
    if not parameters:
        return
    shown = f"forward({', '.join(map(str, parameters.values()))})"
    kinds = [parameter.kind for parameter in parameters.values()]
    known = {name for name, parameter in parameters.items() if parameter.kind in _NAMED}
    unknown = [name for name in names if name not in known]
    if unknown and not (inspect.Parameter.VAR_KEYWORD in kinds and all(name.isidentifier() for name in unknown)):
        raise CheckpointError(
            f"{what} has no input {unknown[0]!r} to bind",
            found=shown,
            expected="a parameter of its forward other than the image",
        )
    free = [name for name, kind in zip(parameters, kinds, strict=True) if name not in names]
    if not free:
        raise CheckpointError(
            f"all inputs of {what} are bound",
            found=shown,
            expected="one parameter that takes the images",
            fix="remove the binding of the image",
        )
    missing = [name for name in free[1:] if parameters[name].kind in _NAMED and _is_required(parameters[name])]
    if missing:
        raise CheckpointError(
            f"{what} takes further inputs besides the image",
            found=shown,
            expected=f"a value for {', '.join(missing)}",
            fix=f"--bind {missing[0]}=VALUE, a number, comma-separated numbers or a .npy file (source.bind in a "
            f"recipe, bind= in Python); {missing[0]}=input:float32:SIZES for a per-image input; or wrap the module in "
            "one that takes only the image",
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


def chosen_passings(
    model: nn.Module,
    bind: Sequence[str],
    what: str,
    image_size: tuple[int, int],
    run: Callable[[Passings], Sequence[Tensor]],
) -> dict[str, Passing]:
    """Return how the value of each binding is passed to the module: the first form that runs.

    Args:
        run: returns the outputs for `trial_batch` images of noise, each [batch, ...]; its exceptions propagate.

    Raises:
        CheckpointError: no form runs, or two forms run with different outputs.
        InputError, MissingFileError: a value cannot be read.
    """
    parameters = parameters_of(model)
    ways = {name: list(_ways(text, parameters.get(name))) for text in bind for name in [named(text)[0]]}
    failures = list[str]()
    for combination in itertools.product(*ways.values()):
        passings = dict(zip(ways, combination, strict=True))
        try:
            outputs = run(passings)
            break
        except Exception as error:  # the user's own code
            failures.append(f"{_in_words(passings)}: {source.where(error)}")
    else:
        raise CheckpointError(
            f"{what} does not run on images of {image_size[0]}x{image_size[1]} with the bound values",
            found="; ".join(failures[:SHOWN]),
            expected=f"a value with a shape and type that its forward accepts, for {', '.join(ways)}",
            fix="a .npy file with the value for one image, without a batch axis or with one of 1; or another "
            "--image-size (source.image_size in a recipe)",
        )
    for name, passing in passings.items():
        for other in ways[name]:
            if _is_other_shape(passing, other) and _differ(outputs, run, {**passings, name: other}):
                raise CheckpointError(
                    f"the value of the input {name} of {what} is ambiguous: two readings give different outputs",
                    found=f"{passing}, or {other}",
                    expected="a value that only one reading fits",
                    fix="wrap the module in one that takes only the image and holds the value",
                )
    return passings


def _ways(text: str, parameter: inspect.Parameter | None) -> Iterator[Passing]:
    """Yield the forms of a value, most likely first: Python numbers if the user wrote numbers, then tensors."""
    value, written = value_of(text), file_of(text) is None
    if value.dtype.kind not in "fiub":
        raise CheckpointError(
            f"the value of the input {named(text)[0]} cannot be passed to a module",
            found=str(value.dtype),
            expected="an array of floats, integers or booleans",
        )
    annotation, default = ("", None) if parameter is None else (str(parameter), parameter.default)
    annotation = annotation.partition(":")[2].partition("=")[0]
    plain = "Tensor" not in annotation and bool(_PLAIN.search(annotation))
    if value.ndim < 2 and "Tensor" not in annotation and (written or plain):
        yield from map(Passing, _plain(value, annotation, default))
    if plain:
        return
    for array in _typed(value, written):
        tensor = torch.from_numpy(array.copy())
        if tensor.ndim and len(tensor) == 1:
            yield Passing(tensor, repeated=True)
        yield Passing(tensor[None], repeated=True)
        yield Passing(tensor)


def _plain(value: np.ndarray, annotation: str, default: Any) -> list[Any]:
    """Return a number or a tuple of numbers: integers as int first, 0 and 1 as bool if the parameter is a bool."""
    numbers = [float(number) for number in value.reshape(-1)]
    kinds: list[Callable[[float], Any]] = [float]
    if isinstance(default, bool) or annotation.strip() == "bool":
        kinds = [bool] if set(numbers) <= {0.0, 1.0} else []
    elif all(number.is_integer() for number in numbers) and ("float" not in annotation or "int" in annotation):
        kinds = [int, float]
    return [tuple(map(kind, numbers)) if value.ndim else kind(numbers[0]) for kind in kinds]


def _typed(value: np.ndarray, written: bool) -> list[np.ndarray]:
    """Return the value in the usual types of modules: written numbers as float32, integers also as int64; an array in
    its own type, but floats as float32."""
    if value.dtype.kind == "f":
        whole = written and bool(np.all(np.isfinite(value) & (value == np.trunc(value))))
        return [value.astype(np.float32), *([value.astype(np.int64)] if whole else [])]
    wide = value.dtype.kind == "u" and value.dtype.itemsize > 1  # PyTorch supports few operators for these
    return [value.astype(np.int64) if wide else value.astype(value.dtype.newbyteorder("="))]


def _is_other_shape(passing: Passing, other: Passing) -> bool:
    a, b = passing.value, other.value
    return a is not b and isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype


def _differ(outputs: Sequence[Tensor], run: Callable[[Passings], Sequence[Tensor]], passings: Passings) -> bool:
    """Whether these forms run and give other outputs."""
    try:
        others = run(passings)
    except Exception:  # the user's code does not accept this form
        return False
    if [output.shape for output in others] != [output.shape for output in outputs]:
        return True
    for a, b in zip(outputs, others, strict=True):
        ours, theirs = a.double(), b.double()
        allowed = TOLERANCE * float(ours.nan_to_num(0, 0, 0).abs().max())
        if not torch.allclose(ours, theirs, rtol=0, atol=allowed, equal_nan=True):
            return True
    return False


def _in_words(passings: Passings) -> str:
    return ", ".join(f"{name} as {passing}" for name, passing in passings.items())


def passing_notes(passings: Passings, bind: Sequence[str]) -> list[str]:
    """Return a note on each binding: the value, and the form in which it is passed."""
    values = dict(map(named, without_folders(constants(bind))))
    return [f"the input {name} is bound to {values[name]}: {passing}" for name, passing in passings.items()]
