"""Describe this machine: its CPU, cores, caches, board and limits."""

import functools
import math
import os
import platform
import re
import struct
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CapabilityError

# --- Names of Arm cores, by designer and part in their main ID register (MIDR_EL1) ------------------------------------
# `/proc/cpuinfo` shows the register as "CPU implementer" and "CPU part". Numbers and names: Linux,
# arch/arm64/include/asm/cputype.h, and util-linux, sys-utils/lscpu-arm.c, both read in November 2026; Apple's M3 and
# M4: pytorch/cpuinfo, pull request 385; 0x00: QEMU, whose "max" is not a real core. Designs older than Armv8 are left
# out. To add a core, add a row; a core without a row is named by its numbers, which also distinguish machines.


# By implementer: the prefix of its cores' names, and the names by part.
CORES: dict[int, tuple[str, dict[int, str]]] = {
    # Arm's own names have no prefix. 0x00 does not identify a designer: QEMU and HiSilicon's Hi1910 both use it.
    0x00: ("", {0x051: "QEMU max"}),
    0x41: (
        "",
        {
            **{0xD01: "Cortex-A32", 0xD02: "Cortex-A34", 0xD03: "Cortex-A53", 0xD04: "Cortex-A35"},
            **{0xD05: "Cortex-A55", 0xD06: "Cortex-A65", 0xD07: "Cortex-A57", 0xD08: "Cortex-A72"},
            **{0xD09: "Cortex-A73", 0xD0A: "Cortex-A75", 0xD0B: "Cortex-A76", 0xD0C: "Neoverse-N1"},
            **{0xD0D: "Cortex-A77", 0xD0E: "Cortex-A76AE", 0xD40: "Neoverse-V1", 0xD41: "Cortex-A78"},
            **{0xD42: "Cortex-A78AE", 0xD43: "Cortex-A65AE", 0xD44: "Cortex-X1", 0xD46: "Cortex-A510"},
            **{0xD47: "Cortex-A710", 0xD48: "Cortex-X2", 0xD49: "Neoverse-N2", 0xD4A: "Neoverse-E1"},
            **{0xD4B: "Cortex-A78C", 0xD4C: "Cortex-X1C", 0xD4D: "Cortex-A715", 0xD4E: "Cortex-X3"},
            **{0xD4F: "Neoverse-V2", 0xD80: "Cortex-A520", 0xD81: "Cortex-A720", 0xD82: "Cortex-X4"},
            **{0xD83: "Neoverse-V3AE", 0xD84: "Neoverse-V3", 0xD85: "Cortex-X925", 0xD87: "Cortex-A725"},
            **{0xD88: "Cortex-A520AE", 0xD89: "Cortex-A720AE", 0xD8A: "C1-Nano", 0xD8B: "C1-Pro"},
            **{0xD8C: "C1-Ultra", 0xD8E: "Neoverse-N3", 0xD8F: "Cortex-A320", 0xD90: "C1-Premium"},
        },
    ),
    0x42: ("Broadcom", {0x100: "Brahma-B53", 0x516: "ThunderX2"}),
    0x43: (
        "Cavium",
        {
            **{0x0A0: "ThunderX", 0x0A1: "ThunderX-88XX", 0x0A2: "ThunderX-81XX", 0x0A3: "ThunderX-83XX"},
            **{0x0AF: "ThunderX2-99xx", 0x0B0: "OcteonTX2", 0x0B1: "OcteonTX2-98XX", 0x0B2: "OcteonTX2-96XX"},
            **{0x0B3: "OcteonTX2-95XX", 0x0B4: "OcteonTX2-95XXN", 0x0B5: "OcteonTX2-95XXMM"},
            **{0x0B6: "OcteonTX2-95XXO", 0x0B8: "ThunderX3-T110"},
        },
    ),
    0x46: ("Fujitsu", {0x001: "A64FX", 0x003: "MONAKA"}),
    0x48: ("HiSilicon", {0xD01: "TSV110", 0xD02: "HIP09", 0xD06: "HIP12", 0xD40: "Cortex-A76", 0xD41: "Cortex-A77"}),
    0x4E: ("NVIDIA", {0x000: "Denver", 0x003: "Denver 2", 0x004: "Carmel", 0x010: "Olympus"}),
    0x50: ("APM", {0x000: "X-Gene"}),
    0x51: (
        "Qualcomm",
        {
            **{0x001: "Oryon", 0x002: "Oryon", 0x201: "Kryo", 0x205: "Kryo", 0x211: "Kryo"},
            **{
                0x800: "Falkor-V1/Kryo-2XX-Gold",
                0x801: "Kryo-2XX-Silver",
                0x802: "Kryo-3XX-Gold",
                0x803: "Kryo-3XX-Silver",
            },
            **{0x804: "Kryo-4XX-Gold", 0x805: "Kryo-4XX-Silver", 0xC00: "Falkor", 0xC01: "Saphira"},
        },
    ),
    0x53: ("Samsung", {0x001: "Exynos-M1", 0x002: "Exynos-M3", 0x003: "Exynos-M4", 0x004: "Exynos-M5"}),
    0x61: (
        "Apple",
        {
            **{0x020: "Icestorm-A14", 0x021: "Firestorm-A14", 0x022: "Icestorm-M1", 0x023: "Firestorm-M1"},
            **{0x024: "Icestorm-M1-Pro", 0x025: "Firestorm-M1-Pro", 0x028: "Icestorm-M1-Max"},
            **{0x029: "Firestorm-M1-Max", 0x030: "Blizzard-A15", 0x031: "Avalanche-A15", 0x032: "Blizzard-M2"},
            **{0x033: "Avalanche-M2", 0x034: "Blizzard-M2-Pro", 0x035: "Avalanche-M2-Pro"},
            **{0x038: "Blizzard-M2-Max", 0x039: "Avalanche-M2-Max", 0x042: "Sawtooth-M3", 0x043: "Everest-M3"},
            **{0x044: "Sawtooth-M3-Pro", 0x045: "Everest-M3-Pro", 0x048: "Sawtooth-M3-Max"},
            **{0x049: "Everest-M3-Max", 0x052: "Sawtooth-M4", 0x053: "Everest-M4"},
        },
    ),
    0x6D: ("Microsoft", {0xD49: "Azure-Cobalt-100"}),
    0x70: (
        "Phytium",
        {
            **{0x303: "FTC310", 0x660: "FTC660", 0x661: "FTC661", 0x662: "FTC662"},
            **{0x663: "FTC663", 0x664: "FTC664", 0x862: "FTC862"},
        },
    ),
    0xC0: ("Ampere", {0xAC3: "Ampere-1", 0xAC4: "Ampere-1A"}),
}


def core_name(implementer: int, part: int, variant: int) -> str:
    """Return the name of a core; a core without a row is named by its vendor, if known, and its numbers."""
    vendor, parts = CORES.get(implementer, ("", {}))
    if part in parts:
        return f"{vendor} {parts[part]}".strip()
    return f"{vendor or f'0x{implementer:02x}'} 0x{part:03x} (variant 0x{variant:x})"


# --- Description of an Arm machine on Linux ---------------------------------------------------------------------------
# Cores, instruction sets, caches and the board.
#
# Everything is read from the kernel's files under `root`, "/" except in tests. Sources: Linux,
# arch/arm64/kernel/cpuinfo.c (the blocks of /proc/cpuinfo), arch/arm64/include/uapi/asm/hwcap.h (the bits),
# Documentation/ABI/testing/sysfs-devices-system-cpu (caches), sysfs-firmware-ofw (the device tree).


# The instruction sets that INT8 and FP16 kernels use: the word of /proc/cpuinfo, the entry of the auxiliary vector
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
# Placeholders in firmware tables that the vendor did not fill in.
UNFILLED = re.compile(r"o\.?e\.?m|default string|not specified|unknown|system (product|manufacturer)|^0*$|^none$", re.I)


@dataclass(frozen=True)
class Core:
    """One CPU of /proc/cpuinfo: its number, and the fields of its main ID register."""

    number: int
    implementer: int
    part: int
    variant: int

    @property
    def name(self) -> str:
        return core_name(self.implementer, self.part, self.variant)


def read_cores(cpuinfo: str) -> tuple[Core, ...]:
    """Return the online CPUs in /proc/cpuinfo; () for another architecture.

    Old kernels write the register once for all CPUs: a CPU without one gets its neighbour's.
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
    """Each CPU's number and fields. A block begins with "processor"."""
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
    """Return the count of each kind of core, "4x Cortex-A76 + 4x Cortex-A55"; "" for no cores.

    If the process may use only some of them, these come first, because its times depend on them: "4x Cortex-A55 of 4x
    Cortex-A76 + 4x Cortex-A55". With one kind of core, the number of usable cores is enough.
    """
    there = _counted(cores)
    if len(kinds(cores)) < 2:
        return there
    own = _counted([core for core in cores if core.number in usable])
    return there if own in (there, "") else f"{own} of {there}"


def kinds(cores: Iterable[Core]) -> tuple[str, ...]:
    """Return the names of the kinds of cores, larger part numbers first: usually the larger cores. CPU numbers are not
    used, as their order differs between kernels."""
    ordered = sorted(cores, key=lambda core: (core.implementer, core.part, core.variant), reverse=True)
    return tuple(dict.fromkeys(core.name for core in ordered))


def _counted(cores: Collection[Core]) -> str:
    counts = Counter(core.name for core in cores)
    return " + ".join(f"{counts[name]}x {name}" for name in kinds(cores))


def instruction_sets(cpuinfo: str, root: Path) -> str:
    """Return the relevant instruction sets that this process may use; "unknown" without any.

    They come from the auxiliary vector that the kernel, or an emulator, gives each process: under an emulator,
    /proc/cpuinfo may describe the real machine. If the vector cannot be read, or belongs to a 32-bit process, whose
    bits have other meanings, they are the words common to all blocks of /proc/cpuinfo.
    """
    vector = _auxiliary_vector(root)
    if vector is not None:
        found = {name for name, (entry, bit) in INSTRUCTION_SETS.items() if vector.get(entry, 0) >> bit & 1}
    else:
        words = [set(block["Features"].split()) for _, block in _blocks(cpuinfo) if "Features" in block]
        found = set.intersection(*words) if words else set()
    return " ".join(name for name in INSTRUCTION_SETS if name in found) or "unknown"


def _auxiliary_vector(root: Path) -> dict[int, int] | None:
    """This process's auxiliary vector, pairs of machine words (proc_pid_auxv(5))."""
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
    """Return the board's name from the device tree, from Raspberry Pi's line in /proc/cpuinfo (a container hides the
    device tree), or as vendor and product from a server's firmware tables (DMI); "" for none."""
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
    """One line without control characters: device tree strings end with a NUL."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_NAME].strip()


@functools.lru_cache(maxsize=4)
def describe_caches(cores: tuple[Core, ...], root: Path) -> str:
    """Return the caches of each kind of core: "L1d 64K, L1i 64K, L2 512K, L3 2048K", prefixed with the kind's name if
    there are several. "" if the kernel does not show them. Differing cores of one kind are both listed."""
    found: dict[str, list[str]] = {}
    for core in sorted(cores, key=lambda core: core.number):
        caches = _caches(root / f"sys/devices/system/cpu/cpu{core.number}/cache")
        if caches and caches not in found.setdefault(core.name, []):
            found[core.name].append(caches)
    shown = {name: " or ".join(sorted(found[name])) for name in kinds(cores) if found.get(name)}
    if len(kinds(cores)) < 2:
        return "".join(shown.values())
    return "; ".join(f"{name}: {caches}" for name, caches in shown.items())


def _caches(folder: Path) -> str:
    """One core's caches, innermost first."""
    suffixes = {"Data": "d", "Instruction": "i", "Unified": ""}
    found = []
    for index in folder.glob("index[0-9]*"):
        level, kind, size = (_text(index / name) for name in ("level", "type", "size"))
        if level and size and kind in suffixes:
            found.append((level, suffixes[kind], size))
    return ", ".join(f"L{level}{suffix} {size}" for level, suffix, size in sorted(found))


# --- Detection of emulators: under one, answers are as reliable as the emulator, and times are meaningless ------------


ROOT = Path("/")
# By the words of `uname -m`: the 32- and 64-bit architectures that one kernel runs natively.
FAMILIES = {
    **dict.fromkeys(("x86_64", "amd64", "i386", "i486", "i586", "i686"), "x86"),
    **dict.fromkeys(("aarch64", "arm64", "armv6l", "armv7l", "armv8l"), "Arm"),
}
# e_machine of the ELF header (System V ABI, "ELF header"; elf.h): 386, ARM, x86-64 and AArch64.
ELF_MACHINES = {3: "x86", 62: "x86", 40: "Arm", 183: "Arm"}


def family(machine: str = "") -> str:
    """Return "x86" or "Arm" for an architecture named as by `uname -m`, by default this machine's; "" for any
    other."""
    return FAMILIES.get(machine or platform.machine(), "")


def emulator(root: Path = ROOT, machine: str = "") -> str:
    """Return the emulator of this process, such as "qemu-aarch64 on x86"; "" if none is detected.

    A user-space emulator shows its programs the expected machine in `uname`, /proc/cpuinfo and /proc/self/exe. The
    kernel reveals it: the program of this thread is the emulator, built for the real CPU (/proc/thread-self/exe, Linux
    3.17 and newer), and the kernel names its own architecture (/proc/sys/kernel/arch, 6.1 and newer). A fully emulated
    machine with its own kernel is not detected.

    Args:
        root: the folder of the kernel's files.
        machine: the architecture of this process; "" asks Python.
    """
    machine = machine or platform.machine()
    own = family(machine)
    program, runs = _program(root / "proc/thread-self/exe")
    named = program.startswith("qemu-")
    below = next((each for each in (_kernel(root), runs) if own and each not in ("", own)), "")
    if below:
        return f"{program or 'an emulator'} on {below}"
    return f"{program} on {machine}" if named else ""


def require_real_times() -> None:
    """Raise CapabilityError in an emulated process, whose times do not describe the emulated machine."""
    if found := emulator():
        raise CapabilityError(
            "cannot measure times in an emulator",
            found=f"this process is emulated: {found}",
            expected=f"a real {platform.machine()} machine",
            fix="run bench on a real machine; compile and verify work here",
        )


def _program(link: Path) -> tuple[str, str]:
    """The name of the program that the kernel runs, and the family of its instruction set; "" if unknown."""
    try:
        with link.open("rb") as file:
            head = file.read(20)
        name = link.resolve().name
    except OSError:
        return "", ""
    if head[:4] != b"\x7fELF" or len(head) < 20:
        return name, ""
    machine = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
    return name, ELF_MACHINES.get(machine, "another architecture")


def _kernel(root: Path) -> str:
    try:
        word = (root / "proc/sys/kernel/arch").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return FAMILIES.get(word, word)


# --- Description of this machine, recorded with every measured number -------------------------------------------------


ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
# With any of these, INT8 products are accumulated in 32 bits.
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}
# The same on Arm: the instructions sdot and udot, smmla and ummla.
DOT_PRODUCT = {"asimddp", "i8mm"}

MOST_THREADS = 4096


def describe_host(root: Path = ROOT, machine: str = "", cpus: Collection[int] | None = None) -> dict[str, str]:
    """Return the CPU model, its relevant instruction sets, cores, operating system and Python version.

    On Arm Linux also "board" (its name) and "caches", if the kernel shows them. An emulated process has "emulated", the
    emulator. If a control group limits the CPU time, "quota" records it and also limits "cores". Store keys include
    these facts.

    Args:
        root: the folder of the kernel's files.
        machine: the architecture of this process; "" asks Python.
        cpus: the numbers of the CPUs that the process may use; None asks the system.
    """
    machine = machine or platform.machine()
    cpuinfo, own = _read(root / "proc/cpuinfo"), family(machine)
    # A foreign /proc/cpuinfo also shows an emulator: kernels before 6.1 do not name their architecture.
    foreign = _foreign(cpuinfo, own)
    below = emulator(root, machine) or (f"an emulator on {foreign}" if foreign else "")
    cpus, quota = _affinity() if cpus is None else cpus, cpu_quota(root)
    named = _arm_facts(cpuinfo, root, machine, cpus, below) if own == "Arm" else _facts(cpuinfo, machine, below)
    facts = {
        "cpu": named.pop("cpu"),
        "isa": named.pop("isa"),
        "cores": str(_within(quota, cpus)),
        "machine": machine,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    if quota is not None and quota < len(cpus):
        facts["quota"] = f"{quota:g} of {len(cpus)} CPUs"
    return {**facts, **named, **({"emulated": below} if below else {})}


def _facts(cpuinfo: str, machine: str, below: str) -> dict[str, str]:
    model, flags = _cpuinfo(cpuinfo)
    if below and _foreign(cpuinfo, family(machine)):
        model, flags = f"a CPU of {machine}", set()
    return {
        "cpu": model or platform.processor() or machine,
        "isa": " ".join(flag for flag in ISA_FLAGS if flag in flags) or "unknown",
    }


def _arm_facts(cpuinfo: str, root: Path, machine: str, cpus: Collection[int], below: str) -> dict[str, str]:
    """/sys and the firmware's names describe the real machine, so they are left out for an emulated process."""
    cores = read_cores(cpuinfo)
    named = describe_cores(cores, cpus)
    facts = {
        "cpu": named or ("" if cpuinfo else platform.processor()) or f"a CPU of {machine}",
        "isa": instruction_sets(cpuinfo, root),
        "board": "" if below else board_name(cpuinfo, root),
        "caches": "" if below else describe_caches(cores, root),
    }
    return {name: text for name, text in facts.items() if text}


def name_host(host: Mapping[str, str]) -> list[str]:
    """Return the words that name a machine of `describe_host`, such as in a report's environment: board, CPU and
    emulator."""
    words = [host[key] for key in ("board", "cpu") if host.get(key)]
    return [*words, *([f"emulated by {host['emulated']}"] if "emulated" in host else [])]


def _foreign(cpuinfo: str, own: str) -> str:
    """The architecture in /proc/cpuinfo, if it differs from `own`; else ""."""
    if own == "Arm" and "\nvendor_id" in cpuinfo and "CPU implementer" not in cpuinfo:
        return "x86"
    return "Arm" if own == "x86" and "CPU implementer" in cpuinfo else ""


def saturates(isa: str) -> bool:
    """Return whether INT8 products may saturate on a CPU with the instruction sets `isa` (of `describe_host`).

    x86 without VNNI multiplies u8 by s8 with vpmaddubsw, which adds two products in 16 bits: 255 * 127 * 2 is more than
    32,767. Source: oneDNN, "Nuances of int8 computations".

    Arm without dot products also adds two products of s8 in 16 bits, but shifts u8 activations to -128..127 first: 128
    * 127 * 2 is less than 32,768. Weights of -128 would overflow; vitdeploy makes none. Sources: ONNX Runtime,
    onnxruntime/core/mlas/lib/aarch64/QgemmS8S8KernelNeon.S (smull, smlal, sadalp); Arm Compute Library, which OpenVINO
    uses, src/core/NEON/kernels/arm_gemm/kernels/a64_gemm_s8_4x4/generic.cpp (smull, smlal2, sadalp).

    Any other or unknown CPU is assumed not to saturate.
    """
    found = set(isa.split())
    return bool(found & {"avx2", "avx512f"}) and not found & VNNI


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of CPUs that this process may keep busy: its affinity, limited by the quota of its control
    groups, rounded up."""
    return _within(cpu_quota(root), _affinity())


def default_threads(*variables: str, root: Path = ROOT) -> int:
    """Return the default number of threads of a runtime: from the first of these environment variables that is set,
    then OMP_NUM_THREADS, then the quota of the control groups; 0 otherwise, which leaves it to the runtime."""
    for variable in (*variables, "OMP_NUM_THREADS"):
        value = os.environ.get(variable, "").partition(",")[0].strip()
        if value.isascii() and value.isdigit() and 0 < int(value) <= MOST_THREADS:
            return int(value)
    return cores if (cores := usable_cores(root)) < len(_affinity()) else 0


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU limit of this process's control groups, in CPUs; None without a limit, or if it cannot be read.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and Documentation/scheduler/sched-bwc.rst
    (cpu.cfs_quota_us), in microseconds.
    """
    found = []
    for folder in _groups(root):
        whole = _read(folder / "cpu.max").split()
        quota, period = whole if len(whole) == 2 else (_read(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
        if quota.strip().isdecimal() and period.strip().isdecimal() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def quota_waits(root: Path = ROOT) -> float | None:
    """Return the seconds for which a quota has throttled this process's control groups; None if unknown."""
    found = []
    for folder in _groups(root):
        stat = _read(folder / "cpu.stat")
        for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if match := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE):
                found.append(int(match[1]) / unit)
    return max(found, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of the control groups that may limit this process's CPU time, and their parents. In a container the
    path may be the host's, of which only the upper folders exist."""
    found: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            mounts = ["", "unified"]
        elif "cpu" in names.split(","):
            mounts = ["cpu", "cpu,cpuacct", "cpuacct,cpu"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for mount in mounts:
            found += [root.joinpath("sys/fs/cgroup", mount, *parts[:n]) for n in range(len(parts), -1, -1)]
    return found


def _within(quota: float | None, cpus: Collection[int]) -> int:
    return len(cpus) if quota is None else max(1, min(len(cpus), math.ceil(quota)))


def _affinity() -> Collection[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpuinfo(cpuinfo: str) -> tuple[str, set[str]]:
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name", ""), set((named.get("flags") or named.get("Features") or "").split())
