"""Reading a recipe: its YAML, what is overridden, and everything that is wrong with it."""

import contextlib
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vitdeploy.errors import InputError, MissingFileError, RecipeError
from vitdeploy.graph.io.bound import FILES
from vitdeploy.limits import bounded, size_of
from vitdeploy.models.names import graph_folder, is_built_in
from vitdeploy.paths import is_dir, is_file
from vitdeploy.recipe.recipe import FUNCTION, SECTIONS, Recipe
from vitdeploy.yaml_values import MAX_DEPTH, NOT_YAML, read_yaml

# --- Turn pydantic's error about an invalid value into one line with its path -----------------------------------------


# Characters of a line, and of a text that it quotes: names and values are the file's, and may be as long as that.
MAX_LINE, MAX_QUOTED = 1000, 200


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """A text out of a recipe or an override, as an error quotes it."""
    return text if len(text) <= most else f"{text[:most]}..."


def problem_line(error: Any, model: type[BaseModel]) -> str:
    """`$.a.b: found, expected`, of an error at a field of `model` or below."""
    return cut(_line(error, model), MAX_LINE)


def _line(error: Any, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden":
        name, siblings = str(error["loc"][-1]), _fields_at(error["loc"][:-1], model)
        near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
        path = _path(error["loc"][:-1]) + "." + (name if name.isidentifier() else ascii(name))
        return f"{path}: unknown field; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(siblings)}")
    path = _path(error["loc"])
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    return f"{path}: {message[:1].lower()}{message[1:]} (found {str(error['input'])[:60]!r})"


def _path(location: tuple[int | str, ...]) -> str:
    """`$.a.b[0]`. pydantic adds the name of the union's member to a location; it is no part of the recipe."""
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
# The field that says that a file is a grid of recipes, and in which version of the format.
GRID = "grid"
# That are told of a recipe: each of its values may be one.
MAX_PROBLEMS = 100
# Fields that name files: relative to the recipe, so that it runs from anywhere.
PATHS = (
    *(("source", key) for key in ("model", "checkpoint", "labels", "text_features", "normal")),
    *(("data", key) for key in ("path", "annotations", "texts", "inputs")),
)


def load_recipe(path: Path, overrides: Sequence[str] = (), function: str | None = None) -> Recipe:
    """Read, override and validate. Paths in the file are relative to it; paths in overrides to the working folder.

    Args:
        overrides: "a.b=value" each, the value in YAML.
        function: the user's own model, which the command line names. The recipe names none then, and no code ever.

    Raises:
        MissingFileError: no such file.
        RecipeError: not YAML, or anything that does not fit: all problems at once.
        InputError: it is a grid of recipes.
    """
    data = read_fields(path)
    if GRID in data and "vitdeploy" not in data:
        told = f"{path} is a grid of recipes"
        raise InputError(
            told, found=f"a file with {GRID}:", expected="one recipe", fix="`vitdeploy sweep` runs all recipes of a grid"
        )
    anchor(data, path.parent)
    for override in overrides:
        _set(data, override, str(path))
    if function is not None:
        data.setdefault("source", {})
    return validate(data, str(path), function)


def given_recipe(recipe: Recipe | str | Path, overrides: Sequence[str] = (), function: str | None = None) -> Recipe:
    """A recipe that was read, as it is, or the one of a file; arguments and errors as in `load_recipe`.

    One that was read takes no overrides.
    """
    if not isinstance(recipe, Recipe):
        return load_recipe(Path(recipe), overrides, function)
    if overrides:
        given = cut(", ".join(overrides))
        told = f"overrides {given}: this recipe was read already; give them where its file is read"
        raise RecipeError("the recipe", [told])
    return recipe


def validate(data: Any, source: str, function: str | None = None) -> Recipe:
    """The recipe that these YAML values are; raises RecipeError with its problems. `function` as for `load_recipe`."""
    try:
        return Recipe.model_validate(data, context={FUNCTION: function})
    except ValidationError as error:
        errors = error.errors()
        told = [problem_line(each, Recipe) for each in errors[:MAX_PROBLEMS]]
        raise RecipeError(source, told, len(errors) - len(told)) from None


def read_fields(path: Path) -> dict[str, Any]:
    """The values of a file that is a mapping of fields, not validated; errors as of `load_recipe`."""
    if not is_file(path):
        told = f"no recipe at {cut(str(path), MAX_LINE)}"
        raise MissingFileError(told, fix="check the path; `vitdeploy run --help` shows a recipe")
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
    """Make the recipe's own paths relative to the recipe, so that it runs from anywhere."""
    for section, key in PATHS:
        values = data.get(section)
        if isinstance(values, dict) and isinstance(values.get(key), str):
            if key == "model":
                values[key] = _anchored_model(values[key], folder)
                continue
            with contextlib.suppress(RuntimeError):  # the home of a user that there is not
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
    """A model is a path where it is an ONNX file, the folder of one, or a folder after `hf:` that is there."""
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
    keys, said = path.split("."), f"--set {cut(repr(override))}"
    if not separator or not all(keys):
        raise RecipeError(source, [f"{said}: expected a.b=value"])
    if len(keys) > MAX_DEPTH:
        raise RecipeError(source, [f"--set: {len(keys):,} keys inside each other, at most {MAX_DEPTH} are read"])
    at = data
    for key in keys[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise RecipeError(source, [f"{said}: $.{cut(key)} is not a mapping"])
    try:
        at[keys[-1]] = read_yaml(text)
    except NOT_YAML as error:
        raise RecipeError(source, [f"{said}: " + " ".join(str(error).split())[:200]]) from None


# --- A recipe as the text of a file -----------------------------------------------------------------------------------


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
    bound = data.get("source", {}).get("bind", {})
    bound.update({name: _relative(Path(file), folder) for name, file in _bound_files(bound).items()})
    text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return f"# {said}\n{text}"


def _relative(path: Path, folder: Path) -> str:
    """The path relative to a recipe in `folder`; absolute if there is none, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return str(path.resolve())


# --- What the value of a field is called in the name of a recipe ------------------------------------------------------


# All others than a recipe's name has.
_OTHER = re.compile(r"[^A-Za-z0-9._]+")


def value_name(field: str, value: Any) -> str:
    """The name of a value: its text; the field's too where it is a number or a flag, which alone says nothing; of a
    path, the last part without its suffix; "" of a mapping, and of a text without letters."""
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
