"""What a device may say at most, whatever is asked: checked before a line is parsed, and before a document is decoded.

A line of the allowed length can still be a document of many times its size in memory, or hold a number that no
arithmetic here takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of a line: its lists and objects, its quotes (two a text), its values. Latencies are most of a result.
MOST_NESTED, MOST_QUOTES, MOST_VALUES = 2_000_000, 16_000_000, 16_000_000
# Of a document: items of a list or object; characters of a text; depth.
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 100_000, 1 << 20, 32
# A number for each query, however many there were; `results.check_run` looks at each.
MEASURED = (".latencies_ms", ".waiting_ms")
# Operations a second are the largest numbers that there are.
LARGEST = 1e18
# What the host has chosen, and compares: tokens may have negative numbers there.
OURS = ("sequence", "protocol")


def problem_of_line(line: bytes) -> str:
    """Why a line is not even parsed; "" for one that is."""
    counts = {
        "lists and objects": (line.count(b"[") + line.count(b"{"), MOST_NESTED),
        "quotes": (line.count(b'"'), MOST_QUOTES),
        "values": (line.count(b","), MOST_VALUES),
    }
    return next((f"{found:,} {what}, more than {most:,}" for what, (found, most) in counts.items() if found > most), "")


def problem_of(value: Any, path: str = "$", depth: int = 0) -> str:
    """What of a parsed document is beyond every measure, with its path; "" for nothing. `path` and `depth` are those of
    `value` in the document.

    Whole numbers count something, so none is negative. One with a fraction may be: a temperature.
    """
    if not isinstance(value, dict | list):
        odd = _problem(value)
    elif path.endswith(MEASURED) and set(map(type, value)) <= {int, float}:
        odd = ""
    elif len(value) > MOST_ITEMS:
        odd = f"{len(value):,} items, more than {MOST_ITEMS:,}"
    elif depth >= DEEPEST:
        odd = f"nested more than {DEEPEST} deep"
    else:
        return next(filter(None, (problem_of(item, path + name, depth + 1) for name, item in _items(value))), "")
    return f"{path}: {odd}" if odd else ""


def _items(container: dict[str, Any] | list[Any]) -> Iterator[tuple[str, Any]]:
    """What is in a list or an object, each with the end of its path."""
    if isinstance(container, list):
        return ((f"[{index}]", item) for index, item in enumerate(container))
    return ((f".{key[:60]}", item) for key, item in container.items() if key not in OURS)


def _problem(value: object) -> str:
    if isinstance(value, str):
        return f"a text of {len(value):,} characters" if len(value) > LONGEST_TEXT else ""
    if type(value) is int and not 0 <= value <= LARGEST:
        return f"the number {_short(value)}"
    return f"the number {value:g}" if type(value) is float and not abs(value) <= LARGEST else ""


def _short(value: int) -> str:
    """A whole number, however long."""
    digits = str(abs(value))
    return f"{value}" if len(digits) <= 40 else f"{'-' if value < 0 else ''}{digits[:6]}... of {len(digits):,} digits"
