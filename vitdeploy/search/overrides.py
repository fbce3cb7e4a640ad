"""The result of a mixed-precision search: layers whose precision or ranges differ from those of plain INT8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitdeploy.quantization.prepare import Overrides
from vitdeploy.search.expected import Expected


@dataclass(frozen=True)
class PrecisionOverride:
    """One layer's override. `share`: of its range, if that is clipped; `price_us`: what it adds to the latency of one
    image (negative: it is faster); `left`: the share of the layer's cost that remains."""

    kind: Literal["clipped", "scaled", "float"]
    layer: str
    price_us: float
    left: float = 0.0
    share: float | None = None

    def __str__(self) -> str:
        return {
            "float": f"{self.layer} in float",
            "scaled": f"{self.layer}: hidden channels scaled",
            "clipped": f"{self.layer}: {100 * (self.share or 1):.0f} % of its range",
        }[self.kind]


@dataclass(frozen=True)
class Reached:
    """A mean distance over the images, and the expected loss of a classifier's answers; None for other tasks."""

    distance: float
    expected: Expected | None


@dataclass(frozen=True)
class Taken:
    """A chosen override, and the result that was predicted for it."""

    override: PrecisionOverride
    reached: Reached


@dataclass(frozen=True)
class Mixed:
    """`int8`, `reached`: measured without and with all overrides; `saved_us`: the time that INT8 saves over all layers;
    `met`: whether the budget's bounds are expected to be met, None without any."""

    target: str
    images: int
    int8: Reached
    reached: Reached
    saved_us: float
    taken: tuple[Taken, ...]
    met: bool | None

    @property
    def float_fallback(self) -> tuple[str, ...]:
        """The layers left in float."""
        return tuple(each.override.layer for each in self.taken if each.override.kind == "float")

    @property
    def overrides(self) -> Overrides:
        """The other overrides, of layers that stay in INT8."""
        kept = [each.override for each in self.taken if each.override.layer not in self.float_fallback]
        scaled = tuple(override.layer for override in kept if override.kind == "scaled")
        return Overrides(scaled, {override.layer: override.share for override in kept if override.share is not None})
