"""The energy that a GPU has used, from NVML, the part of NVIDIA's driver behind nvidia-smi.

Source: NVIDIA, "NVML API Reference Guide": nvmlDeviceGetTotalEnergyConsumption (millijoules since the driver was
loaded; Volta and later) and nvmlReturn_t. The GPU is asked for by its PCI bus id: NVML numbers all that there are,
while CUDA_VISIBLE_DEVICES hides some from CUDA.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.nvidia import bus_id

LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
NO_PERMISSION = 4


class GpuEnergy:
    """The counter of the GPU that CUDA takes first. `permitted`: whether it can be read, where it is there at all."""

    def __init__(self, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL, find: Callable[[], str] = bus_id) -> None:
        self._library: ctypes.CDLL | None = None
        self._device = ctypes.c_void_p()
        self.permitted = True
        for name in LIBRARIES:
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

    def joules(self) -> float | None:
        """Joules since the driver was loaded; None if unknown."""
        energy = ctypes.c_ulonglong()
        if self._library is None or self._fails(
            self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(energy))
        ):
            return None
        return energy.value / 1e3

    def _fails(self, status: int) -> bool:
        self.permitted &= status != NO_PERMISSION
        return status != 0
