"""What the engines of a target depend on beside their graph."""

from __future__ import annotations

from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.nvidia import describe_gpu
from vitdeploy.runtime.tensorrt_identity import fingerprint
from vitdeploy.spec import TARGETS
from vitdeploy.stages.tools import backend_versions, package_versions


def target_tools(target: str) -> dict[str, str]:
    """An engine belongs to its runtime's version, to the packages that add to its back end, and to this machine; on a
    GPU to that and its driver too.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, where the target needs them.
    """
    row = TARGETS[target]
    tools = {**package_versions((row.package,)), **backend_versions(target), "host": str(describe_host())}
    if row.device != "GPU":
        return tools
    return {**tools, **(fingerprint() if row.backend == "tensorrt" else describe_gpu())}
