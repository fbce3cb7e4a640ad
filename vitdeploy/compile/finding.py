"""One thing that a target needs of a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """`detail` says what is here, or what is missing; `fix` how to get what is missing, "" where another thing that is
    missing must come first."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
