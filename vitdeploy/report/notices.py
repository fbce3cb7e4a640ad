"""What has to be read before anything else on a page: warnings of the run, and measurements that decide nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Notice:
    """`kind` is the class of its colours, as of a gate."""

    kind: str
    title: str
    lines: list[str]


def notices(warnings: list[str], *benches: Mapping[str, Any] | None) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, those of one reason together."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    reasons: dict[str, list[str]] = {}
    for bench in benches:
        for artifact, reason in ((bench or {}).get("undecided") or {}).items():
            reasons.setdefault(reason, []).append(artifact)
    if reasons:
        lines = [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]
        found.append(Notice("undecided", "Speed is not decided", lines))
    return found
