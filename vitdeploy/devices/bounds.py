"""What a device may say at most, whatever is asked: checked before a line is parsed, and before a document is decoded.

A line of the allowed length can still be a document of many times its size in memory, or hold a number that no
arithmetic here takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Of a line: its lists and objects, its quotes (two a text), its values. Latencies are most of a result.
MOST_NESTED, MOST_QUOTES, MOST_VALUES = 2_000_000, 16_000_000, 16_000_000
# Of a document: items of a list or object, but for those of latencies; characters of a text; depth.
MOST_ITEMS, LONGEST_TEXT, DEEPEST = 100_000, 1 << 20, 32
MEASURED = ("latencies_ms", "waiting_ms")
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


def problem_of(document: Any) -> str:
    """What of a parsed document is beyond every measure, with its path; "" for nothing.

    Whole numbers count something, so none is negative. One with a fraction may be: a temperature.
    """
    open_ones: list[tuple[str, Any, int]] = [("$", [document], 0)]
    while open_ones:
        path, container, depth = open_ones.pop()
        for name, value in _items(container):
            found = _problem(name, value, depth)
            if found:
                return f"{path}{name[:60]}: {found}" if depth else f"{path}: {found}"
            if isinstance(value, dict | list):
                open_ones.append((f"{path}{name[:60]}" if depth else path, value, depth + 1))
    return ""


def _items(container: Any) -> Iterator[tuple[str, Any]]:
    """What is in a list or an object, each with the end of its path."""
    if isinstance(container, list):
        return ((f"[{index}]", item) for index, item in enumerate(container))
    return ((f".{key}", item) for key, item in container.items() if key not in OURS)


def _problem(name: str, value: Any, depth: int) -> str:
    if isinstance(value, dict | list):
        measured = name[1:] in MEASURED and isinstance(value, list)
        if len(value) > MOST_ITEMS and not measured:
            return f"{len(value):,} items, more than {MOST_ITEMS:,}"
        return f"nested more than {DEEPEST} deep" if depth >= DEEPEST else ""
    if isinstance(value, str):
        return f"a text of {len(value):,} characters" if len(value) > LONGEST_TEXT else ""
    if type(value) is int and not 0 <= value <= LARGEST:
        return f"the number {_short(value)}"
    return f"the number {value:g}" if type(value) is float and not abs(value) <= LARGEST else ""


def _short(value: int) -> str:
    """A whole number, however long."""
    digits = str(abs(value))
    return f"{value}" if len(digits) <= 40 else f"{'-' if value < 0 else ''}{digits[:6]}... of {len(digits):,} digits"
