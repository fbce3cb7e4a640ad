"""What a machine's state means for what is measured there, and the one command that mends it.

One row for each thing: it looks at what the machine says and gives an `Advice`, or None where there is nothing to say.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.throttling import FIRMWARE, OCCURRED
from vitdeploy.devices.agent.board import BoardState
from vitdeploy.devices.registry import Device
from vitdeploy.devices.transport import typed

DAY = 24 * 3600.0
# Governors that raise the clock with the load, some time after it came.
FOLLOW = ("ondemand", "conservative", "schedutil", "interactive")
# Drivers whose "powersave" follows the load too: the CPU decides.
AUTONOMOUS = ("intel_pstate", "amd-pstate-epp")
NEAR_LIMIT = 5.0  # degrees Celsius
LEAST_AVAILABLE = 512 << 20
SMALL_MEMORY = 4e9
SWAPPED = 64 << 20


@dataclass(frozen=True)
class Advice:
    """`found` there, `why` it matters, `fix`: the command, or what to do where no command helps. `blocks`: nothing runs
    there until it is mended."""

    name: str
    found: str
    why: str
    fix: str
    blocks: bool = False


@dataclass(frozen=True)
class Seen:
    """A machine, with the words of `describe_host`, what it says of itself, and all its memory in bytes."""

    device: Device
    host: Mapping[str, str]
    board: BoardState
    memory_bytes: int = 0

    def on(self, line: str) -> str:
        return typed(self.device, line)

    @property
    def jetson(self) -> bool:
        # The device trees of Jetsons name them "NVIDIA Orin Nano Developer Kit", "Jetson-AGX".
        words = set(self.host.get("board", "").replace("-", " ").split())
        return bool(self.board.tegra_release) or bool({"Jetson", "Orin"} & words)


def advise(seen: Seen) -> list[Advice]:
    """Everything to say of a machine, what blocks it first."""
    found = [advice for row in ROWS if (advice := row(seen)) is not None]
    return sorted(found, key=lambda advice: not advice.blocks)


def advice_lines(found: Sequence[Advice]) -> list[str]:
    """For people: what was found, why it matters, what mends it."""
    return [
        line
        for each in found
        for line in (
            f"{'refused' if each.blocks else 'check':<7}  {each.name}: {each.found}",
            f"         why: {each.why}",
            f"         fix: {each.fix}",
        )
    ]


def _bits(seen: Seen) -> Advice | None:
    """Raspberry Pi OS (32-bit) boots a 64-bit kernel on a Raspberry Pi 4 and 5 by default, whose machine is "aarch64".

    Sources: Raspberry Pi documentation, "config.txt", arm_64bit; piwheels/packages#119 (no aarch64).
    """
    if seen.board.bits == 64:
        return None
    machine, on = seen.host.get("machine", ""), seen.board.system or "a system"
    kernel = f" on a 64-bit kernel ({machine})" if machine in ("aarch64", "x86_64") else f" ({machine})"
    return Advice(
        "32-bit Python",
        f"Python {seen.host.get('python', '')} of {on} has 32 bits{kernel}",
        "no runtime has wheels for it, on PyPI or on piwheels, which builds only what has a source package",
        "install a 64-bit system, such as Raspberry Pi OS (64-bit), whose Python takes its wheels from PyPI",
        blocks=True,
    )


def _clock(seen: Seen) -> Advice | None:
    if seen.board.clock is None or not math.isfinite(seen.board.clock):
        return None
    behind = time.time() - seen.board.clock
    if abs(behind) <= DAY:
        return None
    day = time.strftime("%Y-%m-%d", time.gmtime(min(max(seen.board.clock, 0.0), 1e11)))
    fix = "sudo timedatectl set-ntp true"
    if seen.device.host is not None:  # the clock of here, in the shell of whoever types it
        fix = typed(seen.device, "sudo date -s @$(date +%s)", expand=True)
    return Advice(
        "clock",
        f"it is {day} there, {abs(behind) / DAY:,.0f} days {'behind' if behind > 0 else 'ahead'}",
        "jobs do not mind, but pip and apt refuse certificates that are not valid on that day",
        fix,
    )


def _power_mode(seen: Seen) -> Advice | None:
    best = fastest_mode(seen.board.power_modes)
    if not seen.board.power_mode or best in ("", seen.board.power_mode):
        return None
    return Advice(
        "power mode",
        f"{seen.board.power_mode}, and this board has {best}",
        "clocks are capped and CPUs may be off: all times are of this mode, and with other CPUs it is another machine",
        f"{seen.on(f'sudo nvpmodel -m {seen.board.power_modes[best]}')}  (if the product runs in that mode)",
    )


def fastest_mode(modes: Mapping[str, int]) -> str:
    """The mode without a limit (MAXN, MAXN_SUPER), or else that of most watts; "" without any."""

    def watts(name: str) -> float:
        found = re.search(r"(\d+)W", name)
        return float("inf") if name.startswith("MAXN") else float(found[1]) if found else 0.0

    return max(modes, key=lambda name: (watts(name), name), default="")


def _governor(seen: Seen) -> Advice | None:
    autonomous = seen.board.driver in AUTONOMOUS
    slow = [name for name in seen.board.governors if name == "powersave" and not autonomous]
    late = [name for name in seen.board.governors if name in FOLLOW]
    if not slow and not late:
        return None
    name = (slow or late)[0]
    pin = "sudo jetson_clocks" if seen.jetson else "echo performance | sudo tee " + GOVERNORS
    return Advice(
        "governor",
        f"{name} on {seen.board.governors[name]} CPUs",
        "the clock stays at its lowest"
        if slow
        else "the clock rises some time after the load: a query after a pause is slow",
        seen.on(pin),
    )


GOVERNORS = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"


def _throttled(seen: Seen) -> Advice | None:
    """What of a Raspberry Pi's bits, cooling devices and counts is of now."""
    throttle, bits = seen.board.throttle, seen.board.throttle.bits or 0
    now = [text for bit, text in FIRMWARE.items() if bits >> bit & 1]
    now += [f"{name} is in state {state}" for name, state in throttle.cooling.items() if state > 0]
    if not now:
        return None
    return Advice(
        "throttling now",
        "; ".join(now),
        "the board is slower than it can be: bench leaves such blocks out, and decides nothing if too few are left",
        POWER if bits & 1 else HEAT,
    )


def _unseen(seen: Seen) -> Advice | None:
    """vcgencmd asks the firmware through a device file of the group `video`, where the kernel has no file for it."""
    if not seen.host.get("board", "").startswith("Raspberry Pi") or seen.board.throttle.bits is not None:
        return None
    return Advice(
        "throttling",
        "the firmware's state cannot be read: no vcgencmd, or no right to use it",
        "a bench does not notice that the board throttles",
        f"{seen.on('sudo usermod -aG video $USER')}, then log in again  (vcgencmd is of Raspberry Pi OS)",
    )


POWER = "another supply or a shorter cable: 5.1 V and 3 A for a Raspberry Pi 4, 5 A for a 5"
HEAT = "a fan or a heat sink; let it cool down first"


def _has_throttled(seen: Seen) -> Advice | None:
    bits, counts = seen.board.throttle.bits or 0, seen.board.throttle.counts
    since = [text for bit, text in FIRMWARE.items() if bits >> (bit + OCCURRED) & 1 and not bits >> bit & 1]
    since += [f"{count:,} times {name}" for name, count in counts.items() if count > 0]
    if not since:
        return None
    power = bits >> OCCURRED & 1 or any("current" in name for name, count in counts.items() if count)
    lower = "a lower power mode (`nvpmodel -m`), or another supply" if seen.jetson else POWER
    return Advice(
        "throttled since boot",
        "; ".join(since),
        "under load it will again, and numbers of before may be those of a slower board",
        lower if power else HEAT,
    )


def _near_limit(seen: Seen) -> Advice | None:
    margin = seen.board.margin
    if margin is None or margin > NEAR_LIMIT:
        return None
    words = f"{margin:.0f} degrees below" if margin > 0 else "at"
    return Advice(
        "heat",
        f"{seen.board.zone} is {words} the temperature at which it slows down",
        "a bench heats it further: blocks will be left out",
        HEAT,
    )


def _memory(seen: Seen) -> Advice | None:
    board = seen.board
    if board.available_bytes is None:
        return None
    swapped = (board.swap_bytes or 0) - (board.swap_free_bytes or 0)
    words = (
        f"{board.available_bytes / 1e6:,.0f} MB available, {(board.swap_free_bytes or 0) / 1e6:,.0f} MB of swap free"
    )
    if board.available_bytes < LEAST_AVAILABLE:
        why = "a compiler or an engine that needs more is ended by the kernel"
        return Advice(
            "memory", words, why, f"{seen.on('ps -eo rss,args --sort=-rss | head')}  (and end what is not needed)"
        )
    if swapped > SWAPPED:
        why = "what is swapped out comes back while something is measured"
        return Advice(
            "memory", f"{words}, {swapped / 1e6:,.0f} MB in use", why, seen.on("sudo swapoff -a && sudo swapon -a")
        )
    if not board.swap_bytes and 0 < seen.memory_bytes < SMALL_MEMORY:
        why = "a compiler may need several times a model's size for a moment, and is ended by the kernel without swap"
        return Advice("memory", words, why, seen.on(SWAP))
    return None


SWAP = "sudo fallocate -l 2G /swapfile && sudo chmod 600 /swapfile && sudo mkswap /swapfile && sudo swapon /swapfile"

Row = Callable[[Seen], Advice | None]
ROWS: tuple[Row, ...] = (
    _bits,
    _clock,
    _power_mode,
    _governor,
    _throttled,
    _has_throttled,
    _unseen,
    _near_limit,
    _memory,
)
