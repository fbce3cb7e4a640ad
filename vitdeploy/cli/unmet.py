"""What to do where a budget is not met, by what it bounds."""

from __future__ import annotations

from collections.abc import Sequence

# By the words of a gate's reasons.
_FIXES = (
    (
        ("agreement", "drop"),
        "evaluate on more images, or set another bound: --set budget.min_agreement=PERCENT or "
        "--set budget.max_drop=POINTS",
    ),
    (
        ("latency",),
        "measure for longer while nothing else runs (--set bench.duration=SECONDS), or set another bound: "
        "--set budget.max_latency=MILLISECONDS",
    ),
    (("size",), "set another bound: --set budget.max_size=BYTES"),
)


def unmet_fix(reasons: Sequence[str]) -> str:
    """The means against all that these reasons of gates name."""
    return "; ".join(fix for words, fix in _FIXES if any(word in reason for word in words for reason in reasons))
