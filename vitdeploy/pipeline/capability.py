"""Whether a target can do what is asked of it, and its runtime is here: said before anything heavy is imported."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.compile.backend import COMPILE
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime.backend import require_runtime

# What stands in a graph: `quantize` makes it. The other precisions are those of `compile`.
_QUANTIZED = ("int8", "mixed", "fp8")


def check_target(target: str) -> None:
    """Raise TargetError where no target has that name."""
    TARGETS[target]


def check_engine(name: str) -> None:
    """Raise TargetError where that is neither a target nor what an engine of one is called."""
    target = name.rpartition("-")[0]
    check_target(target if target in TARGETS else name)


def check_precision(target: str, precision: str) -> None:
    """Raise what `compile` would, before any work is done."""
    check_target(target)
    if precision not in TARGETS[target].precisions:
        others = [name for name, row in TARGETS.items() if precision in row.precisions]
        raise CapabilityError(
            f"{target} cannot run {precision}",
            found=precision,
            wanted=", ".join(TARGETS[target].precisions),
            fix=f"choose one of these, or another target that has {precision}: {', '.join(others)}"
            if others
            else "choose one of these",
        )


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
