"""Sizes of axes that are known up to the free sizes of the graph's inputs: 197, batch, 4*batch."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FreeSize:
    """The product of a nonzero factor and named sizes, each at least 1; never a plain number.

    Products and exact quotients have this form too, which suffices for view, window and head arithmetic.
    """

    factor: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return "*".join([*([str(self.factor)] if self.factor != 1 else []), *self.names])


class Unknown:
    """An unknown size. One instance, `UNKNOWN`, equal to nothing but itself."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()
# The range of ONNX's integers, and the limit of names in a product: a file can square a number or a size forty times.
LARGEST, MAX_NAMES = 2**63 - 1, 16
Extent = int | FreeSize | Unknown
Dims = tuple[Extent, ...]


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
    """a / b if it is exact for all values of the named sizes; numbers are divided as in ONNX."""
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
        return _size(a + b, [])
    if isinstance(a, FreeSize) and isinstance(b, FreeSize) and a.names == b.names:
        return _size(a.factor + b.factor, list(a.names))
    return UNKNOWN


def minus(a: Extent, b: Extent) -> Extent:
    return plus(a, times(b, -1))


def modulo(a: Extent, b: Extent) -> Extent:
    """The remainder, for non-negative numbers and exact quotients; else UNKNOWN."""
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
    if isinstance(low, int) and isinstance(high, FreeSize) and high.factor > 0:
        return 0 if low < high.factor or low % high.factor else UNKNOWN
    return UNKNOWN


def larger(*entries: Extent) -> Extent:
    """The largest, for numbers, for equal sizes, and for 1 and a named size."""
    found = [entry for entry in entries if entry != 1] or [1]
    if all(isinstance(entry, int) for entry in found):
        return max(entry for entry in entries if isinstance(entry, int))
    same = all(entry == found[0] for entry in found) and isinstance(found[0], FreeSize) and found[0].factor > 0
    return found[0] if same else UNKNOWN


def chosen(condition: Extent, a: Extent, b: Extent) -> Extent:
    if isinstance(condition, int):
        return a if condition else b
    return a if a == b else UNKNOWN


def product(sizes: Dims) -> Extent:
    total: Extent = 1
    for size in sizes:
        total = times(total, size)
    return total


def broadcast(*shapes: Dims) -> Dims:
    """The shape that all broadcast to; a free size that meets a number other than 1 is assumed to be that number."""
    rank = max(map(len, shapes))
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    return tuple(_wider(column) for column in columns)


def _wider(column: Sequence[Extent]) -> Extent:
    found = [size for size in column if size != 1]
    numbers = [size for size in found if isinstance(size, int)]
    if numbers or not found:
        return numbers[0] if numbers else 1
    return found[0] if all(size == found[0] for size in found) else UNKNOWN


def view_shape(data: Dims | None, expected: Dims | None) -> list[int] | None:
    """The constant that reshapes `data` to `expected`: -1 for one free size, 0 for a size that keeps its position."""
    if expected is None or any(isinstance(size, Unknown) for size in expected):
        return None
    target, free = [], 0
    for axis, size in enumerate(expected):
        if isinstance(size, int):
            if size == 0:
                return None
            target.append(size)
        elif free and data is not None and axis < len(data) and data[axis] == size:
            target.append(0)
        else:
            target.append(-1)
            free += 1
    return target if free <= 1 else None


def _size(factor: int, names: list[str]) -> Extent:
    if abs(factor) > LARGEST or len(names) > MAX_NAMES:
        return UNKNOWN
    return FreeSize(factor, tuple(sorted(names))) if names and factor else factor
