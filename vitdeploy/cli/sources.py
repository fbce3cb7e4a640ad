"""The options that say more of a model than its name, shared by the commands that take one."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from vitdeploy.spec import Task

if TYPE_CHECKING:
    from vitdeploy.models.source import Source

F = TypeVar("F", bound=Callable[..., Any])
REFERENCE = "PACKAGE.MODULE:FUNCTION"
OWN = "Your own torch.nn.Module"
NAMES = ("checkpoint", "image_size", "heads", "text_features", "function", "task", "normal", "bind")
# Commands of a recipe, which they let `--set` change; and options that they do not have, as its section source says it.
WITH_RECIPE = ("run", "tune", "sweep")
OF_SOURCE = "checkpoint|image-size|heads|text-features|task|normal|labels|bind"


class ImageSize(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A side in pixels, or HEIGHTxWIDTH."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sides = str(value).lower().split("x")
        if not (1 <= len(sides) <= 2 and all(side.isdecimal() and int(side) > 0 for side in sides)):
            self.fail(f"{value!r} is no image size; wanted 384, or 256x320 (height x width).", param, ctx)
        return int(sides[0]), int(sides[-1])


def model_option(function: F) -> F:
    """--model, for the commands whose recipe says all else."""
    return click.option("--model", "function", metavar=REFERENCE, help=f"{OWN}, in a recipe that names no model.")(
        function
    )


def source_options(*, several_sizes: bool = False) -> Callable[[F], F]:
    """--checkpoint, --image-size (once, or as often as needed), --heads, --text-features, --model, --task, --normal,
    --bind."""
    size = "Other than the checkpoint's: 384, or 256x320 (HxW)."
    options = (
        click.option(
            "--checkpoint",
            type=click.Path(path_type=Path),
            help="Weights: .safetensors, .pt/.pth with plain weights, or JAX's .npz.",
        ),
        click.option(
            "--image-size",
            type=ImageSize(),
            multiple=several_sizes,
            help=f"{size} Each one given makes a graph of its own." if several_sizes else size,
        ),
        click.option("--heads", type=click.IntRange(min=1), help="Attention heads, where no config file says it."),
        click.option(
            "--text-features", type=click.Path(path_type=Path), help="Zero-shot: .npy, float32 [classes, width]."
        ),
        click.option("--model", "function", metavar=REFERENCE, help=f"{OWN}."),
        click.option(
            "--task",
            type=click.Choice(typing.get_args(Task)),
            help="What the outputs are to be taken for, where they do not say it.",
        ),
        click.option(
            "--normal",
            type=click.Path(path_type=Path),
            help="Images of good parts, or MVTec AD's folder of them: for --task anomaly.",
        ),
        click.option(
            "--bind",
            multiple=True,
            metavar="NAME=VALUE",
            help="A further input of an .onnx file becomes a constant: a number, numbers with commas, a .npy or .npz.",
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def as_keys(fix: str, command: str) -> str:
    """A fix that names options of the source, as the keys of the recipe that a command reads in their place."""
    if command not in WITH_RECIPE:
        return fix

    def size(match: re.Match[str]) -> str:
        sides = [", ".join(pair.split("x")) for pair in match[1].split(" or ")]
        return " or ".join(f"--set 'source.image_size=[{pair}]'" for pair in sides)

    fix = re.sub(r"--image-size ((?:\d+x\d+|HEIGHTxWIDTH)(?: or \d+x\d+)*)", size, fix)
    fix = re.sub(rf"(?<!leave )--({OF_SOURCE}) (\S+)", lambda match: f"--set source.{_key(match[1])}={match[2]}", fix)
    return re.sub(rf"--({OF_SOURCE})\b", lambda match: f"source.{_key(match[1])}", fix)


def _key(option: str) -> str:
    return option.replace("-", "_")


def to_source(model: str | None, options: dict[str, Any]) -> Source:
    """The source of these options, which are taken out of `options`."""
    from vitdeploy.models.source import Source

    return Source(model=model, **{name: options.pop(name) for name in NAMES})
