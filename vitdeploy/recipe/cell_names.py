"""What the value of a field is called in the name of a recipe."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

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
