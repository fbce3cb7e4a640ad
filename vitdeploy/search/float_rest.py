"""What was measured of the float operators of an INT8 engine in bf16, and which precision that makes them have."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.spec import FloatRest

# Of the distance that INT8 has. With enough images any rounding is surely further; layers out of plain INT8, which are
# chosen after it, take back more than this for less time than bf16 saves.
MOST_FURTHER = 0.2


@dataclass(frozen=True)
class FloatRestTable:
    """What was measured of an INT8 placement with its float operators in fp32 and in bf16.

    `ratio`, `low`, `high`: the latency with bf16 over that with fp32, with its 95 % interval. `distances`: mean, of the
    answers of fp32 and of bf16 from the float graph's on the calibration images; `further`: the bounds of the 95 %
    interval of how much further those of bf16 are. Without a measurement `reason` says why. `disturbed`: why the times
    are unreliable, in which case it is fp32. `measured`: ISO date; `device`: as in a latency table.
    """

    target: str
    batch: int
    measured: str
    device: dict[str, str]
    reason: str = ""
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    distances: tuple[float, float] = (0.0, 0.0)
    further: tuple[float, float] = (0.0, 0.0)
    disturbed: str = ""

    @property
    def best(self) -> FloatRest:
        """bf16 if it is surely faster and not surely further from the float graph by more than `MOST_FURTHER`."""
        faster = not self.reason and not self.disturbed and self.high < 1
        return "bf16" if faster and self.further[0] <= MOST_FURTHER * self.distances[0] else "fp32"
