"""The names of Arm's cores, by what their main ID register (MIDR_EL1) says: who designed them, and which part it is.

`/proc/cpuinfo` shows the register as "CPU implementer" and "CPU part". Numbers and names: Linux,
arch/arm64/include/asm/cputype.h, and util-linux, sys-utils/lscpu-arm.c, both read in November 2026; Apple's M3 and M4
are of pytorch/cpuinfo, pull request 385, and 0x00 of QEMU, whose "max" is no real core. Designs older than Armv8 are
left out. To add a core, add a row; one that is missing is named by its numbers, which tell machines apart as well.
"""

from __future__ import annotations

# By implementer: the word in front of its cores' names, and their names by part.
CORES: dict[int, tuple[str, dict[int, str]]] = {
    # Names of Arm's own need no word in front. 0x00 is no designer: besides QEMU, HiSilicon's Hi1910 has it.
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
    """The name of a core. One that the table lacks is named by its numbers, and by as much as the table has of it."""
    vendor, parts = CORES.get(implementer, ("", {}))
    if part in parts:
        return f"{vendor} {parts[part]}".strip()
    return f"{vendor or f'0x{implementer:02x}'} 0x{part:03x} (variant 0x{variant:x})"
