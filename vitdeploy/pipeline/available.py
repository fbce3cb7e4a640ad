"""Check that a target works on this machine: its runtime is installed and has the required features.

Imports nothing heavy.
"""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import COMPILE
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.backend import require_runtime
from vitdeploy.stages.capability import check_precision, check_target

# What stands in a graph: `quantize` makes it. The other precisions are those of `compile`.
_QUANTIZED = ("int8", "mixed", "fp8", "int4")


def check_placed(target: str, precision: str) -> None:
    """The same for a precision that is to stand in a graph, which half precision does for some targets only."""
    check_target(target)
    row = TARGETS[target]
    if precision in ("fp16", "bf16") and not row.typed and precision in row.precisions:
        require_runtime(target)  # compiling is a fix only where this machine has the precision
        COMPILE[target].require_precision(precision)
        raise CapabilityError(
            f"{target} has {precision} as a setting of its runtime, not in the graph",
            found=f"--precision {precision}",
            wanted=", ".join(name for name in _QUANTIZED if name in row.precisions),
            fix=f"compile the float graph: vitdeploy compile DIR --target {target} --precision {precision} -o OUT",
        )
    check_precision(target, precision)


def require_target(target: str, precision: str) -> None:
    """The target has the precision, its runtime is here, and runs the precision on this machine.

    Raises:
        TargetError, CapabilityError, MissingPackageError.
    """
    check_precision(target, precision)
    require_runtime(target)
    if precision in ("fp16", "bf16"):
        COMPILE[target].require_precision(precision)
