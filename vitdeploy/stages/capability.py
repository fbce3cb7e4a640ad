"""Check that a target supports a precision, by the table of targets alone."""

from __future__ import annotations

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError


def check_target(target: str) -> None:
    """Raise TargetError if no target has that name."""
    TARGETS[target]


def check_engine(name: str) -> None:
    """Raise TargetError if that is neither a target nor what an engine of one is called."""
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
