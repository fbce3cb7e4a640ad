"""A document with one of its values changed."""

from __future__ import annotations

import copy
from typing import Any

# The value of a key that is to be left out.
MISSING = object()


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of plain data with another value at `path`, or without what is there."""
    found = inner = copy.deepcopy(document)
    for key in path[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found
