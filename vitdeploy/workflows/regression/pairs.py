"""Choose which engine of the candidate is compared with which of the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.errors import TargetError


@dataclass(frozen=True)
class Pair:
    """The names of two engines, most often the same one."""

    baseline: str
    candidate: str

    @property
    def name(self) -> str:
        return self.candidate if self.baseline == self.candidate else f"{self.baseline} → {self.candidate}"


def pair_up(baseline: Sequence[str], candidate: Sequence[str]) -> tuple[list[Pair], list[str], list[str]]:
    """The pairs, in the candidate's order, a remark for each engine without a partner, and the targets for which only
    the baseline has engines.

    Engines with the same name are partners. An app gets a target's first engine: if the candidate no longer has that of
    the baseline, because it may have failed its budget, its own first one for the target is the partner. If no name is
    in both, and each side has one engine, these are partners.

    Raises:
        TargetError: there is no pair.
    """
    pairs = [Pair(name, name) for name in candidate if name in baseline]
    first, instead = _first_of_targets(baseline), _first_of_targets(candidate)
    pairs += [Pair(first[each], instead[each]) for each in first if each in instead and first[each] not in candidate]
    if not pairs and len(baseline) == len(candidate) == 1:
        return [Pair(baseline[0], candidate[0])], [], []
    if not pairs:
        raise TargetError(
            "the two have no engine in common",
            found=f"{', '.join(baseline) or 'none'} against {', '.join(candidate) or 'none'}",
            wanted="engines of one target on both sides, or one engine on each",
            fix="name the target that is to be compared with --target",
        )
    left = [f"{name} is in the baseline only" for name in baseline if name not in [p.baseline for p in pairs]]
    left += [f"{name} is in the candidate only" for name in candidate if name not in [p.candidate for p in pairs]]
    return pairs, left, [target for target in first if target not in instead]


def _first_of_targets(artifacts: Sequence[str]) -> dict[str, str]:
    """The first engine of each target; the name of an artifact is its target and its precision."""
    return {artifact.rpartition("-")[0]: artifact for artifact in reversed(artifacts)}
