"""What has to be read before anything else on a page: warnings of the run, and measurements that decide nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """`kind` is the class of its colours, as of a gate."""

    kind: str
    title: str
    lines: list[str]


def notices(warnings: Sequence[str], *undecided: Mapping[str, str]) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, by name with the reason; those of one
    reason together."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    reasons: dict[str, list[str]] = {}
    for bench in undecided:
        for artifact, reason in bench.items():
            reasons.setdefault(reason, []).append(artifact)
    if reasons:
        lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
        found.append(Notice("undecided", "Speed is not decided", lines))
    return found
