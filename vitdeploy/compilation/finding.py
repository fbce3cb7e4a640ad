"""One thing that a target needs of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`detail` says what is here, or what is missing; `fix` how to get what is missing, "" where another thing that is
    missing must come first."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """What a target needs, for people: one line a thing, and one below the first that needs a fix, for the fix."""
    lines, said = [], set()
    for each in found:
        lines.append(f"{'ok' if each.ok else 'missing':<7}  {each.name:<32} {each.detail}")
        if each.fix and each.fix not in said:
            lines.append(f"         fix: {each.fix}")
        said.add(each.fix)
    return lines
