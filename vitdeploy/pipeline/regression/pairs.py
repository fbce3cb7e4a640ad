"""Which engine of the candidate is to be compared with which of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.errors import TargetError


@dataclass(frozen=True)
class Pair:
    """The names of two engines; they differ only where each side has just one."""

    baseline: str
    candidate: str

    @property
    def name(self) -> str:
        return self.candidate if self.baseline == self.candidate else f"{self.baseline} → {self.candidate}"


def pair_up(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[list[Pair], list[str]]:
    """The pairs, in the candidate's order, and a remark for each engine that has no partner.

    Engines of one name are partners. Where no name is in both, and each side has one engine, these are.

    Raises:
        TargetError: there is no pair.
    """
    pairs = [Pair(name, name) for name in candidate if name in baseline]
    if not pairs and len(baseline) == len(candidate) == 1:
        pairs = [Pair(baseline[0], candidate[0])]
    if not pairs:
        raise TargetError(
            "the two have no engine in common",
            found=f"{', '.join(baseline) or 'none'} against {', '.join(candidate) or 'none'}",
            wanted="engines of one target and precision on both sides, or one engine on each",
            fix="name the target that is to be compared with --target",
        )
    left = [f"{name} is in the baseline only" for name in baseline if name not in [p.baseline for p in pairs]]
    left += [f"{name} is in the candidate only" for name in candidate if name not in [p.candidate for p in pairs]]
    return pairs, left
