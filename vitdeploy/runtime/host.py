"""Describes this machine: the words that go with every measured number."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from vitdeploy.runtime import arm
from vitdeploy.runtime.emulation import emulator, family

ROOT = Path("/")
ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
# With any of these, INT8 products are summed up in 32 bits.
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}
# The same of Arm: the instructions sdot and udot, smmla and ummla.
DOT_PRODUCT = {"asimddp", "i8mm"}

MOST_THREADS = 4096


def describe_host(root: Path = ROOT, machine: str = "", cpus: Collection[int] | None = None) -> dict[str, str]:
    """CPU model, its instruction sets that matter here, cores, operating system, Python.

    On Arm Linux also "board", its name, and "caches", each where the kernel shows it. An emulated process has
    "emulated": what runs it. In a control group that has less CPU time than its CPUs give, "quota" says so, and "cores"
    are no more than that. Whatever is keyed by these facts is of one model of board; the facts of x86 are what they
    always were, so that keys stay.

    Args:
        root: where the kernel's files lie.
        machine: the architecture of this process; "" for what Python says.
        cpus: the numbers of the CPUs that it may use; None for what the system says.
    """
    machine = machine or platform.machine()
    cpuinfo, own = _read(root / "proc/cpuinfo"), family(machine)
    # A foreign /proc/cpuinfo is another sign: kernels before 6.1 do not tell their architecture.
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
    """The files of /sys, and names in the firmware, are those of the real machine: an emulated process has none."""
    cores = arm.read_cores(cpuinfo)
    named = arm.describe_cores(cores, cpus)
    facts = {
        "cpu": named or ("" if cpuinfo else platform.processor()) or f"a CPU of {machine}",
        "isa": arm.instruction_sets(cpuinfo, root),
        "board": "" if below else arm.board_name(cpuinfo, root),
        "caches": "" if below else arm.describe_caches(cores, root),
    }
    return {name: text for name, text in facts.items() if text}


def name_host(host: Mapping[str, str]) -> list[str]:
    """The words that name the machine of `describe_host`, such as a report's environment: its board, its CPU, and what
    emulates it."""
    words = [host[key] for key in ("board", "cpu") if host.get(key)]
    return [*words, *([f"emulated by {host['emulated']}"] if "emulated" in host else [])]


def _foreign(cpuinfo: str, own: str) -> str:
    """The other architecture, if /proc/cpuinfo is that of a CPU which is not of the `own` one."""
    if own == "Arm" and "\nvendor_id" in cpuinfo and "CPU implementer" not in cpuinfo:
        return "x86"
    return "Arm" if own == "x86" and "CPU implementer" in cpuinfo else ""


def saturates(isa: str) -> bool:
    """Whether INT8 products may saturate on a CPU with the instruction sets `isa`, as `describe_host` writes them.

    x86 without VNNI multiplies u8 by s8 with vpmaddubsw, which adds two products in 16 bits: 255 * 127 * 2 is more than
    32,767. Source: oneDNN, "Nuances of int8 computations".

    Arm without dot products adds two products of s8 in 16 bits too, but an activation of u8 is moved to -128..127
    first: 128 * 127 * 2 is less than 32,768. Weights of -128 would be too much; vitdeploy makes none. Sources: ONNX
    Runtime, onnxruntime/core/mlas/lib/aarch64/QgemmS8S8KernelNeon.S (smull, smlal, sadalp); Arm Compute Library, which
    OpenVINO uses, src/core/NEON/kernels/arm_gemm/kernels/a64_gemm_s8_4x4/generic.cpp (smull, smlal2, sadalp).

    Any other CPU, and an unknown one, is taken for one that does not.
    """
    found = set(isa.split())
    return bool(found & {"avx2", "avx512f"}) and not found & VNNI


def usable_cores(root: Path = ROOT) -> int:
    """The number of CPUs that this process may keep busy: those it may run on, and no more than the quota of its
    control groups, rounded up."""
    return _within(cpu_quota(root), _affinity())


def default_threads(*variables: str, root: Path = ROOT) -> int:
    """The threads of a runtime where nobody gave their number: that of the first of these environment variables that
    has one, then of OMP_NUM_THREADS; then as many as the quota of the control groups allows; 0 where nothing says so,
    which leaves it to the runtime."""
    for variable in (*variables, "OMP_NUM_THREADS"):
        value = os.environ.get(variable, "").partition(",")[0].strip()
        if value.isascii() and value.isdigit() and 0 < int(value) <= MOST_THREADS:
            return int(value)
    return cores if (cores := usable_cores(root)) < len(_affinity()) else 0


def cpu_quota(root: Path = ROOT) -> float | None:
    """The CPUs whose time the control groups of this process get; None without a limit, or where it cannot be read.

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
    """The seconds so far that a quota kept threads of this process's control groups from running; None if unknown."""
    found = []
    for folder in _groups(root):
        stat = _read(folder / "cpu.stat")
        for name, unit in (("throttled_usec", 1e6), ("throttled_time", 1e9)):
            if match := re.search(rf"^{name} (\d+)$", stat, re.MULTILINE):
                found.append(int(match[1]) / unit)
    return max(found, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of the control groups of this process that may limit its CPU time, and of those above them. In a
    container the path may be that on the host, of which only the upper folders are there."""
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
