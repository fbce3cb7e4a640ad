"""What a TensorRT engine depends on: TensorRT's version, the GPU, the driver and the operating system."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from vitdeploy.errors import EngineError
from vitdeploy.runtime import cuda, tensorrt_api

# How far beyond the machine that built it an engine may go, as it was asked for when it was built.
HARDWARE, VERSIONS = "built_for_hardware", "built_for_versions"
KEYS = ("tensorrt", "gpu", "compute_capability", "driver", "os")


def fingerprint() -> dict[str, str]:
    """The identity of this machine, as EngineSpec.device records it.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT, cuda-python, driver or GPU.
    """
    version = tensorrt_api.require()
    device = cuda.describe_device()
    return {
        "tensorrt": version,
        "gpu": device.name,
        "compute_capability": device.compute_capability,
        "driver": device.driver,
        "cuda": device.cuda,
        "os": f"{platform.system()} {platform.machine()}",
    }


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """The keys in which a machine differs from those that an engine was built for.

    An engine built for the hardware "ampere+" runs on every compute capability from 8.0, one built for
    "same-compute-capability" on every GPU that has its own; one built for "newer" versions also on later TensorRTs.
    A driver is that of the machine that built it, and neither of these engines depends on it.
    """
    keys = set(KEYS)
    hardware, versions = recorded.get(HARDWARE, "this"), recorded.get(VERSIONS, "this")
    if hardware != "this":
        keys -= {"gpu", "driver"}
    if hardware == "ampere+" and _numbers(here, "compute_capability") >= (8, 0):
        keys -= {"compute_capability"}
    if versions == "newer":
        keys -= {"driver"}
        if _numbers(here, "tensorrt") >= _numbers(recorded, "tensorrt") > ():
            keys -= {"tensorrt"}
    return [key for key in KEYS if key in keys and recorded.get(key) != here.get(key)]


def _numbers(facts: Mapping[str, str], key: str) -> tuple[int, ...]:
    return tensorrt_api.version_numbers(facts.get(key, ""))


def refuse_other_device(name: str, recorded: Mapping[str, str], here: Mapping[str, str], rebuild: str) -> None:
    """Raise EngineError unless this machine is one that the engine was built for."""
    keys = differences(recorded, here)
    if keys:
        raise EngineError(
            f"{name} was built for another machine",
            found=", ".join(f"{key} {recorded.get(key, 'not recorded')}" for key in keys),
            wanted=", ".join(f"{key} {here.get(key, 'unknown')}" for key in keys),
            fix=f"rebuild it: {rebuild}",
        )
