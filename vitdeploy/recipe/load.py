"""Read a recipe: its YAML, the overrides, and all its problems."""

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vitdeploy.errors import InputError, RecipeError
from vitdeploy.graph.io.bound import FILES
from vitdeploy.limits import bounded, size_of
from vitdeploy.models.names import graph_folder, is_built_in
from vitdeploy.paths import is_dir, require_recipe
from vitdeploy.recipe.recipe import FUNCTION, SECTIONS, Recipe
from vitdeploy.yaml_values import MAX_DEPTH, NOT_YAML, read_yaml

# --- Turn pydantic's error about an invalid value into one line with its path -----------------------------------------


# Maximum characters of a line, and of a text quoted in it: names and values come from the file and may be long.
MAX_LINE, MAX_QUOTED = 1000, 200


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """A text of a recipe or an override, shortened for an error."""
    return text if len(text) <= most else f"{text[:most]}..."


def problem_line(error: Any, model: type[BaseModel]) -> str:
    """The line `$.a.b: found, expected` for an error at a field of `model` or below."""
    return cut(_line(error, model), MAX_LINE)


def _line(error: Any, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        name, siblings = str(error["loc"][-1]), _fields_at(error["loc"][:-1], model)
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        path = _path(error["loc"][:-1]) + "." + (name if name.isidentifier() else ascii(name))
        return f"{path}: unknown field; " + (f"did you mean {near[0]}?" if near else f"known: {', '.join(siblings)}")
    path = _path(error["loc"])
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "tuple_type":
        message = f"input should be a list, such as [{error['input']}]"
    elif error["type"] == "model_type":
        message = f"input should be a section with the fields {', '.join(_fields_at(error['loc'], model))}"
    return f"{path}: {message[:1].lower()}{message[1:]} (found {str(error['input'])[:60]!r})"


def _path(location: tuple[int | str, ...]) -> str:
    """`$.a.b[0]`, without the names of union members that pydantic adds to a location."""
    parts = (
        part
        for part in location
        if isinstance(part, int) or (part.isidentifier() and part not in ("int", "bool", "constrained", "tuple"))
    )
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _fields_at(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    for part in location:
        if part in SECTIONS:
            model = SECTIONS[str(part)]
            continue
        annotation = model.model_fields[str(part)].annotation if str(part) in model.model_fields else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), model)
    return list(model.model_fields)


# --- Load a recipe from a file: read it, apply overrides, make its paths absolute, validate it ------------------------


MAX_BYTES = 1 << 20
# The field that marks a file as a grid of recipes; its value is the version of the format.
GRID = "grid"
# Maximum number of reported problems: every value of a recipe may be wrong.
MAX_PROBLEMS = 100
# Fields that name files: relative to the recipe, so that it runs from anywhere.
PATHS = (
    *(("source", key) for key in ("model", "checkpoint", "labels", "text_features", "normal")),
    *(("data", key) for key in ("path", "annotations", "texts", "inputs")),
)


def load_recipe(path: Path, overrides: Sequence[str] = (), function: str | None = None) -> Recipe:
    """Read, override and validate a recipe. Paths in the file are relative to it, paths in overrides to the working
    folder.

    Args:
        overrides: each "a.b=value", with the value in YAML.
        function: the user's own model, named on the command line; the recipe then names none. It never names code.

    Raises:
        MissingFileError: the file does not exist.
        RecipeError: the file is not YAML, or has invalid fields: all problems at once.
        InputError: the file is a grid of recipes.
    """
    data = read_fields(path)
    if GRID in data and "vitdeploy" not in data:
        raise InputError(
            f"{path} is a grid of recipes",
            found=f"a file with {GRID}:",
            expected="one recipe",
            fix="`vitdeploy sweep` runs all recipes of a grid",
        )
    anchor(data, path.parent)
    for override in overrides:
        _set(data, override, str(path))
    if function is not None:
        data.setdefault("source", {})
    return validate(data, str(path), function)


def given_recipe(recipe: Recipe | str | Path, overrides: Sequence[str] = (), function: str | None = None) -> Recipe:
    """Return a loaded recipe unchanged, or load the recipe of a file; arguments and errors as in `load_recipe`.

    A loaded recipe takes no overrides.
    """
    if not isinstance(recipe, Recipe):
        return load_recipe(Path(recipe), overrides, function)
    if overrides:
        problem = f"overrides {cut(', '.join(overrides))}: not possible on a loaded recipe; pass them when loading it"
        raise RecipeError("the recipe", [problem])
    return recipe


def validate(data: Any, source: str, function: str | None = None) -> Recipe:
    """Return the recipe of these YAML values; raises RecipeError with all problems. `function` as in `load_recipe`."""
    try:
        return Recipe.model_validate(data, context={FUNCTION: function})
    except ValidationError as error:
        errors = error.errors()
        problems = [problem_line(each, Recipe) for each in errors[:MAX_PROBLEMS]]
        raise RecipeError(source, problems, len(errors) - len(problems)) from None


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a file, not validated; errors as in `load_recipe`."""
    require_recipe(path)
    if path.stat().st_size > MAX_BYTES:
        raise RecipeError(str(path), [f"$: {path.stat().st_size:,} bytes, expected at most {MAX_BYTES:,}"])
    try:
        with bounded(f"read {path.name}", size_of(path)):
            data = read_yaml(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(str(path), [f"$: not UTF-8 at byte {error.start}"]) from None
    except NOT_YAML as error:
        raise RecipeError(str(path), ["$: not YAML: " + " ".join(str(error).split())[:300]]) from None
    if not isinstance(data, dict):
        raise RecipeError(str(path), [f"$: found {type(data).__name__}, expected a mapping of fields"])
    return data


def anchor(data: dict[str, Any], folder: Path) -> None:
    """Resolve the paths in a recipe against its folder, so that it runs from anywhere."""
    for section, key in PATHS:
        values = data.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            if key == "model":
                values[key] = _anchored_model(values[key], folder)
                continue
            with contextlib.suppress(RuntimeError):  # ~user of an unknown user
                values[key] = str(Path(values[key]).expanduser())
            values[key] = str(folder / values[key])
    source = data.get("source")
    bound = source.get("bind") if isinstance(source, dict) else None
    if isinstance(bound, dict):
        bound.update({name: str(folder / file) for name, file in _bound_files(bound).items()})


def _bound_files(bound: Mapping[str, Any]) -> dict[str, str]:
    """The files among the values of bound inputs, by input."""
    return {name: value for name, value in bound.items() if isinstance(value, str) and value.endswith(FILES)}


def _anchored_model(model: str, folder: Path) -> str:
    """Resolve a model that is a path: an ONNX file, its folder, or an existing folder after `hf:`."""
    path = model
    with contextlib.suppress(RuntimeError):  # as above
        path = str(folder / Path(model).expanduser())
    if model.endswith(".onnx") or (not is_built_in(model) and graph_folder(path) is not None):
        return path
    name = model.removeprefix("hf:")
    if name != model and is_dir(folder / name):
        return f"hf:{folder / name}"
    return model


def _set(data: dict[str, Any], override: str, source: str) -> None:
    path, separator, text = override.partition("=")
    keys, option = path.split("."), f"--set {cut(repr(override))}"
    if not separator or not all(keys):
        raise RecipeError(source, [f"{option}: expected a.b=value"])
    if len(keys) > MAX_DEPTH:
        raise RecipeError(source, [f"--set: {len(keys):,} nested keys, expected at most {MAX_DEPTH}"])
    at = data
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise RecipeError(source, [f"{option}: $.{cut(key)} is not a mapping"])
    try:
        at[keys[-1]] = read_yaml(text)
    except NOT_YAML as error:
        raise RecipeError(source, [f"{option}: " + " ".join(str(error).split())[:200]]) from None


# --- A recipe as the text of a file -----------------------------------------------------------------------------------


def recipe_text(recipe: Recipe, folder: Path, comment: str) -> str:
    """Return a recipe as YAML for a file in `folder`, with paths relative to that folder, so that the recipe can be
    moved together with its files. `comment` is the comment at the top."""
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
    bound = data.get("source", {}).get("bind", {})
    bound.update({name: _relative(Path(file), folder) for name, file in _bound_files(bound).items()})
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return f"# {comment}\n{text}"


def _relative(path: Path, folder: Path) -> str:
    """The path relative to a recipe in `folder`; absolute if that is not possible, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return str(path.resolve())


# --- The name of a field's value in the name of a recipe --------------------------------------------------------------


# Characters that a recipe's name may not have.
_OTHER = re.compile(r"[^A-Za-z0-9._]+")


def value_name(field: str, value: Any) -> str:
    """The name of a value: its text; with the field's name for a number or a flag; for a path, the last part without
    its suffix; "" for a mapping, and for a text without letters."""
    if isinstance(value, dict):
        return ""
    if isinstance(value, list):
        parts = [value_name("", each) for each in value]
        return "_".join(parts) if all(parts) and parts else ""
    if isinstance(value, str):
        path = PurePosixPath(value.replace("\\", "/"))
        return _clean(path.stem if len(path.parts) > 1 else value)
    text = "none" if value is None else str(value).lower()
    return _clean(f"{field.rpartition('.')[2]}{text}")


def _clean(text: str) -> str:
    return _OTHER.sub("-", text).strip("-._")
