"""Writes the kernel's files of an Arm machine, from the short form of them in `boards/`."""

import re
import struct
from pathlib import Path

FOLDER = Path(__file__).parent / "boards"
NAMES = tuple(sorted(file.stem for file in FOLDER.glob("*.txt")))


def plant(root, name):
    """Write the files of the machine `name` under `root`; returns how many CPUs it has."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    blocks, tail = {}, ""
    for head, body in re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", text, re.MULTILINE):
        if head.startswith("proc/cpuinfo of processor"):
            blocks |= dict.fromkeys(_numbers(head), body)
        elif head.startswith("proc/cpuinfo"):
            tail = f"\n{body}"
        elif head.startswith("caches"):
            for cpu in _numbers(head):
                for index, line in enumerate(body.splitlines()):
                    values = dict(zip(("level", "type", "size"), line.split(), strict=True))
                    folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
                    write(root, {f"{folder}/{key}": f"{value}\n" for key, value in values.items()})
        else:
            write(root, {head: f"{body.strip()}\0" if "device-tree" in head else body})
    lines = "\n".join(f"processor\t: {cpu}\n{body}" for cpu, body in sorted(blocks.items()))
    write(root, {"proc/cpuinfo": lines + tail})
    return len(blocks)


def write(root, files):
    for path, content in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def auxiliary_vector(hwcap, hwcap2):
    """The bytes of /proc/self/auxv of a 64-bit process, among other entries."""
    return b"".join(struct.pack("=QQ", *pair) for pair in ((6, 4096), (16, hwcap), (26, hwcap2), (0, 0)))


def _numbers(head):
    """The CPUs that a head names: "of cpu 0,3-5"."""
    ranges = (part.split("-") for part in head.split()[-1].split(","))
    return [number for first, *last in ranges for number in range(int(first), int((last or [first])[0]) + 1)]
