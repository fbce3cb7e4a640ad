"""The NVIDIA driver, its first GPU and its energy counter."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CapabilityError

# --- Query NVIDIA's driver about this machine's first GPU; CUDA_VISIBLE_DEVICES selects another -----------------------
# Uses the driver's own library through ctypes: it exists wherever a GPU works (also in containers and on Jetson, whose
# nvidia-smi is limited), and `doctor` must work without a CUDA package for Python.


LIBRARIES = ("libcuda.so.1", "nvcuda.dll")
VERSION_FILE = Path("/proc/driver/nvidia/version")
# CUdevice_attribute and CUresult: CUDA driver API, "Data types used by CUDA driver".
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
NO_DEVICE = 100
DRIVER_FIX = (
    "install NVIDIA's driver for this GPU (https://www.nvidia.com/drivers); a container needs --gpus all "
    "and NVIDIA's container toolkit"
)


@dataclass(frozen=True)
class Gpu:
    """One GPU: compute capability as (major, minor), memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int
    free: int


@dataclass(frozen=True)
class Driver:
    """The driver: its version, "" if the kernel does not report it, and the newest CUDA that it supports."""

    version: str
    cuda: tuple[int, int]
    gpu: Gpu


def find_driver() -> Driver:
    """Return the driver and its first GPU.

    Raises:
        CapabilityError: no driver, one that does not start, or no GPU.
    """
    library = _library()
    status = library.cuInit(0)
    if status == NO_DEVICE:
        raise CapabilityError("no NVIDIA GPU", found="a driver without a GPU", fix=DRIVER_FIX)
    _check(library, status, "cuInit")
    number = ctypes.c_int()
    _check(library, library.cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    return Driver(driver_version(), (number.value // 1000, number.value % 1000 // 10), _gpu(library))


def describe_gpu() -> dict[str, str]:
    """Return the description of the GPU, recorded with every measured number.

    Raises:
        CapabilityError: as `find_driver`.
    """
    driver = find_driver()
    gpu = driver.gpu
    return {
        "gpu": gpu.name,
        "compute_capability": "{}.{}".format(*gpu.capability),
        "driver": driver.version or "unknown",
        "driver_cuda": "{}.{}".format(*driver.cuda),
    }


def bus_id() -> str:
    """Return the PCI address of the GPU: domain, bus, device and function, such as "00000000:3B:00.0".

    Raises:
        CapabilityError: as `find_driver`.
    """
    library, device, name = _library(), ctypes.c_int(), ctypes.create_string_buffer(32)
    _check(library, library.cuInit(0), "cuInit")
    _check(library, library.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(library, library.cuDeviceGetPCIBusId(name, len(name), device), "cuDeviceGetPCIBusId")
    return name.value.decode("ascii")


def _library() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CapabilityError("no NVIDIA driver", found=f"no {LIBRARIES[0]}", fix=DRIVER_FIX)


def _gpu(library: ctypes.CDLL) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    _check(library, library.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(library, library.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    capability = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(capability, (CAPABILITY_MAJOR, CAPABILITY_MINOR), strict=True):
        _check(library, library.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    free, memory, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    _check(library, library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:  # the free memory needs a context
        _check(library, library.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        status = library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(memory))
        library.cuCtxPopCurrent_v2(ctypes.byref(context))
        _check(library, status, "cuMemGetInfo")
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)
    major, minor = (value.value for value in capability)
    return Gpu(name.value.decode(errors="replace"), (major, minor), memory.value, free.value)


def _check(library: ctypes.CDLL, status: int, call: str) -> None:
    if status:
        name = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(name))
        shown = name.value.decode() if name.value else f"error {status}"
        raise CapabilityError("the NVIDIA driver does not start", found=f"{call}: {shown}", fix=DRIVER_FIX)


def driver_version() -> str:
    """Return the version of the kernel driver, such as "580.65.06"; "" if the kernel does not report it."""
    try:
        text = VERSION_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return match[0] if match else ""


# --- The energy counter of a GPU, from NVML, the library of nvidia-smi ------------------------------------------------
# Source: NVIDIA, "NVML API Reference Guide": nvmlDeviceGetTotalEnergyConsumption (millijoules since the driver was
# loaded; Volta and later) and nvmlReturn_t. The GPU is selected by its PCI bus id: NVML numbers all GPUs, while
# CUDA_VISIBLE_DEVICES hides some from CUDA.


NVML_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
NO_PERMISSION = 4


class GpuEnergy:
    """The energy counter of CUDA's first GPU. `source` is "NVML", or the reason why the counter is missing."""

    def __init__(self, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL, find: Callable[[], str] = bus_id) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        self._permitted = True
        for name in NVML_LIBRARIES:
            try:
                library = load(name)
                bus = find().encode("ascii")
            except (OSError, CapabilityError):
                continue
            if not self._fails(library.nvmlInit_v2()) and not self._fails(
                library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._device))
            ):
                self._library = library
            break
        works = self.read() != [None]
        self.source = "NVML" if works else "not there" if self._permitted else "not permitted"

    def read(self) -> list[float | None]:
        """Return the joules since the driver was loaded; [None] if unknown."""
        energy = ctypes.c_ulonglong()
        if self._library is None or self._fails(
            self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(energy))
        ):
            return [None]
        return [energy.value / 1e3]

    def joules(self, before: list[float | None], after: list[float | None], seconds: float) -> float | None:
        """Return the energy in joules between two readings; None if the counter cannot be read."""
        (start,), (end,) = before, after
        return None if start is None or end is None else end - start

    def _fails(self, status: int) -> bool:
        self._permitted &= status != NO_PERMISSION
        return status != 0
