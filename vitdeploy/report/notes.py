"""Notes to the numbers: warnings of the run, undecided measurements, and the meaning of the flags.

docs/measuring.md says exactly when each flag is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MEANINGS = {
    "not shipped": "made for the comparison, and not in the bundle",
    "throttled": "the machine became slower while it was measured, as when it is too hot or has too little power",
    "unstable": "the times of blocks, or of processes, vary so much that the median is not known to 10 %",
    "contended": "other programs, or other virtual machines, used the same processors",
    "fallback": "it ran on something else than when the engine was made",
    "short": "too few queries for the highest percentile that was asked for",
    "overloaded": "more queries arrived than could be answered: the queue only grew",
    "suspended": "the machine slept while it was measured",
}


@dataclass(frozen=True)
class Notice:
    """`kind` is the class of its colours, as of a gate. `folded`: the lines show when they are asked for."""

    kind: str
    title: str
    lines: list[str]
    folded: bool = False


def notices(warnings: Sequence[str], *undecided: Mapping[str, str]) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, by name with the reason; those of one
    reason together."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    if lines := by_reason(*undecided):
        found.append(Notice("undecided", "Speed is not decided", lines, folded=True))
    return found


def by_reason(*undecided: Mapping[str, str]) -> list[str]:
    """The artifacts of each bench whose speed is not decided, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for bench in undecided:
        for artifact, reason in bench.items():
            reasons.setdefault(reason, []).append(artifact)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def legend(flags: Iterable[str]) -> list[tuple[str, str]]:
    """Each flag that is used with its meaning, in the order of MEANINGS; one that is not known has none."""
    used = list(dict.fromkeys(flags))
    order = sorted(used, key=lambda flag: list(MEANINGS).index(flag) if flag in MEANINGS else len(MEANINGS))
    return [(flag, MEANINGS.get(flag, "")) for flag in order]
