"""Whether a target can do what is asked of it, and its runtime is here: said before anything heavy is imported."""

from __future__ import annotations

import difflib
import importlib.util

from vitdeploy.compile.openvino import require_precision
from vitdeploy.errors import CapabilityError, MissingPackageError, TargetError
from vitdeploy.runtime.ort_gpu import PROVIDERS, require_provider
from vitdeploy.spec import TARGETS

# What stands in a graph: `quantize` makes it. The other precisions are those of `compile`.
_QUANTIZED = ("int8", "mixed", "fp8")


def check_target(target: str) -> None:
    """Raise TargetError where no target has that name."""
    if target not in TARGETS:
        near = difflib.get_close_matches(target, TARGETS, n=1)
        raise TargetError(
            f"no target is called {target!r}",
            wanted=", ".join(TARGETS),
            fix=f"did you mean {near[0]}?" if near else "`vitdeploy doctor` says which work on this machine",
        )


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
