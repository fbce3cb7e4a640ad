"""The models that a self-test deploys: a small trained one, and a ViT-B/16 whose weights are seeded noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import vitdeploy
from vitdeploy.errors import MissingFileError
from vitdeploy.recipe.load import load_recipe, validate
from vitdeploy.recipe.recipe import Recipe

DIGITS = "recipes/digits.yaml"


@dataclass(frozen=True)
class Case:
    """A model by its name; `recipe` says for a target how it is deployed, in FP32.

    `trained`: its accuracy means something, in INT8 too.
    """

    name: str
    trained: bool
    recipe: Callable[[str], Recipe]


def default_cases() -> tuple[Case, ...]:
    return (Case("digits", True, _digits), Case("vit-b16-seeded", False, _vit_base))


def _digits(target: str) -> Recipe:
    """The recipe of `make demo`, for this target.

    Raises:
        MissingFileError: this is not a checkout, which has the recipe, the checkpoint and the images.
    """
    return load_recipe(_root() / DIGITS, (f"targets=[{target}]", "precision=fp32"))


def _vit_base(target: str) -> Recipe:
    """ViT-B/16 at 224 pixels on the images of the digits: what it answers is noise, what it costs is not."""
    data: dict[str, object] = {
        "path": str(_root() / "calibration" / "digits"),
        "labels": "none",
        "calibration": {"images": 32},
        "evaluation": {"images": 128},  # enough to prove the guard's 95 % with one changed answer
    }
    return validate(
        {
            "vitdeploy": 1,
            "name": "vit-b16-seeded",
            "source": {"model": "vit_base_patch16_224"},
            "data": data,
            "targets": [target],
            "precision": "fp32",
        },
        "vit-b16-seeded",
    )


def _root() -> Path:
    """The checkout that this package lies in, or the one that the command is run in."""
    for folder in (Path(vitdeploy.__file__).parents[1], Path.cwd()):
        if (folder / DIGITS).is_file():
            return folder
    raise MissingFileError(
        f"no {DIGITS} here",
        found=f"neither beside the package nor in {Path.cwd()}",
        wanted="a checkout of vitdeploy: the self-test's weights and images are not part of the package",
        fix="run the command in a checkout of vitdeploy",
    )
