"""Compare devices of the same kind, and find outliers among them.

Boards of one model differ in silicon, cooling and power supply. Boards that throttled, or whose times are far from the
others', are listed and left out of the statistics of the kind; their own results are kept.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitdeploy.document.bench import DeviceBench
from vitdeploy.runtime.host import name_host

# The facts that define a kind; the system and Python do not count.
SAME = ("board", "cpu", "isa", "cores", "quota", "machine", "emulated")
# The share of blocks in which a device may throttle; single blocks may be due to the governor.
THROTTLED_SHARE = 0.1
# A device is an outlier if it differs from the median of its kind by more than three standard deviations, estimated by
# the median absolute deviation (Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation", Journal of
# the American Statistical Association 88:1273-1283, equation 1.1), and by more than 10 %, which is more than boards of
# one model normally differ.
DEVIATIONS, NORMAL, LEAST_APART = 3.0, 1.4826, 0.10
# With fewer devices, outliers cannot be identified.
LEAST_DEVICES = 3


@dataclass(frozen=True)
class Quarantined:
    """A device that is left out of its kind's statistics, with the reason."""

    device: str
    reason: str


@dataclass(frozen=True)
class Apart:
    """The median latencies of one artifact on the counted devices, in ms: their median, and the fastest and slowest
    device. `spread`: the share by which the slowest is slower than the fastest."""

    artifact: str
    median_ms: float
    least_ms: float
    most_ms: float
    spread: float
    fastest: str
    slowest: str
    devices: int


@dataclass(frozen=True)
class DeviceKind:
    """Devices of one kind: the counted and the quarantined ones, and the spread of the counted ones."""

    name: str
    devices: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    artifacts: tuple[Apart, ...]


def kinds_of(found: Mapping[str, DeviceBench]) -> list[DeviceKind]:
    """Return all kinds with at least two measured devices. `found`: results by device name."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for device, bench in found.items():
        groups.setdefault(tuple(bench.host.get(key, "") for key in SAME), []).append(device)
    return [_kind({device: found[device] for device in devices}) for devices in groups.values() if len(devices) > 1]


def _kind(found: Mapping[str, DeviceBench]) -> DeviceKind:
    odd = {device: reason for device, bench in found.items() if (reason := _throttled(bench))}
    left = {device: bench for device, bench in found.items() if device not in odd}
    odd |= _other_kernels(left)
    left = {device: bench for device, bench in left.items() if device not in odd}
    artifacts = list(dict.fromkeys(row.artifact for bench in left.values() for row in bench.results))
    times = {
        artifact: {device: row.latency_ms.p50 for device, bench in left.items() if (row := bench.row(artifact))}
        for artifact in artifacts
    }
    for artifact, each in times.items():
        odd |= _far(artifact, each)
    counted = {
        artifact: {device: value for device, value in each.items() if device not in odd}
        for artifact, each in times.items()
    }
    return DeviceKind(
        ", ".join(name_host(next(iter(found.values())).host)),
        tuple(device for device in found if device not in odd),
        tuple(Quarantined(device, odd[device]) for device in found if device in odd),
        tuple(_apart(artifact, each) for artifact, each in counted.items() if len(each) > 1),
    )


def _throttled(bench: DeviceBench) -> str:
    """Return why a device throttled too much to count; "" if it did not."""
    for row in bench.results:
        for name, scenario in row.scenarios.items():
            seen = scenario.throttled
            if seen is not None and seen.blocks > THROTTLED_SHARE * seen.of:
                return f"{row.artifact}, {name}: {seen}"
    return ""


def _other_kernels(found: Mapping[str, DeviceBench]) -> dict[str, str]:
    """Return devices whose engines use different kernels from most devices, so that their times are not comparable."""
    odd: dict[str, str] = {}
    for artifact in dict.fromkeys(name for bench in found.values() for name in bench.engines):
        ran = {device: _ran(bench, artifact) for device, bench in found.items() if artifact in bench.engines}
        usual = statistics.mode(ran.values())
        if 2 * list(ran.values()).count(usual) > len(ran):
            odd |= {
                device: f"{artifact} runs {text}, but {usual} on the other devices"
                for device, text in ran.items()
                if text != usual
            }
    return odd


def _ran(bench: DeviceBench, artifact: str) -> str:
    engine = bench.engines[artifact]
    return ", ".join(f"{count} {precision}" for precision, count in sorted(engine.kernels.items())) or engine.precision


def _far(artifact: str, times: Mapping[str, float]) -> dict[str, str]:
    """Return the outliers: devices that are far from the median of their kind."""
    if len(times) < LEAST_DEVICES:
        return {}
    logs = {device: math.log(value) for device, value in times.items()}
    middle = statistics.median(logs.values())
    usual = NORMAL * statistics.median(abs(value - middle) for value in logs.values())
    limit = max(DEVIATIONS * usual, math.log1p(LEAST_APART))
    return {
        device: f"{artifact} takes {times[device]:.3g} ms, {math.exp(value - middle):.2f} times the median of its kind"
        for device, value in logs.items()
        if abs(value - middle) > limit
    }


def _apart(artifact: str, times: Mapping[str, float]) -> Apart:
    fastest, slowest = min(times, key=lambda each: times[each]), max(times, key=lambda each: times[each])
    least, most = times[fastest], times[slowest]
    return Apart(
        artifact, statistics.median(times.values()), least, most, most / least - 1, fastest, slowest, len(times)
    )
