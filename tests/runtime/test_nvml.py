"""The GPU's energy counter, against a stand-in for NVIDIA's library: there is no GPU where these tests run."""

import ctypes

import pytest

from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.nvidia import NO_PERMISSION, GpuEnergy

BUS = "00000000:3B:00.0"
NOT_SUPPORTED = 3


class Nvml:
    """The three calls, as their reference describes them."""

    def __init__(self, start=0, read=0):
        self.start, self.status, self.millijoules = start, read, 0
        self.asked = []

    def nvmlInit_v2(self):
        return self.start

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
        self.asked.append(bus)
        handle._obj.value = 77
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        assert isinstance(energy._obj, ctypes.c_ulonglong) and handle.value == 77
        energy._obj.value = self.millijoules
        return self.status


def counter(library):
    return GpuEnergy(lambda name: library, lambda: BUS)


def test_a_block_is_charged_with_what_its_gpu_used_meanwhile():
    library = Nvml()
    meter = counter(library)
    library.millijoules = 5_000_000_000_000  # more than 32 bits hold
    before = meter.read()
    library.millijoules += 1500
    assert meter.source == "NVML" and library.asked == [BUS.encode()]
    assert meter.joules(before, meter.read(), 0.5) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("library", "source"),
    [
        (Nvml(start=9), "not there"),
        (Nvml(read=NOT_SUPPORTED), "not there"),
        (Nvml(start=NO_PERMISSION), "not permitted"),
        (Nvml(read=NO_PERMISSION), "not permitted"),
    ],
)
def test_what_cannot_be_read_says_why_and_is_never_0(library, source):
    meter = counter(library)
    assert (meter.source, meter.joules(meter.read(), meter.read(), 1.0)) == (source, None)


def test_no_driver_is_no_energy():
    def missing(name):
        raise OSError(name)

    def no_gpu():
        raise CapabilityError("no NVIDIA GPU")

    assert GpuEnergy(missing).source == "not there"
    assert GpuEnergy(lambda name: Nvml(), no_gpu).source == "not there"
