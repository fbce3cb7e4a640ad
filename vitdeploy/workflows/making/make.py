"""Make the steps of many plans side by side, but what measures: what several share is one task."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import cast

from vitdeploy.errors import VitdeployError
from vitdeploy.stages.step import Outline
from vitdeploy.stages.workers import Pool
from vitdeploy.store.store import Store, files_digest
from vitdeploy.workflows.making.stage import StageDone, StageTask, StepSource, make_stage


@dataclass
class Line:
    """Steps of one plan, in order. A step that measures, or is shared out itself, is taken if it is there, and never
    begun.

    `owner`: what has failed when one of them has, maybe with other lines; `shown`: what people call it. `digests` and
    `keys` of what is there, at first of what the steps need from elsewhere; `asked`: the steps of which nothing is to
    be begun any more.
    """

    owner: Hashable
    source: StepSource
    shown: str
    steps: Sequence[Outline]
    digests: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


class Making:
    """The steps of some lines on their way. One is begun when its inputs are there, so that its key is known: of steps
    with one key one is made, for all lines that need it.

    Args:
        told: called with a line on what a user should know.
        over: whether nothing more is to be begun.
        progress: called with how many steps of all are there, and how many there are.
        resume: reuse what earlier runs have stored.
        fresh: keys of the steps that are of this run, which it always reuses; those that are made are added.
        finished: called with each step that was made, or that a worker has found meanwhile, and which of both.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        told: Callable[[str], None],
        over: Callable[[], bool],
        progress: Callable[[int, int], None],
        *,
        resume: bool = True,
        fresh: set[str] | None = None,
        finished: Callable[[Outline, bool], None] = lambda step, reused: None,
    ) -> None:
        self._pool, self._store, self._told, self._over, self._progress = pool, store, told, over, progress
        self._resume, self._fresh, self._finished = resume, set() if fresh is None else fresh, finished
        self._lines: Sequence[Line] = ()
        # By key: the digest of what is there; and who waits for what is being made.
        self._there: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[Line, Outline]]] = {}
        self._failed: dict[str, VitdeployError] = {}
        self._elsewhere: set[str] = set()
        self._asked, self._made = 0, 0
        self.errors: dict[Hashable, VitdeployError] = {}

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many steps all lines asked for, how many of these are distinct and there, and how many were made."""
        return self._asked, len(self._there), self._made

    def run(self, lines: Sequence[Line]) -> None:
        """Make the steps of these lines. `errors` has the owners that failed, by what."""
        self._lines = lines
        self._asked += sum(len(line.steps) for line in self._lines)
        for line in self._lines:
            self._advance(line)
        self._tell()
        while (found := self._pool.next()) is not None:
            self._finish(*cast("tuple[str, StageDone | VitdeployError]", found))
            self._tell()
            if self._over():
                for key in self._pool.drop():
                    self._waiting.pop(str(key))

    def _tell(self) -> None:
        there = sum(step.name in line.digests for line in self._lines for step in line.steps)
        self._progress(there, sum(len(line.steps) for line in self._lines))

    def _advance(self, line: Line) -> None:
        """Take what is there, and begin what can be."""
        for step in line.steps:
            ready = step.name not in line.asked and all(name in line.digests for name in step.inputs)
            if not ready or line.owner in self.errors:
                continue
            line.asked.add(step.name)
            key = line.keys[step.name] = step.key(line.digests)
            if (digest := self._look(key, step)) is not None:
                line.digests[step.name] = digest
            elif key in self._failed:
                self.errors[line.owner] = self._failed[key]
            elif key in self._waiting:
                self._waiting[key].append((line, step))
            elif not (step.measured or step.shared_out or self._over()):
                self._waiting[key] = [(line, step)]
                self._begin(line, step, key)

    def _begin(self, line: Line, step: Outline, key: str) -> None:
        inputs = tuple((name, line.keys[name]) for name in step.inputs)
        task = StageTask(line.source, step.name, inputs, key, self._resume)
        self._pool.submit(key, make_stage, task, f"{line.shown}: {step.name}")

    def _look(self, key: str, step: Outline) -> str | None:
        """The digest of a step that is there already."""
        ours = key in self._fresh
        if key not in self._there and (ours or self._resume) and (record := self._store.look(key)) is not None:
            folder = self._store.folder(key)
            if (ours and step.measured) or not folder.is_dir() or step.usable(folder):
                self._there[key] = files_digest(record.files)
        return self._there.get(key)

    def _finish(self, key: str, found: StageDone | VitdeployError) -> None:
        waiting = self._waiting.pop(key)
        if isinstance(found, VitdeployError):
            self._failed[key] = found
            for line, _ in waiting:
                self.errors.setdefault(line.owner, found)
            return
        if found.digest is None:
            self._leave(found.host)
            return
        self._made += found.made
        self._fresh.add(key)
        self._there[key] = found.digest
        self._finished(waiting[0][1], not found.made)
        for line, step in waiting:
            line.digests[step.name] = found.digest
            self._advance(line)

    def _leave(self, host: str) -> None:
        """What a node would make otherwise is left to the process that measures, with all that needs it."""
        if host not in self._elsewhere:
            self._elsewhere.add(host)
            self._told(
                f"{host} has another CPU, driver or release of a package than this machine: what depends on it is made"
                " where it is measured"
            )
