"""What a budget asks and these samples cannot prove, known as soon as the original has answered."""

from __future__ import annotations

from vitdeploy.pipeline.tasks.kit import Data, Kit
from vitdeploy.spec import Budget
from vitdeploy.verify.collect import Answers
from vitdeploy.verify.comparison import Comparison
from vitdeploy.verify.feasible import unprovable


def bounds_answers(budget: Budget) -> bool:
    """Whether a budget asks anything of the answers."""
    return (budget.max_drop, budget.min_agreement) != (None, None)


def foresee(kit: Kit, reference: Answers, data: Data, budget: Budget) -> list[str]:
    """A sentence for each bound that no engine can be proven to meet on the evaluation samples.

    The original is compared with itself, by the task's own comparison: no engine can prove more.
    """
    if not bounds_answers(budget):
        return []
    return unprovable(Comparison.of(kit.compare(reference, reference, data)), budget, kit.noun)
