"""Frozen dataclasses as JSON values and back, strictly.

`encode` turns one into JSON values; `decode` turns JSON values back and reports every invalid field. The metadata of a
field may give it another name in JSON ("alias"), if that is not a Python name, or omit it when it has its default
(`SPARSE`).
"""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

# The metadata of a field that is written only if it differs from its default.
SPARSE = {"sparse": True}
# Maximum nesting of lists and objects in a field that takes any JSON value.
DEEPEST = 64


@dataclasses.dataclass(frozen=True)
class Extensible:
    """The metadata in `Annotated` of a type that other packages extend; `whole`: the type with all extensions; `ours`:
    the type of this package, if it needs imports."""

    whole: Callable[[], Any]
    ours: Callable[[], Any] | None = None


def encode(value: Any) -> Any:
    """JSON values of a dataclass tree: dicts, lists (also of arrays), strings, finite numbers, booleans, None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {_key(f): encode(item) for f, item in found.items() if not f.metadata.get("sparse") or item != f.default}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # an array, without importing numpy


def _key(f: dataclasses.Field[Any]) -> str:
    return str(f.metadata.get("alias", f.name))


T = TypeVar("T")


class DecodeError(ValueError):
    """The JSON values do not fit the dataclass; `problems` lists every problem with its `$.path`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def decode(cls: type[T], data: Any) -> T:
    """Build the frozen dataclass `cls` from JSON values, strictly: no unknown fields, no missing fields, no coercion.

    Raises:
        DecodeError: with all problems, each as "$.path: found, expected".
    """
    problems: list[str] = []
    value = _decode(cls, data, "$", problems)
    if problems:
        raise DecodeError(problems)
    return typing.cast(T, value)


def _decode(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return _plain(data, path, problems)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, path, problems)
    if origin is Annotated:
        extensible, misfits = kind.__metadata__[0], list[str]()
        value = _decode(extensible.ours() if extensible.ours else args[0], data, path, misfits)
        return _decode(extensible.whole(), data, path, problems) if misfits else value
    if origin is Literal:
        return _expect(data in args, data, path, f"one of {', '.join(map(str, args))}", problems)
    if origin in (typing.Union, types.UnionType):
        attempts: list[list[str]] = []
        for choice in args:
            attempt: list[str] = []
            value = _decode(choice, data, path, attempt)
            if not attempt:
                return value
            if dataclasses.is_dataclass(choice) or typing.get_origin(choice) is Annotated:
                attempts.append(attempt)
        if isinstance(data, dict) and attempts:  # report the problems of the class that knows most of the fields
            problems.extend(sorted(attempts, key=_unlikeness)[0])
            return data
        return _expect(False, data, path, " or ".join(_name(choice) for choice in args), problems)
    if origin is tuple:
        if not isinstance(data, list):
            return _expect(False, data, path, "a list", problems)
        if args[-1] is Ellipsis:
            kinds = [args[0]] * len(data)
        elif len(args) != len(data):
            return _expect(False, data, path, f"a list of {len(args)} values", problems)
        else:
            kinds = list(args)
        return tuple(
            _decode(item_kind, item, f"{path}[{i}]", problems)
            for i, (item_kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is list:
        if not isinstance(data, list):
            return _expect(False, data, path, "a list", problems)
        return [_decode(args[0], item, f"{path}[{i}]", problems) for i, item in enumerate(data)]
    if getattr(origin, "__name__", "") in ("ndarray", "NDArray"):  # the second is an alias of its own from NumPy 2.5 on
        return _decode_array(data, path, problems)
    if origin is dict:
        if not isinstance(data, dict):
            return _expect(False, data, path, "an object", problems)
        return {key: _decode(args[1], item, f"{path}.{key}", problems) for key, item in data.items()}
    if kind is float:
        # Not math.isfinite: it fails on integers beyond the range of float.
        fits = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= sys.float_info.max
        return float(data) if fits else _expect(False, data, path, "a finite number", problems)
    if kind is types.NoneType:
        return _expect(data is None, data, path, "null", problems)
    return _expect(type(data) is kind, data, path, _name(kind), problems)


def _unlikeness(misfits: list[str]) -> tuple[int, int]:
    """The number of unknown fields among the problems, and the number of problems."""
    return sum(problem.endswith(": unknown field") for problem in misfits), len(misfits)


def _plain(data: Any, path: str, problems: list[str]) -> Any:
    """Any JSON value: finite numbers, and nested no deeper than readers can follow."""
    pending = [(data, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST or (isinstance(value, float) and abs(value) > sys.float_info.max):
            return _expect(False, value, path, f"finite numbers, at most {DEEPEST} lists or objects deep", problems)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        pending += [(each, depth + 1) for each in inner]
    return data


def _decode_array(data: Any, path: str, problems: list[str]) -> Any:
    """A float64 array [n]; numpy is installed, as the dataclass with the field imports it."""
    import numpy as np

    values: list[Any] = data if isinstance(data, list) else [None]
    fits = all(type(item) in (float, int) and abs(item) <= sys.float_info.max for item in values)
    return np.array(data, np.float64) if fits else _expect(False, data, path, "a list of finite numbers", problems)


# Cached: a report has hundreds of values of few classes, and each hint is source text.
_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def _decode_dataclass(cls: type, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _expect(False, data, path, "an object", problems)
    hints = _hints(cls)
    values: dict[str, Any] = {}
    before = len(problems)
    for f in dataclasses.fields(cls):
        key = _key(f)
        if key in data:
            values[f.name] = _decode(hints[f.name], data[key], f"{path}.{key}", problems)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append(f"{path}.{key}: missing")
    known = {_key(f) for f in dataclasses.fields(cls)}
    problems.extend(f"{path}.{key}: unknown field" for key in data if key not in known)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # from the class's own check
        problems.append(f"{path}: {error}")
        return None


def _expect(fits: bool, data: Any, path: str, expected: str, problems: list[str]) -> Any:
    if not fits:
        problems.append(f"{path}: found {str(data)[:60]!r}, expected {expected}")
    return data


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Annotated:
        return _name(typing.get_args(kind)[0])
    if typing.get_origin(kind) is typing.Union:
        return " or ".join(map(_name, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "a list"
    if dataclasses.is_dataclass(kind):
        return "an object"
    names = {str: "a string", int: "an integer", bool: "true or false", float: "a number", types.NoneType: "null"}
    return names.get(kind, str(kind))
