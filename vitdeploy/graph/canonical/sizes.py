"""Sizes of axes that are known up to the free sizes of the graph's inputs: 197, batch, 4*batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A product of a factor (not 0) and of named sizes, each at least 1; never a plain number.

    Products and exact quotients stay such a product, and that is all that view, window and head arithmetic needs.
    """

    factor: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return "*".join([*([str(self.factor)] if self.factor != 1 else []), *self.names])


class Unknown:
    """A size of which nothing is known. One instance, `UNKNOWN`, equal to nothing but itself."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
Extent = int | Size | Unknown


def times(a: Extent, b: Extent) -> Extent:
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return UNKNOWN
    if a == 0 or b == 0:
        return 0
    factor = 1
    names: list[str] = []
    for part in (a, b):
        factor *= part if isinstance(part, int) else part.factor
        names += [] if isinstance(part, int) else part.names
    return _size(factor, names)


def divided(a: Extent, b: Extent) -> Extent:
    """a / b where that leaves no remainder whatever the named sizes are; numbers are divided as ONNX does it."""
    if isinstance(a, Unknown) or isinstance(b, Unknown) or b == 0:
        return UNKNOWN
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a >= 0) == (b > 0) else -1)
    factor, names = (a, []) if isinstance(a, int) else (a.factor, list(a.names))
    divisor, divisor_names = (b, ()) if isinstance(b, int) else (b.factor, b.names)
    for name in divisor_names:
        if name not in names:
            return UNKNOWN
        names.remove(name)
    return _size(factor // divisor, names) if factor % divisor == 0 else UNKNOWN


def plus(a: Extent, b: Extent) -> Extent:
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return UNKNOWN
    if a == 0 or b == 0:
        return b if a == 0 else a
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, Size) and isinstance(b, Size) and a.names == b.names:
        return _size(a.factor + b.factor, list(a.names))
    return UNKNOWN


def minus(a: Extent, b: Extent) -> Extent:
    return plus(a, times(b, -1))


def modulo(a: Extent, b: Extent) -> Extent:
    """The remainder, for numbers that are not negative and for exact quotients."""
    if isinstance(a, int) and isinstance(b, int):
        return a % b if a >= 0 and b > 0 else UNKNOWN
    return UNKNOWN if isinstance(divided(a, b), Unknown) else 0


def equal(a: Extent, b: Extent) -> Extent:
    """1, 0 or UNKNOWN. A named size is at least 1, so it differs from 0 and from all negative numbers."""
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        return UNKNOWN
    if a == b:
        return 1
    low, high = (a, b) if isinstance(a, int) else (b, a)
    if isinstance(low, int) and isinstance(high, int):
        return 0
    if isinstance(low, int) and isinstance(high, Size) and high.factor > 0:
        return 0 if low < high.factor or low % high.factor else UNKNOWN
    return UNKNOWN


def chosen(condition: Extent, a: Extent, b: Extent) -> Extent:
    if isinstance(condition, int):
        return a if condition else b
    return a if a == b else UNKNOWN


def product(sizes: tuple[Extent, ...]) -> Extent:
    total: Extent = 1
    for size in sizes:
        total = times(total, size)
    return total


def _size(factor: int, names: list[str]) -> Extent:
    return Size(factor, tuple(sorted(names))) if names and factor else factor
