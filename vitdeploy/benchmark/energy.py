"""Energy, if the machine measures it; never 0 if it does not.

Counters of CPU packages (RAPL, through powercap) are read before and after a block. Boards such as NVIDIA's Jetson have
sensors of instantaneous power instead (INA chips, through hwmon), which are read right after the block's last query;
the largest counts, since the rail at the board's input feeds the others. Both include everything that runs there, and
idle power; neither sees the power supply. An engine on a GPU is charged only with what the GPU uses (NVML).

Sources: Linux, Documentation/power/powercap/powercap.rst (energy_uj, max_energy_range_uj; microjoules, for root only
since CVE-2020-8694) and Documentation/hwmon/sysfs-interface.rst (power*_input in microwatts, in*_input in millivolts,
curr*_input in milliamperes).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vitdeploy.benchmark.machine import ROOT, read_number

if TYPE_CHECKING:
    from vitdeploy.runtime.nvidia import GpuEnergy

NOT_THERE, NOT_PERMITTED = "not there", "not permitted"
# "intel-rapl:0" is a package; "intel-rapl:0:0" is a part of one, which the package's counter includes.
PACKAGES = "sys/class/powercap/intel-rapl:[0-9]*"
POWER, CURRENT = "sys/class/hwmon/hwmon*/power*_input", "sys/class/hwmon/hwmon*/curr*_input"


class JouleMeter(Protocol):
    """A source of energy readings. `source` names it, or says why there is none."""

    source: str

    def read(self) -> list[float | None]:
        """The reading to take before and after a block."""
        ...

    def joules(self, before: list[float | None], after: list[float | None], seconds: float) -> float | None:
        """The energy of a block of `seconds` between two readings; None if the source can no longer be read."""
        ...


class GpuMeter:
    """The first GPU, as CUDA counts. `source` is "NVML", or says why there is none."""

    def __init__(self, counter: GpuEnergy | None = None) -> None:
        from vitdeploy.runtime.nvidia import GpuEnergy  # sensors of a board are reported before numpy is there

        self._counter = counter or GpuEnergy()
        works = self._counter.joules() is not None
        self.source = "NVML" if works else NOT_THERE if self._counter.permitted else NOT_PERMITTED

    def read(self) -> list[float | None]:
        return [self._counter.joules()]

    def joules(self, before: list[float | None], after: list[float | None], seconds: float) -> float | None:
        (start,), (end,) = before, after
        return None if start is None or end is None else end - start


class EnergyMeter:
    """The CPU, or the board. `source` is "RAPL" or "power sensor", or says why there is none."""

    def __init__(self, root: Path = ROOT) -> None:
        packages = [path / "energy_uj" for path in sorted(root.glob(PACKAGES)) if path.name.count(":") == 1]
        sensors = [*sorted(root.glob(POWER)), *sorted(root.glob(CURRENT))]
        self._counters = [file for file in packages if read_number(file) is not None]
        self._sensors = [] if self._counters else [file for file in sensors if _watts(file) is not None]
        if self._counters:
            self.source = "RAPL"
        elif self._sensors:
            self.source = "power sensor"
        else:
            self.source = NOT_PERMITTED if packages or sensors else NOT_THERE

    def read(self) -> list[float | None]:
        """Microjoules of every package so far, or watts of every sensor."""
        return [read_number(file) for file in self._counters] or [_watts(file) for file in self._sensors]

    def joules(self, before: list[float | None], after: list[float | None], seconds: float) -> float | None:
        if not self._counters:
            watts = [value for value in after if value is not None]
            return max(watts) * seconds if watts else None
        total = 0.0
        for file, start, end in zip(self._counters, before, after, strict=True):
            if start is None or end is None:
                return None
            # A counter wraps to 0 at the end of its range.
            wrapped = read_number(file.parent / "max_energy_range_uj") or 0.0 if end < start else 0.0
            total += end - start + wrapped
        return total / 1e6


def _watts(file: Path) -> float | None:
    """A sensor's reading: power, or current times voltage of the same channel."""
    value = read_number(file)
    if value is None or file.name.startswith("power"):
        return None if value is None else value / 1e6
    volts = read_number(file.with_name(file.name.replace("curr", "in", 1)))
    return None if volts is None else value / 1e3 * volts / 1e3
