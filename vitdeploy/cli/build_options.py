"""The options on how TensorRT builds: those of a recipe's section `tensorrt`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from vitdeploy.compilation.build_options import BuildOptions

F = TypeVar("F", bound=Callable[..., Any])
NAMES = ("profiles", "workspace", "builder_optimization_level", "hardware_compatibility_level", "version_compatible")


class Profile(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """MIN,OPT,MAX: batches, in ascending order."""

    name = "profile"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        texts = str(value).split(",")
        batches = tuple(int(text) for text in texts if text.isdecimal())
        if len(texts) != 3 or len(batches) != 3 or not 1 <= batches[0] <= batches[1] <= batches[2]:
            self.fail(f"{value!r} is no profile; wanted the smallest, best and largest batch: 1,8,32.", param, ctx)
        return batches


def build_options(function: F) -> F:
    """--profile (as often as needed), --workspace, --builder-optimization-level, --hardware-compatibility-level and
    --version-compatible."""
    options = (
        click.option(
            "--profile",
            "profiles",
            type=Profile(),
            multiple=True,
            metavar="MIN,OPT,MAX",
            help="tensorrt: batches to build for; as often as needed. Default: just --batch, and 1 to 8 or more.",
        ),
        click.option(
            "--workspace",
            type=click.IntRange(min=1),
            metavar="MIB",
            help="tensorrt: the most device memory that kernels may work in. Default: what is free.",
        ),
        click.option(
            "--builder-optimization-level",
            type=click.IntRange(0, 5),
            help="tensorrt: 0 builds fastest, 5 searches longest. Default: 3.",
        ),
        click.option(
            "--hardware-compatibility-level",
            type=click.Choice(["none", "same-compute-capability", "ampere+"]),
            help="tensorrt: the GPUs that the engine may run on beside this one. Default: none.",
        ),
        click.option(
            "--version-compatible",
            is_flag=True,
            default=None,
            help="tensorrt: the engine also runs on later releases of TensorRT.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def to_build(target: str, options: dict[str, Any]) -> BuildOptions | None:
    """The requested build options; None if none was given.

    Raises:
        click.UsageError: one was given for another target than tensorrt.
    """
    given = {name: options[name] for name in NAMES if options[name] not in ((), None)}
    if not given:
        return None
    if target != "tensorrt":
        flags = ", ".join("--profile" if name == "profiles" else f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags}: for --target tensorrt, not for {target}.")
    from vitdeploy.recipe.tensorrt import TensorRtSection

    return TensorRtSection(**given).to_options()
