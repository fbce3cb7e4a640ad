"""Turn pydantic's error about an invalid value into one line with its path."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, Tag


def problem_line(error: Any, model: type[BaseModel]) -> str:
    """`$.a.b: found, wanted`, of an error at a field of `model` or below."""
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
    members: dict[str, type[BaseModel]] = {}
    for part in location:
        if str(part) in members:  # the tag of a union's member
            model = members[str(part)]
        elif str(part) in model.model_fields:
            members = dict(_models(model.model_fields[str(part)].annotation))
            model = next(iter(members.values()), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The models in an annotation, by their tags, or their names where they have none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation.__name__, annotation
    arguments = get_args(annotation)
    tag = next((each.tag for each in arguments if isinstance(each, Tag)), None)
    for argument in arguments:
        for name, model in _models(argument):
            yield tag or name, model
