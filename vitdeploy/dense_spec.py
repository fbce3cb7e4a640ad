"""What the outputs of no task are.

Plain data like all of `spec`, which joins them into `Postprocess`. No two of these classes have the same fields, so
that JSON values say of which class they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


class Output(Protocol):
    """An output by name and shape, such as `spec.TensorSpec`."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int | str, ...]: ...


@dataclass(frozen=True)
class TensorsSpec:
    """Outputs of no task. `exact` are those that are no floats (indices, counts, masks of booleans): they are equal or
    not, and have no distance."""

    exact: tuple[str, ...] = ()

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number."""
        return [name for name in outputs if name not in self.exact]

    def number_of_classes(self, outputs: Iterable[Output]) -> int | None:
        """None: nobody says what the numbers mean."""
        return None
