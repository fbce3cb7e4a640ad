"""Advice for a budget that is not met, by what it bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitdeploy.verification.gate import Kind

_FIXES: dict[Kind, str] = {
    "answers": "evaluate on more images, or set another bound: --set budget.min_agreement=PERCENT or "
    "--set budget.max_drop=POINTS",
    "latency": "measure for longer while nothing else runs (--set bench.duration=SECONDS), or set another bound: "
    "--set budget.max_latency=MILLISECONDS",
    "memory": "a smaller batch (--set bench.batch=1), or another bound: --set budget.max_memory=BYTES",
    "size": "set another bound: --set budget.max_size=BYTES",
}
# Where unrelated answers meet a bound as well.
NOTHING_SHOWN = "evaluate on images to which the original's answers differ, best with labels"


def unmet_fix(reasons: Iterable[str]) -> str:
    """The means against all that these reasons of gates name."""
    from vitdeploy.verification.gate import PROVES_NOTHING, kinds_of

    reasons = list(reasons)
    found = kinds_of(reasons)
    fixes = [fix for kind, fix in _FIXES.items() if kind in found]
    return "; ".join([NOTHING_SHOWN, *fixes] if any(PROVES_NOTHING in each for each in reasons) else fixes)
