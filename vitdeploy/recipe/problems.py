"""Turn pydantic's error about an invalid value into one line with its path."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel

from vitdeploy.recipe.postprocess import SECTIONS

# Characters of a line, and of a text that it quotes: names and values are the file's, and may be as long as that.
MAX_LINE, MAX_QUOTED = 1000, 200


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """A text out of a recipe or an override, as an error quotes it."""
    return text if len(text) <= most else f"{text[:most]}..."


def problem_line(error: Any, model: type[BaseModel]) -> str:
    """`$.a.b: found, wanted`, of an error at a field of `model` or below."""
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
