"""What is said of a machine: Arm boards from the files of real ones, emulated processes, and x86 as it always was."""

import itertools
import os
import shutil
import subprocess

import pytest

from tests.runtime.boards import NAMES, auxiliary_vector, plant, write
from vitdeploy.api.inspect import _host_lines
from vitdeploy.runtime import host as arm
from vitdeploy.runtime.host import (
    CORES,
    core_name,
    cpu_quota,
    default_threads,
    describe_host,
    quota_waits,
    usable_cores,
)

# By machine: its cores and instruction sets, as its vendor describes the chip.
EXPECTED = {
    "ampere-altra-max": ("96x Neoverse-N1", "asimd asimdhp asimddp"),
    "graviton2": ("16x Neoverse-N1", "asimd asimdhp asimddp"),
    "graviton3": ("1x Neoverse-V1", "asimd asimdhp asimddp i8mm bf16 sve"),
    "imx8mp-evk": ("4x Cortex-A53", "asimd"),
    "jetson-agx-orin": ("12x Cortex-A78AE", "asimd asimdhp asimddp"),
    "jetson-nano": ("4x Cortex-A57", "asimd"),
    "jetson-orin-nano": ("6x Cortex-A78AE", "asimd asimdhp asimddp"),
    "jetson-tx2": ("2x NVIDIA Denver 2 + 4x Cortex-A57", "asimd"),
    "jetson-xavier-nx": ("6x NVIDIA Carmel", "asimd asimdhp"),
    "macbook-pro-m1-pro": ("8x Apple Firestorm-M1-Pro + 2x Apple Icestorm-M1-Pro", "asimd asimdhp asimddp"),
    "orange-pi-5": ("4x Cortex-A76 + 4x Cortex-A55", "asimd asimdhp asimddp"),
    "radxa-rock-5b": ("4x Cortex-A76 + 4x Cortex-A55", "asimd asimdhp asimddp"),
    "raspberry-pi-3b-plus": ("4x Cortex-A53", "asimd"),
    "raspberry-pi-4b": ("4x Cortex-A72", "asimd"),
    "raspberry-pi-5": ("4x Cortex-A76", "asimd asimdhp asimddp"),
    "snapdragon-x-elite": ("12x Qualcomm Oryon", "asimd asimdhp asimddp i8mm bf16"),
}
BOARDS = {
    "ampere-altra-max": "ADLINK Ampere Altra Developer Platform",
    "graviton2": "Amazon EC2 m6g.4xlarge",
    "jetson-nano": "NVIDIA Jetson Nano Developer Kit",
    "radxa-rock-5b": "Radxa ROCK 5B",
    "raspberry-pi-5": "Raspberry Pi 5 Model B Rev 1.0",
    "snapdragon-x-elite": "Qualcomm Technologies, Inc. X1E001DE Snapdragon Devkit for Windows",
}
X86 = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f avx512_vnni\n"
A53, NEOVERSE_N1, MAX = (0x8FB, 0), (0x119FFB, 0), (0xEFFFFFFB, 0x18007FC77FFF)


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    """The files of each machine, and how many CPUs it has."""
    folder = tmp_path_factory.mktemp("boards")
    return {name: (folder / name, plant(folder / name, name)) for name in NAMES}


@pytest.fixture(scope="module")
def hosts(boards):
    return {name: describe_host(root, "aarch64", range(count)) for name, (root, count) in boards.items()}


def facts(root, cpuinfo, machine="aarch64", **files):
    write(root, {"proc/cpuinfo": cpuinfo, **files})
    return describe_host(root, machine, range(2))


@pytest.mark.parametrize("name", NAMES)
def test_a_board_is_named_by_its_cores_and_by_its_firmware(hosts, name):
    found = hosts[name]
    assert (found["cpu"], found["isa"]) == EXPECTED[name]
    assert found.get("board", "") == BOARDS.get(name, found.get("board", ""))
    assert "emulated" not in found


def test_every_board_is_another_host_and_two_of_one_model_are_one(tmp_path, hosts):
    assert len({str(host) for host in hosts.values()}) == len(hosts) >= 10
    # Two boards with one chip are told apart by their name alone.
    same = [pair for pair in itertools.combinations(NAMES, 2) if len({_chip(hosts[name]) for name in pair}) == 1]
    assert ("orange-pi-5", "radxa-rock-5b") in same
    count = plant(tmp_path, "raspberry-pi-5")
    file = tmp_path / "proc/cpuinfo"
    other = file.read_text(encoding="utf-8").replace("d04170", "c04170")  # of another owner, with less memory
    file.write_text(f"{other}Serial\t\t: 48343bbbe3ae743b\n", encoding="utf-8")
    assert describe_host(tmp_path, "aarch64", range(count)) == hosts["raspberry-pi-5"]


def _chip(host):
    return tuple(host.get(key) for key in ("cpu", "isa", "cores", "caches"))


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="util-linux's lscpu is not here")
def test_util_linux_gives_the_cores_the_same_names(boards):
    for name, (root, count) in boards.items():
        write(
            root, {f"sys/devices/system/cpu/{file}": f"0-{count - 1}\n" for file in ("possible", "present", "online")}
        )
        for cpu in range(count):
            (root / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True, exist_ok=True)
        command = [shutil.which("lscpu"), "--sysroot", str(root)]
        done = subprocess.run(command, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True)
        theirs = {line.split(":")[1].strip() for line in done.stdout.splitlines() if "Model name" in line} - {"-"}
        cores = arm.read_cores((root / "proc/cpuinfo").read_text(encoding="utf-8"))
        assert theirs <= {core.name.removeprefix(CORES[core.implementer][0]).strip() for core in cores}, name
        assert theirs or name == "snapdragon-x-elite"  # Oryon is newer than the lscpu of Debian 12


def test_caches_are_told_for_each_kind_of_core(tmp_path, hosts):
    assert hosts["raspberry-pi-5"]["caches"] == "L1d 64K, L1i 64K, L2 512K, L3 2048K"
    big, little = hosts["radxa-rock-5b"]["caches"].split("; ")
    assert big == "Cortex-A76: L1d 64K, L1i 64K, L2 512K, L3 3072K"
    assert little == "Cortex-A55: L1d 32K, L1i 32K, L2 128K, L3 3072K"
    assert "caches" not in hosts["raspberry-pi-4b"]
    # Qualcomm gives one of four equal cores a larger cache.
    plant(tmp_path, "raspberry-pi-5")
    write(tmp_path, {"sys/devices/system/cpu/cpu3/cache/index2/size": "1024K\n"})
    found = describe_host(tmp_path, "aarch64", range(4))["caches"]
    assert found == "L1d 64K, L1i 64K, L2 1024K, L3 2048K or L1d 64K, L1i 64K, L2 512K, L3 2048K"


def test_a_process_on_some_kinds_of_cores_is_another_host_than_one_on_others(boards):
    def cores(name, *cpus):
        found = describe_host(boards[name][0], "aarch64", cpus)
        return found["cpu"], found["cores"]

    whole = "4x Cortex-A76 + 4x Cortex-A55"
    assert cores("radxa-rock-5b", 0, 1, 2, 3) == (f"4x Cortex-A55 of {whole}", "4")
    assert cores("radxa-rock-5b", 4, 5, 6, 7) == (f"4x Cortex-A76 of {whole}", "4")
    assert cores("radxa-rock-5b", 3, 4) == (f"1x Cortex-A76 + 1x Cortex-A55 of {whole}", "2")
    assert cores("raspberry-pi-5", 0, 1) == ("4x Cortex-A76", "2")


@pytest.mark.parametrize(
    ("register", "name"),
    [
        ((0x41, 0xD0B, 4), "Cortex-A76"),
        ((0x41, 0xDFF, 1), "0x41 0xdff (variant 0x1)"),
        ((0x00, 0xD02, 1), "0x00 0xd02 (variant 0x1)"),
        ((0x61, 0x000, 0), "Apple 0x000 (variant 0x0)"),
        ((0x7F, 0x123, 2), "0x7f 0x123 (variant 0x2)"),
    ],
)
def test_a_core_that_the_table_lacks_is_named_by_its_numbers(tmp_path, register, name):
    assert core_name(*register) == name
    lines = zip(("implementer", "part", "variant"), register, strict=True)
    block = "".join(f"CPU {key}\t: {value:#x}\n" for key, value in lines)
    assert facts(tmp_path, f"processor\t: 0\n{block}\nprocessor\t: 1\n{block}")["cpu"] == f"2x {name}"


def test_an_old_kernel_that_writes_the_register_once_means_all_cpus(tmp_path):
    found = facts(
        tmp_path,
        "Processor\t: AArch64 Processor rev 4 (aarch64)\nprocessor\t: 0\nprocessor\t: 1\n"
        "Features\t: fp asimd aes\nCPU implementer\t: 0x41\nCPU part\t: 0xd03\n",
    )
    assert (found["cpu"], found["isa"]) == ("2x Cortex-A53", "asimd")


@pytest.mark.parametrize(
    "text", ["", "\0\xff no file of a kernel", "processor: x\nCPU part: y\nCPU implementer: 0x41\n"]
)
def test_a_file_that_says_nothing_is_no_error(tmp_path, text):
    found = facts(tmp_path, text.encode("latin-1"))
    assert found["isa"] == "unknown"
    assert set(found) == {"cpu", "isa", "cores", "machine", "system", "python"}


def test_the_name_of_a_board_that_a_container_hides_is_in_raspberry_pis_cpuinfo(tmp_path, hosts):
    plant(tmp_path, "raspberry-pi-4b")
    shutil.rmtree(tmp_path / "proc/device-tree")
    assert describe_host(tmp_path, "aarch64", range(4)) == hosts["raspberry-pi-4b"]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"proc/device-tree/model": b"Radxa ROCK\x1b[31m 5B\n\0"}, "Radxa ROCK [31m 5B"),
        ({"sys/firmware/devicetree/base/model": b"A board\0"}, "A board"),
        ({"sys/class/dmi/id/product_name": "To Be Filled By O.E.M.\n"}, None),
        ({"sys/class/dmi/id/product_name": "System Product Name\n", "sys/class/dmi/id/sys_vendor": "Acme\n"}, None),
        ({"sys/class/dmi/id/product_name": "Ace 1\n", "sys/class/dmi/id/sys_vendor": "Default string\n"}, "Ace 1"),
        ({"sys/class/dmi/id/product_name": "x" * 500}, "x" * 80),
    ],
)
def test_a_name_is_one_clean_line_that_somebody_filled_in(tmp_path, files, name):
    assert facts(tmp_path, "processor\t: 0\n", **files).get("board") == name


def test_the_kernels_bits_mean_the_same_as_its_words(tmp_path):
    """QEMU 10.0.13 with -cpu cortex-a53, neoverse-n1 and max; max has all of them."""
    for bits, words in (
        (A53, "asimd"),
        (NEOVERSE_N1, "asimd asimdhp asimddp"),
        (MAX, "asimd asimdhp asimddp i8mm bf16 sve sve2 sme"),
    ):
        found = facts(tmp_path, f"processor\t: 0\nFeatures\t: fp {words} cpuid\n")
        assert found["isa"] == words
        vector = {"proc/self/auxv": auxiliary_vector(*bits)}
        assert facts(tmp_path, "processor\t: 0\nFeatures\t: fp\n", **vector)["isa"] == words
        (tmp_path / "proc/self/auxv").unlink()


def test_an_emulator_that_shows_the_cpuinfo_of_the_machine_below_is_seen_through(tmp_path):
    """QEMU before 8.1 in user mode. No name of the x86 machine, its board or its caches gets into the facts."""
    below = {
        "proc/self/auxv": auxiliary_vector(*A53),
        "sys/class/dmi/id/product_name": "PowerEdge R740\n",
        "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
    }
    arch = {"proc/sys/kernel/arch": "x86_64\n"}
    for told, files in (("an emulator on x86", below), ("an emulator on x86", {**below, **arch})):
        found = facts(tmp_path, X86, **files)
        assert {key: found[key] for key in ("cpu", "isa", "machine", "emulated")} == {
            **{"cpu": "a CPU of aarch64", "isa": "asimd", "machine": "aarch64", "emulated": told},
        }
        assert not {"board", "caches"} & set(found)


def test_an_emulator_that_writes_a_cpuinfo_of_its_own_is_told_by_the_kernel(tmp_path):
    plant(tmp_path, "imx8mp-evk")
    write(tmp_path, {"proc/sys/kernel/arch": "x86_64\n"})
    found = describe_host(tmp_path, "aarch64", range(4))
    assert (found["cpu"], found["emulated"]) == ("4x Cortex-A53", "an emulator on x86")
    assert "board" not in found


def test_x86_on_the_kernel_of_an_arm_machine_is_emulated_too(tmp_path):
    plant(tmp_path, "macbook-pro-m1-pro")
    found = describe_host(tmp_path, "x86_64", range(2))
    assert (found["cpu"], found["isa"], found["emulated"]) == ("a CPU of x86_64", "unknown", "an emulator on Arm")
    rosetta = facts(tmp_path, X86, "x86_64", **{"proc/sys/kernel/arch": "aarch64\n"})
    assert (rosetta["cpu"], rosetta["emulated"]) == ("Xeon", "an emulator on Arm")


def test_the_facts_of_x86_and_their_order_are_what_stored_work_is_keyed_by(tmp_path):
    """Byte for byte as before boards had names: with these files, none of which x86 is described by."""
    found = facts(
        tmp_path,
        X86,
        "x86_64",
        **{"sys/class/dmi/id/product_name": "NUC\n", "proc/sys/kernel/arch": "x86_64\n"},
        **{"proc/self/auxv": auxiliary_vector(*MAX), "sys/devices/system/cpu/cpu0/cache/index0/size": "32K\n"},
    )
    head = "{'cpu': 'Xeon', 'isa': 'avx2 avx512f avx512_vnni', 'cores': '2', 'machine': 'x86_64', 'system': "
    assert str(found).startswith(head)
    assert list(found) == ["cpu", "isa", "cores", "machine", "system", "python"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("raspberry-pi-5", "works    dot products: INT8 weights use 8 bits"),
        ("raspberry-pi-4b", "missing  dot products: INT8 with 8 bits is correct"),
    ],
)
def test_the_doctor_names_the_board_and_what_its_cpu_has_for_int8(hosts, name, line):
    host = hosts[name]
    lines = _host_lines(host)
    assert lines[0].startswith(f"{host['board']}, {host['cpu']}, 4 cores, asimd")
    assert any(each.startswith(line) for each in lines)
    assert (f"caches: {host['caches']}" in lines) if "caches" in host else len(lines) == 2


# --- quotas of control groups -----------------------------------------------------------------------------------------

V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n"
QUOTAS = {
    "half a CPU": (0.5, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}),
    "no limit": (None, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}),
    "the path of the host": (
        1.5,
        {"proc/self/cgroup": "0::/kubepods/pod7\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
    ),
    "a group above has less": (
        0.25,
        {
            "proc/self/cgroup": "0::/a.slice/b.scope\n",
            "sys/fs/cgroup/a.slice/cpu.max": "25000 100000\n",
            "sys/fs/cgroup/a.slice/b.scope/cpu.max": "400000 100000\n",
        },
    ),
    "version 1": (
        0.5,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
        },
    ),
    "version 1 in a container": (
        2.0,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ),
    "version 1 without a limit": (
        None,
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ),
    "both versions": (
        0.5,
        {
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            "sys/fs/cgroup/unified/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        },
    ),
    "nonsense": (None, {"proc/self/cgroup": "0::/\nx\n", "sys/fs/cgroup/cpu.max": "\xff0 0 0\n"}),
    "a period of nothing": (None, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100 0\n"}),
    "no files": (None, {}),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_the_quota_of_a_control_group(tmp_path, name):
    quota, files = QUOTAS[name]
    write(tmp_path, {"proc/cpuinfo": X86, **files})
    assert cpu_quota(tmp_path) == quota
    found = describe_host(tmp_path, "x86_64", range(8))
    assert found["cores"] == {None: "8", 0.25: "1", 0.5: "1", 1.5: "2", 2.0: "2"}[quota]
    assert found.get("quota") == (None if quota is None else f"{quota:g} of 8 CPUs")


def test_control_groups_that_cannot_be_read_limit_nothing(tmp_path):
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)  # not a file: as good as one without permission, root too
    assert cpu_quota(tmp_path) is None
    (tmp_path / "proc/self/cgroup").rmdir()
    write(tmp_path, {"proc/self/cgroup": "0::/\n"})
    (tmp_path / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert (cpu_quota(tmp_path), quota_waits(tmp_path)) == (None, None)
    assert usable_cores(tmp_path) == usable_cores()


def test_how_long_a_quota_kept_threads_from_running(tmp_path):
    stat = "nr_throttled 7\nthrottled_usec 1500000\n"
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.stat": stat})
    assert quota_waits(tmp_path) == 1.5
    stat = "nr_throttled 7\nthrottled_time 2500000000\n"
    write(tmp_path, {"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/cpu.stat": stat})
    assert quota_waits(tmp_path) == 2.5


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 1),  # the quota's
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 4),
        ({"OMP_NUM_THREADS": "3", "ORT_INTRA_OP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "many", "ORT_INTRA_OP_NUM_THREADS": "0"}, 1),
    ],
)
def test_threads_that_nobody_gave(tmp_path, monkeypatch, variables, threads):
    for name in ("OMP_NUM_THREADS", "ORT_INTRA_OP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"})
    assert default_threads("ORT_INTRA_OP_NUM_THREADS", root=tmp_path) == threads
    if not variables:
        assert default_threads(root=tmp_path / "elsewhere") == 0
