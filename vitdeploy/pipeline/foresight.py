"""Find bounds of a budget that these samples cannot prove, as soon as the original has answered."""

from __future__ import annotations

from vitdeploy.spec import Budget
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.feasible import Criterion, criterion_to_prove, unprovable


def bounds_answers(budget: Budget) -> bool:
    """Whether a budget bounds the answers."""
    return (budget.max_drop, budget.min_agreement) != (None, None)


def criterion_of(adapter: TaskAdapter, reference: Answers, data: Data, budget: Budget) -> Criterion:
    """The criterion for a bound on the drop on these samples; it depends only on the original's answers."""
    return "labels" if budget.max_drop is None else criterion_by(adapter.compare(reference, reference, data), budget)


def criterion_by(perfect: Comparison, budget: Budget) -> Criterion:
    """The same by `perfect`: the original compared with itself."""
    return "labels" if budget.max_drop is None else criterion_to_prove(perfect, budget.max_drop)


def foresee(adapter: TaskAdapter, reference: Answers, data: Data, budget: Budget) -> list[str]:
    """A sentence for each bound that no engine can be proven to meet on the evaluation samples.

    The original is compared with itself, by the task's own comparison: no engine can prove more.
    """
    if not bounds_answers(budget):
        return []
    return unprovable(adapter.verify(reference, reference, data), budget, adapter.noun)
