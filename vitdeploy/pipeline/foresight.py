"""Find bounds of a budget that these samples cannot prove: before any work, and when the original has answered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.data.folder import USUAL_CALIBRATION, has_own_split, usual_calibration
from vitdeploy.errors import GateError
from vitdeploy.spec import Budget
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.verification.agreement import Agreement
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Criterion, criterion_to_prove, perfect_answers, unprovable
from vitdeploy.verification.records import Answers

if TYPE_CHECKING:
    from vitdeploy.pipeline.job import Job


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


def split_notes(job: Job) -> list[str]:
    """What to know about the split of the samples before any work: fewer calibrate than usual; a bound of the budget
    that no engine can be proven to meet, whatever it answers.

    Raises:
        GateError: such a bound, where fewer calibration samples leave enough to evaluate on.
    """
    data, noun = job.data, job.adapter.noun
    calibrates, evaluates = len(data.calibration), len(data.evaluation)
    total, own = calibrates + evaluates, has_own_split(Path(job.recipe.data.path))
    notes = []
    if job.recipe.data.calibration.images == "auto" and calibrates < USUAL_CALIBRATION:
        notes.append(
            f"{calibrates} of {total} {noun}s calibrate and {evaluates} evaluate (usual are {USUAL_CALIBRATION} to "
            "calibrate); data.calibration.images sets another number"
        )
    # Of answers that are right or wrong the number alone bounds what can be proven.
    if job.adapter.compared is not Agreement or not evaluates:
        return notes
    limits = unprovable(perfect_answers(evaluates), job.budget, noun)
    if limits and not own and (fewer := _enough_left(job, total)) is not None:
        raise GateError(
            f"the budget cannot be proven on the {evaluates} {noun}s that remain to evaluate",
            found=f"{'; '.join(limits)}; {calibrates} of {total} calibrate",
            wanted="more to evaluate on",
            fix=f"--set data.calibration.images={fewer}",
        )
    return notes + [f"{text}; on these the result is undecided, unless the budget is wider" for text in limits]


def _enough_left(job: Job, total: int) -> int | None:
    """A number of calibration samples with which the budget can be proven; None: there is none."""
    fewer = usual_calibration(total)
    if fewer >= len(job.data.calibration) or job.recipe.data.evaluation.images != "all":
        return None
    return None if unprovable(perfect_answers(total - fewer), job.budget) else fewer
