"""Whether an emulator runs this process: answers are then to be trusted as far as the emulator is, times never."""

from __future__ import annotations

import platform
from pathlib import Path

from vitdeploy.errors import CapabilityError

ROOT = Path("/")
# By the words of `uname -m`: what one kernel runs natively, of 64 and of 32 bits.
FAMILIES = {
    **dict.fromkeys(("x86_64", "amd64", "i386", "i486", "i586", "i686"), "x86"),
    **dict.fromkeys(("aarch64", "arm64", "armv6l", "armv7l", "armv8l"), "Arm"),
}
# e_machine of the ELF header (System V ABI, "ELF header"; elf.h): 386, ARM, x86-64 and AArch64.
ELF_MACHINES = {3: "x86", 62: "x86", 40: "Arm", 183: "Arm"}


def family(machine: str = "") -> str:
    """ "x86" or "Arm" of an architecture as `uname -m` calls it, by default of this machine's; "" of any other."""
    return FAMILIES.get(machine or platform.machine(), "")


def emulator(root: Path = ROOT, machine: str = "") -> str:
    """What runs this process instead of the CPU, such as "qemu-aarch64 on x86"; "" where nothing shows it.

    An emulator of user space shows its programs the machine that they expect: `uname`, /proc/cpuinfo, /proc/self/exe.
    The kernel knows better: the program that it runs in this thread is the emulator, of the real CPU's instruction set
    (/proc/thread-self/exe, Linux 3.17 and newer), and it names its own architecture (/proc/sys/kernel/arch, 6.1 and
    newer). A whole emulated machine, with a kernel of its own, is not recognised.

    Args:
        root: where the kernel's files lie.
        machine: the architecture of this process; "" for what Python says.
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
    """Raise CapabilityError in an emulated process, whose times say nothing of the machine that it takes itself for."""
    if found := emulator():
        raise CapabilityError(
            "nothing is timed in an emulator",
            found=f"this process is emulated: {found}",
            wanted=f"a real {platform.machine()} machine",
            fix="bench on a real one; compile and verify work here",
        )


def _program(link: Path) -> tuple[str, str]:
    """The name of the program that the kernel runs, and the family of its instruction set; "" of what is not shown."""
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
