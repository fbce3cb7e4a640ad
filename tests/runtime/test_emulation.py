"""Emulators are recognised by what the kernel shows beside them. `make arm64` meets a real one."""

import pytest

from vitdeploy.benchmark import run
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.errors import CapabilityError
from vitdeploy.pipeline.early import check_recipe
from vitdeploy.runtime import host as emulation
from vitdeploy.runtime.host import describe_host, emulator

ARM, ARM64, X86, X86_64, RISCV = 40, 183, 3, 62, 243


@pytest.fixture
def kernel(tmp_path):
    """A /proc: the program that the kernel runs, by name and e_machine, and the architecture that it calls its own."""

    def made(name=None, machine=0, arch=None):
        thread, settings = tmp_path / "proc" / "thread-self", tmp_path / "proc" / "sys" / "kernel"
        for folder in (thread, settings):
            folder.mkdir(parents=True)
        if name is not None:
            (tmp_path / name).write_bytes(b"\x7fELF\2\1\1" + bytes(9) + b"\2\0" + machine.to_bytes(2, "little"))
            (thread / "exe").symlink_to(tmp_path / name)
        if arch is not None:
            (settings / "arch").write_text(f"{arch}\n")
        return tmp_path

    return made


@pytest.mark.parametrize(
    ("shown", "machine", "expected"),
    [
        (("qemu-aarch64-static", X86_64, "x86_64"), "aarch64", "qemu-aarch64-static on x86"),
        (("rosetta", ARM64, "aarch64"), "x86_64", "rosetta on Arm"),
        (("qemu-arm", X86_64), "armv7l", "qemu-arm on x86"),  # a kernel before 6.1
        (("python3", ARM64, "x86_64"), "aarch64", "python3 on x86"),  # an emulator that hides itself better
        ((None, 0, "x86_64"), "aarch64", "an emulator on x86"),
        (("qemu-aarch64", RISCV, "riscv64"), "aarch64", "qemu-aarch64 on riscv64"),
        (("qemu-aarch64", ARM64, "aarch64"), "aarch64", "qemu-aarch64 on aarch64"),  # another CPU of the same kind
        (("python3", ARM64, "aarch64"), "aarch64", ""),
        (("python3", ARM, "aarch64"), "aarch64", ""),  # Raspberry Pi OS with 32 bits
        (("python3", X86, "x86_64"), "i686", ""),
        (("python3", RISCV, "riscv64"), "riscv64", ""),
        ((None,), "aarch64", ""),
    ],
)
def test_what_the_kernel_runs_tells_an_emulator(kernel, shown, machine, expected):
    assert emulator(kernel(*shown), machine) == expected


def test_a_program_that_is_none_tells_nothing(kernel):
    root = kernel("python3", ARM64)
    for content in (b"", b"\x7fELF", b"#!/bin/sh\n" + bytes(99)):
        (root / "python3").write_bytes(content)
        assert emulator(root, "aarch64") == ""


def test_nothing_is_timed_in_an_emulator(monkeypatch):
    assert emulator() == "" and "emulated" not in describe_host()
    monkeypatch.setattr(emulation, "emulator", lambda: "qemu-aarch64 on x86")
    for time in (lambda: run.run_benchmark([object.__new__(_Named)], Protocol()), lambda: check_recipe(None)):
        with pytest.raises(CapabilityError, match="cannot measure times in an emulator") as caught:
            time()
        assert "qemu-aarch64 on x86" in caught.value.found and "compile and verify work here" in caught.value.fix


class _Named:
    artifact = "one"
