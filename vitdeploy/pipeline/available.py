"""Whether a target works on this machine: its runtime is here, and has what is asked of it. Imports nothing heavy."""

from __future__ import annotations

import importlib.util

from vitdeploy.compile.openvino import require_precision
from vitdeploy.errors import CapabilityError, MissingPackageError
from vitdeploy.runtime.ort_gpu import PROVIDERS, require_provider
from vitdeploy.spec import TARGETS
from vitdeploy.stages.capability import check_precision, check_target

# What stands in a graph: `quantize` makes it. The other precisions are those of `compile`.
_QUANTIZED = ("int8", "mixed", "fp8")


def check_placed(target: str, precision: str) -> None:
    """The same for a precision that is to stand in a graph, which half precision does for some targets only."""
    check_target(target)
    row = TARGETS[target]
    if precision in ("fp16", "bf16") and not row.typed and precision in row.precisions:
        if target == "openvino-cpu":  # whose fix is one only where this CPU has it
            require_runtime(target)
            require_precision(precision)
        raise CapabilityError(
            f"{target} has {precision} as a setting of its runtime, not in the graph",
            found=f"--precision {precision}",
            wanted=", ".join(name for name in _QUANTIZED if name in row.precisions),
            fix=f"compile the float graph: vitdeploy compile DIR --target {target} --precision {precision} -o OUT",
        )
    check_precision(target, precision)


def require_target(target: str, precision: str) -> None:
    """The target has the precision, its runtime is here, and this CPU has it where that is OpenVINO's to say.

    Raises:
        TargetError, CapabilityError, MissingPackageError.
    """
    check_precision(target, precision)
    require_runtime(target)
    if target == "openvino-cpu" and precision in ("fp16", "bf16"):
        require_precision(precision)


def require_runtime(target: str) -> None:
    """The target's runtime is here, as far as can be said without running anything.

    Raises:
        MissingPackageError: it is not installed.
        CapabilityError: this build of it does not have the target's provider.
    """
    row = TARGETS[target]  # a back end is called as its module
    if importlib.util.find_spec(row.backend) is None:
        raise MissingPackageError(row.package, row.extra, f"the target {target}", target if row.device == "GPU" else "")
    if target in PROVIDERS:
        require_provider(target)
