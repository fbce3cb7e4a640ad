"""What the flags of a measurement mean: the legend below a table. docs/measuring.md says exactly when each is set."""

from __future__ import annotations

from collections.abc import Iterable

MEANINGS = {
    "not shipped": "made for the comparison, and not in the bundle",
    "throttled": "the processor became slower while it was measured, as it does when it grows hot",
    "unstable": "the times of blocks, or of processes, vary so much that the median is not known to 10 %",
    "contended": "other programs, or other virtual machines, used the same processors",
    "fallback": "it ran on something else than when the engine was made",
    "short": "too few queries for the highest percentile that was asked for",
    "overloaded": "more queries arrived than could be answered: the queue only grew",
    "suspended": "the machine slept while it was measured",
}


def legend(flags: Iterable[str]) -> list[tuple[str, str]]:
    """Each flag that is used with its meaning, in the order of MEANINGS; one that is not known has none."""
    used = list(dict.fromkeys(flags))
    order = sorted(used, key=lambda flag: list(MEANINGS).index(flag) if flag in MEANINGS else len(MEANINGS))
    return [(flag, MEANINGS.get(flag, "")) for flag in order]
