"""Everything besides the graph that a target's engines depend on."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.stages.tools import backend_versions, package_versions


def target_tools(target: str) -> dict[str, str]:
    """An engine belongs to its runtime's version, to the packages that add to its back end, and to this machine; on a
    GPU to that and its driver too.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, where the target needs them.
    """
    versions = {**package_versions((TARGETS[target].package,)), **backend_versions(target)}
    return {**versions, "host": str(describe_host()), **RUNTIME[target].describe_device()}
