"""Damage to JSON values: a value of another type somewhere, a key gone, repeated or made up; and damage to its text."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.faults.malformed import bytewise
from tests.faults.malformed.places import ODD_NAMES

Path = tuple[Any, ...]
Change = Callable[[random.Random, Any], Any]


def deep(levels: int) -> Any:
    found: Any = 0
    for _ in range(levels):
        found = [found]
    return found


# Values that a field may have instead of its own. The last are texts for `json.dumps` only.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**30,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "1",
    "\x1b[2J",
    "x" * 100_000,
    [],
    [[[]]],
    [None],
    [-1, 2],
    [1] * 10_000,
    ["a", "a"],
    {},
    {"": {}},
    {"a": None},
    {str(i): i for i in range(5000)},
)


def paths(value: Any, at: Path = ()) -> Iterator[Path]:
    """Every place in a value but its root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


def parent(value: Any, path: Path) -> Any:
    for key in path[:-1]:
        value = value[key]
    return value


def changed(chance: random.Random, value: Any, *, times: int = 1) -> Any:
    """Another value in one place or several."""
    found = copy.deepcopy(value)
    for _ in range(times):
        places = list(paths(found))
        if not places:
            break
        path = chance.choice(places)
        parent(found, path)[path[-1]] = copy.deepcopy(chance.choice((*VALUES, *ODD_NAMES)))
    return found


def without(chance: random.Random, value: Any) -> Any:
    """One place less."""
    found = copy.deepcopy(value)
    path = chance.choice(list(paths(found)))
    del parent(found, path)[path[-1]]
    return found


def grown(chance: random.Random, value: Any) -> Any:
    """A key or an item that nobody knows, or one a second time."""
    found = copy.deepcopy(value)
    holders = [found, *(parent(found, path)[path[-1]] for path in paths(found))]
    holder = chance.choice([each for each in holders if isinstance(each, dict | list)])
    if isinstance(holder, list):
        holder.append(copy.deepcopy(chance.choice(holder)) if holder and chance.random() < 0.5 else None)
    else:
        holder[chance.choice(("unknown", "", "__class__", "format", "\u202e", "k" * 10_000))] = 0
    return found


def wrapped(chance: random.Random, value: Any) -> Any:
    """One level more or less than there should be."""
    found = copy.deepcopy(value)
    path = chance.choice(list(paths(found)))
    inner = parent(found, path)[path[-1]]
    parent(found, path)[path[-1]] = chance.choice(([inner], {"value": inner}, deep(20), deep(900)))
    return found


def damaged_text(chance: random.Random, text: str) -> bytes:
    """The text of a JSON document as no writer makes it."""
    data = text.encode("utf-8", "surrogatepass")
    middle = chance.randrange(1, max(2, len(data) - 1))
    return chance.choice(
        (
            data[:middle],
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16", "surrogatepass"),
            data + data,
            data + b"\0",
            data[:middle] + b"\xff\xfe" + data[middle:],
            data.replace(b"{", b'{"a": NaN, ', 1),
            data.replace(b"{", b'{"a": ' + b"9" * 10_000 + b", ", 1),
            data.replace(b"{", b'{"a": ' + b"[" * 100_000 + b", ", 1),
            data.replace(b"{", b'{"a": "\\ud800", ', 1),
            data.replace(b"{", b'{"a": 1, "a": 2, ', 1),
            data.replace(b"{", b'{"a": 1e99999, ', 1),
            data.replace(b",", b",,", 1),
            b"[" * 200_000,
            b"{" * 200_000,
            b'{"a":' * 100_000,
            b"null",
            b"[]",
            b"{}",
            b'"text"',
            b"0",
            b" " * 1_000_000,
        )
    )


def add_each(case: Callable[[str], Callable[[Change], object]], text_of: Callable[[Any], str] = json.dumps) -> None:
    """Add the classes of damage that every document can have. `case(name)` takes (chance, document) -> another one, or
    its text; `text_of` gives the text of a whole one."""
    case("a value changed")(changed)
    case("several values changed")(lambda chance, value: changed(chance, value, times=4))
    case("a field gone")(without)
    case("a field too much")(grown)
    case("a level too much")(wrapped)
    case("damaged text")(lambda chance, value: damaged_text(chance, text_of(value)))
    case("damaged bytes")(
        lambda chance, value: chance.choice(list(bytewise.MUTATIONS.values()))(chance, text_of(value).encode())
    )
