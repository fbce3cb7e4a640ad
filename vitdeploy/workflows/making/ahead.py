"""The steps of several variants side by side, before a search goes through the variants one after the other.

What measures is made by the search itself, while no worker has anything to do; so is what is shared out to the workers
in pieces. Neither changes what the search finds: it takes what is there by its key, and makes what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.stages.step import Outline, Step
from vitdeploy.stages.workers import Pool
from vitdeploy.store.store import Artifact, Store
from vitdeploy.workflows.making.make import Line, Making
from vitdeploy.workflows.making.stage import StepSource, needed_for

Run = Callable[[list[Step], Mapping[str, Artifact]], object]


@dataclass(frozen=True)
class Wanted:
    """A plan whose steps are to be made. `owner`: what has failed when one of them has; `given`: artifacts of steps
    before it; `source`: of its steps and those before, for workers."""

    owner: Hashable
    source: StepSource
    shown: str
    plan: list[Step]
    given: Mapping[str, Artifact] = field(default_factory=dict)


class Ahead:
    """Makes plans in a pool.

    Args:
        run: makes steps of a plan here and now, where others are given.
        fatal: whether an error of an owner ends the search: then nothing more is begun.
        told, finished: of `Making`. progress: called with how many steps of all are there, and how many there are.
        resume, fresh: as for `run_plan`.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        run: Run,
        fatal: Callable[[Hashable, VitdeployError], bool],
        told: Callable[[str], None],
        finished: Callable[[Outline, bool], None],
        progress: Callable[[int, int], None],
        *,
        resume: bool,
        fresh: set[str],
    ) -> None:
        self._run, self._fatal = run, fatal
        self._late: Callable[[], bool] = _never
        how = {"resume": resume, "fresh": fresh, "finished": finished}
        self._making = Making(pool, store, told, self._over, progress, **how)  # type: ignore[arg-type]
        self.errors = self._making.errors

    def make(self, wanted: Sequence[Wanted], late: Callable[[], bool] | None = None) -> set[Hashable]:
        """Make what these need, and return the owners of which all is there, or that have failed: see `errors`.

        Args:
            late: whether nothing more is to be begun; None: never.

        Raises:
            WorkerError: what is made here has no worker that does it.
        """
        self._late = late or _never
        begun: set[str] = set()
        while True:
            lines = [_line(each) for each in wanted]
            self._making.run(lines)
            ours = [step for each, line in zip(wanted, lines, strict=True) for step in self._next(each, line, begun)]
            if not ours:
                break
            for each, step, key in ours:
                if not self._over() and key not in begun:
                    begun.add(key)
                    self._make_here(each, step)
        left = {line.owner for line in lines if any(step.name not in line.digests for step in line.steps)}
        return {each.owner for each in wanted if each.owner not in left or each.owner in self.errors}

    def _next(self, wanted: Wanted, line: Line, begun: set[str]) -> Iterator[tuple[Wanted, Step, str]]:
        """What is to be made here, and could be now, with its key."""
        if line.owner in self.errors or self._over():
            return
        for step, outline in zip(wanted.plan, line.steps, strict=True):
            here = outline.measured or outline.shared_out
            ready = step.name not in line.digests and all(name in line.digests for name in step.inputs)
            if here and ready and (key := outline.key(line.digests)) not in begun:
                yield wanted, step, key

    def _make_here(self, wanted: Wanted, step: Step) -> None:
        try:
            self._run([*needed_for(wanted.plan, step), step], wanted.given)
        except WorkerError:
            raise  # of what measures, or of pieces that all INT8 needs
        except VitdeployError as error:
            self.errors.setdefault(wanted.owner, error)

    def _over(self) -> bool:
        return self._late() or any(self._fatal(owner, error) for owner, error in self.errors.items())


def _never() -> bool:
    return False


def _line(wanted: Wanted) -> Line:
    """As it is begun: nothing of the plan is known to be there, and all that was given is."""
    steps = [step.outline() for step in wanted.plan]
    digests = {name: artifact.digest for name, artifact in wanted.given.items()}
    keys = {name: artifact.key for name, artifact in wanted.given.items()}
    return Line(wanted.owner, wanted.source, wanted.shown, steps, digests, keys)
