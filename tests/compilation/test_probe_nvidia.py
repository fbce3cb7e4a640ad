"""What `doctor --target` asks of a machine with and without NVIDIA's parts. Libraries are small ones, built here."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.command_line import command_line
from vitdeploy.backends import TARGETS
from vitdeploy.compilation import probe_nvidia
from vitdeploy.compilation.backend import Finding, finding_lines
from vitdeploy.compilation.engine import examine, probe_target
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import nvidia
from vitdeploy.runtime.nvidia import Gpu, describe_gpu, find_driver
from vitdeploy.stages.step import target_tools

GPU_TARGETS = [name for name, row in TARGETS.items() if row.device == "GPU"]
# As the driver's library answers: a driver for CUDA 13.0, one GPU of compute capability 8.6 with 24 of 25 GB free.
DRIVER = r"""
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Test GPU", length); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? MAJOR : 6; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = FREE; *total = 25000000000; return 0; }
int cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0; }
"""


@pytest.fixture
def build(tmp_path):
    """`build(name, source, **macros)`: the path of a shared library."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc")

    def make(name, source, **macros):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        defined = [f"-D{key}={value}" for key, value in macros.items()]
        command = [gcc, "-shared", "-fPIC", "-w", *defined, "-o", path, "-x", "c", "-"]
        subprocess.run(command, input=source, text=True, check=True, timeout=60)
        return path

    return make


@pytest.fixture
def driver(build, monkeypatch, tmp_path):
    """`driver(INIT=0, FREE=...)` is the driver that `find_driver` finds."""

    def install(init=0, free=24_000_000_000, major=8, version="580.65.06"):
        library = build(f"libcuda-{init}-{free}-{major}.so.1", DRIVER, INIT=init, FREE=free, MAJOR=major)
        file = tmp_path / "version"
        file.write_text(f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n")
        monkeypatch.setattr(nvidia, "LIBRARIES", (str(library),))
        monkeypatch.setattr(nvidia, "VERSION_FILE", file)

    return install


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(nvidia, "LIBRARIES", ("libnocuda.so.1",))


@pytest.fixture
def here(shared_store, tmp_path):
    with command_line(tmp_path, shared_store) as run:
        yield run


def by_name(found):
    return {each.name: each for each in found}


# --- the driver -------------------------------------------------------------------------------------------------------


def test_the_driver_says_what_the_gpu_is(driver):
    driver()
    found = find_driver()
    assert (found.version, found.cuda) == ("580.65.06", (13, 0))
    assert found.gpu == Gpu("Test GPU", (8, 6), 25_000_000_000, 24_000_000_000)
    assert describe_gpu() == {
        "gpu": "Test GPU",
        "compute_capability": "8.6",
        "driver": "580.65.06",
        "driver_cuda": "13.0",
    }


@pytest.mark.parametrize("target", ["onnxruntime-cuda", "onnxruntime-tensorrt"])
def test_an_engine_is_kept_for_its_gpu_and_driver(driver, no_driver, target):
    with pytest.raises(CapabilityError, match="no NVIDIA driver"):
        target_tools(target)
    kept = []
    for machine in ({}, {}, {"major": 9}, {"version": "581.10"}):
        driver(**machine)
        kept.append(target_tools(target))
    assert kept[0] == kept[1]
    assert [each["compute_capability"] for each in kept[1:]] == ["8.6", "9.6", "8.6"]
    assert [each["driver"] for each in kept[1:]] == ["580.65.06", "580.65.06", "581.10"]
    assert "driver" not in target_tools("onnxruntime-cpu")


def test_a_driver_without_a_gpu_and_one_that_does_not_start_are_refused(driver):
    driver(init=100)
    with pytest.raises(CapabilityError, match="no NVIDIA GPU") as caught:
        find_driver()
    assert "--gpus all" in caught.value.fix
    driver(init=803)
    with pytest.raises(CapabilityError, match="does not start") as caught:
        find_driver()
    assert caught.value.found == "cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


def test_without_a_driver_the_error_says_so(no_driver):
    with pytest.raises(CapabilityError, match="no NVIDIA driver") as caught:
        find_driver()
    assert caught.value.exit_code == 4


# --- findings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_without_a_driver_everything_is_asked_all_the_same(no_driver, target):
    found = by_name(examine(target))
    assert not found["NVIDIA driver"].ok
    assert "install NVIDIA's driver" in found["NVIDIA driver"].fix
    assert not found["GPU"].ok
    expected = {"cuda-python", "TensorRT for Python", "libnvinfer", "libnvonnxparser", "TensorRT version"}
    assert (expected if target == "tensorrt" else {"onnxruntime-gpu", "its libraries"}) <= set(found)
    result = probe_target(target)
    assert (result.works, result.fix) == (False, "")
    assert result.detail.startswith("not found: no NVIDIA driver")


def test_with_a_gpu_the_first_thing_that_misses_is_named_with_its_mend(driver):
    driver()
    found = by_name(examine("tensorrt"))
    assert found["NVIDIA driver"].detail == "580.65.06, for CUDA up to 13.0"
    assert found["GPU"].detail == "Test GPU, compute capability 8.6"
    assert found["GPU memory"] == Finding("GPU memory", True, "24.0 of 25.0 GB free")
    missing = next((each for each in found.values() if not each.ok), None)
    if missing is None:
        pytest.skip("TensorRT is here")
    result = probe_target("tensorrt")
    assert result.detail.startswith(f"{missing.name}: ")
    assert result.fix == missing.fix != ""


def test_a_gpu_without_free_memory_is_told_to_close_what_uses_it(driver):
    driver(free=500_000_000)
    found = by_name(examine("tensorrt"))["GPU memory"]
    assert (found.ok, found.detail) == (False, "0.5 of 25.0 GB free")
    assert "end other GPU processes" in found.fix


def test_types_are_those_that_the_gpu_has_kernels_for(driver, no_driver):
    assert probe_nvidia.precisions("tensorrt") == ()
    driver()
    usable = probe_nvidia.precisions("tensorrt")
    assert "fp8" not in usable
    assert {"fp32", "fp16", "bf16", "int8"} <= set(usable)


@pytest.mark.parametrize(
    ("number", "shown", "supported"),
    [
        *((100300, "10.3.0", True), (101303, "10.13.3", True), (110400, "11.4.0", True)),
        *((100200, "10.2.0", False), (8601, "0.86.1", False), (120000, "12.0.0", False)),
    ],
)
def test_the_version_of_tensorrt_is_that_of_its_library(build, tmp_path, monkeypatch, number, shown, supported):
    for name in ("nvinfer", "nvonnxparser"):
        build(f"tensorrt_libs/lib{name}.so.10", "int getInferLibVersion(void) { return NUMBER; }", NUMBER=number)
    (tmp_path / "tensorrt_libs" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensorrt_libs", raising=False)
    found = by_name(examine("tensorrt"))
    assert found["libnvinfer"].detail == str(tmp_path / "tensorrt_libs" / "libnvinfer.so.10")
    assert found["libnvonnxparser"].ok
    assert (found["TensorRT version"].ok, found["TensorRT version"].detail.split(";")[0]) == (supported, shown)


def test_the_probe_graph_is_a_relu():
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(probe_nvidia.PROBE_GRAPH, providers=["CPUExecutionProvider"])
    [answer] = session.run(None, {"x": np.array([-1.0, 2.0], np.float32)})
    assert answer.tolist() == [0.0, 2.0]


def test_a_mend_stands_below_the_first_that_it_mends():
    missing = [Finding(name, False, "gone", "get it") for name in ("b", "d")]
    found = [Finding("a", True, "here"), *missing, Finding("c", False, "not known")]
    assert [line.split() for line in finding_lines(found)] == [
        ["ok", "a", "here"],
        ["missing", "b", "gone"],
        ["fix:", "get", "it"],
        ["missing", "d", "gone"],
        ["missing", "c", "not", "known"],
    ]


# --- doctor -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_without_a_driver_nothing_is_blamed_for_not_starting(no_driver, target):
    assert [each.fix for each in examine(target) if each.name.endswith(" starts")] in ([], [""])


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_doctor_says_what_a_target_needs_and_leaves_with_4(here, no_driver, target):
    done = here("doctor", "--target", target)
    assert done.returncode == 4
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["missing", "NVIDIA", "driver"]
    assert lines[1].strip().startswith("fix: install NVIDIA's driver")
    assert any(line.startswith(f"{target} does not work here: missing NVIDIA driver, GPU") for line in lines)


def test_doctor_of_a_target_prints_one_document(here, no_driver):
    import json

    done = here("doctor", "--target", "tensorrt", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["works"], document["target"]) == (4, False, "tensorrt")
    assert {"name", "ok", "detail", "fix"} == set(document["findings"][0])


def test_doctor_of_a_target_that_works_leaves_with_0(here):
    done = here("doctor", "--target", "onnxruntime-cpu")
    assert (done.returncode, done.stdout.splitlines()[1]) == (0, "onnxruntime-cpu works here")


def test_doctor_knows_no_other_target(here):
    assert here("doctor", "--target", "abacus").returncode == 2


def test_a_machine_without_a_gpu_does_not_look_broken(here, no_driver):
    lines = here("doctor").stdout.splitlines()
    for target in GPU_TARGETS:
        [line] = [line for line in lines if f" {target} " in line]
        assert line.startswith("absent ")
        assert "not found: no NVIDIA driver" in line
        assert not lines[lines.index(line) + 1].strip().startswith("fix:")
