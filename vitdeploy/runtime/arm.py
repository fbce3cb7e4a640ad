"""What Linux says of an Arm machine: its cores, their instruction sets and caches, and the board that they sit on.

Everything is read from the kernel's files under `root`, "/" except in tests. Sources: Linux,
arch/arm64/kernel/cpuinfo.c (the blocks of /proc/cpuinfo), arch/arm64/include/uapi/asm/hwcap.h (the bits),
Documentation/ABI/testing/sysfs-devices-system-cpu (caches), sysfs-firmware-ofw (the device tree).
"""

from __future__ import annotations

import functools
import re
import struct
import sys
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.runtime.arm_cores import core_name

# The instruction sets that INT8 and FP16 kernels ask for: the word of /proc/cpuinfo, the entry of the auxiliary vector
# (AT_HWCAP is 16, AT_HWCAP2 is 26), and the bit in it.
INSTRUCTION_SETS: dict[str, tuple[int, int]] = {
    "asimd": (16, 1),
    "asimdhp": (16, 10),
    "asimddp": (16, 20),
    "i8mm": (26, 13),
    "bf16": (26, 14),
    "sve": (16, 22),
    "sve2": (26, 1),
    "sme": (26, 23),
    "sme2": (26, 37),
}
LONGEST_NAME = 80
# What a vendor leaves in the tables of its firmware if it does not fill them in.
UNFILLED = re.compile(r"o\.?e\.?m|default string|not specified|unknown|system (product|manufacturer)|^0*$|^none$", re.I)


@dataclass(frozen=True)
class Core:
    """One CPU of /proc/cpuinfo: its number, and what its main ID register says."""

    number: int
    implementer: int
    part: int
    variant: int

    @property
    def name(self) -> str:
        return core_name(self.implementer, self.part, self.variant)


def read_cores(cpuinfo: str) -> tuple[Core, ...]:
    """The CPUs that are on, as /proc/cpuinfo lists them; none if it is that of another architecture.

    Old kernels write the register once for all CPUs: one without a register of its own has that of its neighbour.
    """
    found: list[tuple[int, tuple[int, int, int] | None]] = []
    for number, block in _blocks(cpuinfo):
        implementer, part, variant = (_number(block.get(f"CPU {name}")) for name in ("implementer", "part", "variant"))
        register = None if implementer is None or part is None else (implementer, part, variant or 0)
        found.append((number, register))
    known = next((register for _, register in found if register is not None), None)
    cores = []
    for number, register in found:
        known = register or known
        if known is not None:
            cores.append(Core(number, *known))
    return tuple(cores)


def _blocks(cpuinfo: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Each CPU's number and fields. A block begins with "processor", and what no CPU has begins another one."""
    for text in re.split(r"^(?=processor[ \t]*:)", cpuinfo, flags=re.MULTILINE):
        pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in pairs}
        if fields.get("processor", "").isdecimal():
            yield int(fields["processor"]), fields


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def describe_cores(cores: Collection[Core], usable: Collection[int]) -> str:
    """All kinds of cores and how many there are of each, "4x Cortex-A76 + 4x Cortex-A55"; "" for no cores.

    A process that may not use all of them has its own in front, as its times are of those: "4x Cortex-A55 of 4x
    Cortex-A76 + 4x Cortex-A55". On a machine with one kind of cores the number of usable ones says as much.
    """
    there = _counted(cores)
    if len(kinds(cores)) < 2:
        return there
    own = _counted([core for core in cores if core.number in usable])
    return there if own in (there, "") else f"{own} of {there}"


def kinds(cores: Iterable[Core]) -> tuple[str, ...]:
    """The names of the kinds of cores, larger part numbers first: in most machines those are the larger cores. The
    order of the CPUs' numbers would not do, as it may differ from kernel to kernel."""
    ordered = sorted(cores, key=lambda core: (core.implementer, core.part, core.variant), reverse=True)
    return tuple(dict.fromkeys(core.name for core in ordered))


def _counted(cores: Collection[Core]) -> str:
    counts = Counter(core.name for core in cores)
    return " + ".join(f"{counts[name]}x {name}" for name in kinds(cores))


def instruction_sets(cpuinfo: str, root: Path) -> str:
    """The instruction sets that matter here and that this process may use; "unknown" without any.

    They are those of the auxiliary vector, which the kernel, or an emulator, gives each process: /proc/cpuinfo may be
    that of the machine below an emulator. Where it cannot be read, or is that of a 32-bit process, whose bits mean
    something else, they are the words that all blocks of /proc/cpuinfo have.
    """
    vector = _auxiliary_vector(root)
    if vector is not None:
        found = {name for name, (entry, bit) in INSTRUCTION_SETS.items() if vector.get(entry, 0) >> bit & 1}
    else:
        words = [set(block["Features"].split()) for _, block in _blocks(cpuinfo) if "Features" in block]
        found = set.intersection(*words) if words else set()
    return " ".join(name for name in INSTRUCTION_SETS if name in found) or "unknown"


def _auxiliary_vector(root: Path) -> dict[int, int] | None:
    """The entries of this process's auxiliary vector, pairs of machine words (proc_pid_auxv(5))."""
    if sys.maxsize < 2**32:
        return None
    try:
        content = (root / "proc/self/auxv").read_bytes()
    except OSError:
        return None
    pairs = struct.iter_unpack("=QQ", content[: len(content) // 16 * 16])
    vector = {key: value for key, value in pairs if key}
    return vector if 16 in vector else None


def board_name(cpuinfo: str, root: Path) -> str:
    """The name of the board: of the device tree, or of the line that Raspberry Pi's kernel adds to /proc/cpuinfo, as a
    container hides the device tree, or vendor and product in the tables of a server's firmware (DMI). "" for none."""
    for file in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        if name := _text(root / file):
            return name
    line = re.search(r"^Model[ \t]*:(.*)$", cpuinfo, re.MULTILINE)
    if line and line[1].strip():
        return _clean(line[1])
    product = _text(root / "sys/class/dmi/id/product_name")
    vendor = _text(root / "sys/class/dmi/id/sys_vendor")
    if not product or UNFILLED.search(product):
        return ""
    return product if not vendor or UNFILLED.search(vendor) or product.startswith(vendor) else f"{vendor} {product}"


def _text(path: Path) -> str:
    try:
        return _clean(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _clean(text: str) -> str:
    """One line without control characters: strings of a device tree end with a NUL."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_NAME].strip()


@functools.lru_cache(maxsize=4)
def describe_caches(cores: tuple[Core, ...], root: Path) -> str:
    """The caches that each kind of core sees: "L1d 64K, L1i 64K, L2 512K, L3 2048K", with the kind's name in front
    where there are several. "" if the kernel does not show them. Cores of one kind may differ: both are told."""
    found: dict[str, list[str]] = {}
    for core in sorted(cores, key=lambda core: core.number):
        caches = _caches(root / f"sys/devices/system/cpu/cpu{core.number}/cache")
        if caches and caches not in found.setdefault(core.name, []):
            found[core.name].append(caches)
    told = {name: " or ".join(sorted(found[name])) for name in kinds(cores) if found.get(name)}
    if len(kinds(cores)) < 2:
        return "".join(told.values())
    return "; ".join(f"{name}: {caches}" for name, caches in told.items())


def _caches(folder: Path) -> str:
    """One core's caches, from the innermost on."""
    suffixes = {"Data": "d", "Instruction": "i", "Unified": ""}
    found = []
    for index in folder.glob("index[0-9]*"):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        if level and size and kind in suffixes:
            found.append((level, suffixes[kind], size))
    return ", ".join(f"L{level}{suffix} {size}" for level, suffix, size in sorted(found))
