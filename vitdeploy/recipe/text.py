"""A recipe as the text of a file."""

from __future__ import annotations

import os
from pathlib import Path

import yaml

from vitdeploy.models.names import graph_folder
from vitdeploy.recipe.load import PATHS
from vitdeploy.recipe.recipe import Recipe


def recipe_text(recipe: Recipe, folder: Path, said: str) -> str:
    """A recipe as YAML for a file in `folder`, to which its paths are relative: it holds wherever it is moved together
    with what it names. `said` is the comment above it."""
    changed = {**recipe.model_dump(exclude_defaults=True), "precision": recipe.precision}
    data = {field: changed[field] for field in Recipe.model_fields if field in changed}
    for section, key in PATHS:
        value = data.get(section, {}).get(key)
        if value is None:
            continue
        name = value.removeprefix("hf:") if key == "model" else value
        is_graph = value.endswith(".onnx") or graph_folder(value) is not None
        if key != "model" or is_graph or (name != value and Path(name).is_dir()):
            data[section][key] = value[: len(value) - len(name)] + _relative(Path(name), folder)
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return f"# {said}\n{text}"


def _relative(path: Path, folder: Path) -> str:
    """The path relative to a recipe in `folder`; absolute if there is none, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return str(path.resolve())
