"""Describes this machine: the words that go with every measured number."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from vitdeploy.runtime.emulation import emulator

ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm")
# With any of these, INT8 products are summed up in 32 bits.
VNNI = {"avx512_vnni", "avx_vnni", "amx_int8"}


def describe_host() -> dict[str, str]:
    """CPU model, its instruction sets that matter here, cores, operating system, Python; "emulated" where it is."""
    model, flags = _cpuinfo()
    facts = {
        "cpu": model or platform.processor() or platform.machine(),
        "isa": " ".join(flag for flag in ISA_FLAGS if flag in flags) or "unknown",
        "cores": str(usable_cores()),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    return {**facts, "emulated": found} if (found := emulator()) else facts


def saturates(isa: str) -> bool:
    """Whether INT8 products may saturate on a CPU with the instruction sets `isa`, as `describe_host` writes them.

    x86 without VNNI multiplies u8 by s8 with vpmaddubsw, which adds two products in 16 bits: 255 * 127 * 2 is more than
    32,767. Any other CPU, and an unknown one, is taken for one that does not. Source: oneDNN, "Nuances of int8
    computations".
    """
    found = set(isa.split())
    return bool(found & {"avx2", "avx512f"}) and not found & VNNI


def usable_cores() -> int:
    """The number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpuinfo() -> tuple[str, set[str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "", set()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name", ""), set((named.get("flags") or named.get("Features") or "").split())
