"""How far devices of one kind are apart, and which of them are not to be counted among them.

Two boards of one model differ by their silicon, their cooling and their supply. One that throttled is another machine
while it does; one that is far from the others has something that they have not. Both are named, and left out of what is
said of the kind: their own numbers stay.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from vitdeploy.document.bench import DeviceBench
from vitdeploy.runtime.host import name_host

# What makes two machines one kind: not their system and Python, which are named where they differ.
SAME = ("board", "cpu", "isa", "cores", "quota", "machine", "emulated")
# The share of blocks in which a device may throttle: one in a long run is its governor.
THROTTLED_SHARE = 0.1
# How far a device may be from the median of its kind: beyond three standard deviations, estimated by the median of the
# deviations (Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation", Journal of the American
# Statistical Association 88:1273-1283, equation 1.1), and by a tenth, which is more than boards of one model differ.
DEVIATIONS, NORMAL, LEAST_APART = 3.0, 1.4826, 0.10
# Of fewer nobody can say which one is odd.
LEAST_DEVICES = 3


@dataclass(frozen=True)
class Quarantined:
    """A device that is not counted among its kind, and why."""

    device: str
    reason: str


@dataclass(frozen=True)
class Apart:
    """The median latencies of one artifact on the devices that count, in ms: their median, and the fastest and the
    slowest of them. `spread`: by what share the slowest is slower than the fastest."""

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
    """Devices of one kind: those that count, those that do not, and how far the former are apart."""

    name: str
    devices: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    artifacts: tuple[Apart, ...]


def kinds_of(found: Mapping[str, DeviceBench]) -> list[DeviceKind]:
    """Every kind of which two devices or more were measured; `found` is by the name of the device."""
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
    """Why a device throttled too much to be counted; "" where it did not."""
    for row in bench.results:
        for name, scenario in row.scenarios.items():
            seen = scenario.throttled
            if seen is not None and seen.blocks > THROTTLED_SHARE * seen.of:
                return f"{row.artifact}, {name}: {seen}"
    return ""


def _other_kernels(found: Mapping[str, DeviceBench]) -> dict[str, str]:
    """Devices whose engines run in other kernels than those of most others: their times are not of the same thing."""
    odd: dict[str, str] = {}
    for artifact in dict.fromkeys(name for bench in found.values() for name in bench.engines):
        ran = {device: _ran(bench, artifact) for device, bench in found.items() if artifact in bench.engines}
        usual = statistics.mode(ran.values())
        if 2 * list(ran.values()).count(usual) > len(ran):
            odd |= {
                device: f"{artifact} runs {text} there, and {usual} elsewhere"
                for device, text in ran.items()
                if text != usual
            }
    return odd


def _ran(bench: DeviceBench, artifact: str) -> str:
    engine = bench.engines[artifact]
    return ", ".join(f"{count} {precision}" for precision, count in sorted(engine.kernels.items())) or engine.precision


def _far(artifact: str, times: Mapping[str, float]) -> dict[str, str]:
    """Devices that are far from the median of their kind."""
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
