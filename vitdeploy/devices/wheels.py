"""The versions of the runtimes that still run on an older system: what PyPI has for Linux.

Looked up with `pip download --python-version P --platform manylinux_2_G_ARCH` on 2026-11-23. `pip install` finds the
right one by itself; this is to say beforehand what it will find.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wheel:
    """The newest version for Pythons (3, `python`) to (3, `last`), and the least glibc 2.x that it needs by machine."""

    package: str
    version: str
    python: int
    last: int
    glibc: dict[str, int]


NEWEST = 99
WHEELS = (
    Wheel("onnxruntime", "1.32.0", 11, NEWEST, {"x86_64": 28, "aarch64": 28}),
    Wheel("onnxruntime", "1.23.2", 10, 13, {"x86_64": 27, "aarch64": 27}),
    Wheel("openvino", "2026.4.1", 10, NEWEST, {"x86_64": 28, "aarch64": 35}),
    Wheel("openvino", "2025.4.1", 10, 13, {"x86_64": 17}),
    Wheel("openvino", "2025.2.0", 10, 13, {"aarch64": 31}),
)
RUNTIMES = {wheel.package for wheel in WHEELS}


def newest(package: str, python: tuple[int, int], glibc: tuple[int, int], machine: str) -> str | None:
    """The newest version of a runtime that runs there, of those that vitdeploy works with; None without any."""
    for wheel in WHEELS:
        fits = wheel.python <= python[1] <= wheel.last and python[0] == 3
        least = wheel.glibc.get(machine)
        if wheel.package == package and fits and least is not None and glibc >= (2, least):
            return wheel.version
    return None


def pair(version: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) of what is none."""
    numbers = [int(part) for part in version.split(".") if part.isdecimal()]
    return (numbers[0], numbers[1]) if len(numbers) >= 2 else (0, 0)
