"""The result of a search for layers that are taken out of plain INT8, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitdeploy.search.overrides import Reached

Form = Literal["dynamic", "float"]


@dataclass(frozen=True)
class Raised:
    """Layers out of plain INT8, in `form`: "dynamic" (INT8 weights, and activations that the runtime quantizes) or
    "float"; and why."""

    layers: tuple[str, ...]
    form: Form
    why: str = ""


@dataclass(frozen=True)
class Rung:
    """One set of layers out of plain INT8. `share`: of all MACs. `ratio`, `low`, `high`: the latency over that of plain
    INT8, with the interval; `rounds_ms`: the median latency of each round. `reached`: on the calibration images, by the
    engine itself."""

    layers: tuple[str, ...]
    share: float
    rounds_ms: tuple[float, ...]
    ratio: float
    low: float
    high: float
    reached: Reached


@dataclass(frozen=True)
class HighPrecision:
    """What was measured of layers out of plain INT8, and which of them are: `layers`, in `form`.

    `form`: as in `Raised`. `price`: the most that they may add to the latency, in percent. `int8`: without any, on the
    calibration images. `rungs`: of more and more layers. `why`: what decided. `disturbed`: why the times are
    unreliable, in which case only the first rung may be taken. `measured`: ISO date; `device`: as in a latency table.
    The intervals hold jointly at 95 % (Bonferroni).
    """

    target: str
    form: Form
    price: float
    images: int
    measured: str
    device: dict[str, str]
    why: str
    int8: Reached | None = None
    rungs: tuple[Rung, ...] = ()
    layers: tuple[str, ...] = ()
    disturbed: str = ""

    @property
    def raised(self) -> Raised | None:
        return Raised(self.layers, self.form, self.why) if self.layers else None
