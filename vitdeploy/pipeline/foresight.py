"""What a budget asks and these samples cannot prove, known as soon as the original has answered."""

from __future__ import annotations

from vitdeploy.pipeline.tasks.kit import Data, Kit
from vitdeploy.spec import Budget
from vitdeploy.verify.collect import Answers
from vitdeploy.verify.comparison import Comparison
from vitdeploy.verify.feasible import Way, unprovable, way_to_prove


def bounds_answers(budget: Budget) -> bool:
    """Whether a budget asks anything of the answers."""
    return (budget.max_drop, budget.min_agreement) != (None, None)


def way_of(kit: Kit, reference: Answers, data: Data, budget: Budget) -> Way:
    """By what a bound on the drop is judged on these samples; settled by the original's answers alone."""
    if budget.max_drop is None:
        return "labels"
    return way_to_prove(Comparison.of(kit.compare(reference, reference, data)), budget.max_drop)


def foresee(kit: Kit, reference: Answers, data: Data, budget: Budget) -> list[str]:
    """A sentence for each bound that no engine can be proven to meet on the evaluation samples.

    The original is compared with itself, by the task's own comparison: no engine can prove more.
    """
    if not bounds_answers(budget):
        return []
    return unprovable(Comparison.of(kit.compare(reference, reference, data)), budget, kit.noun)
