"""One requirement of a target on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`detail` says what is here or missing; `fix` how to get what is missing, "" if something else must be fixed
    first."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def finding_lines(found: Sequence[Finding]) -> list[str]:
    """A target's requirements for people: one line per finding, and the fix below the first one that needs it."""
    lines, said = [], set()
    for each in found:
        lines.append(f"{'ok' if each.ok else 'missing':<7}  {each.name:<32} {each.detail}")
        if each.fix and each.fix not in said:
            lines.append(f"         fix: {each.fix}")
        said.add(each.fix)
    return lines
