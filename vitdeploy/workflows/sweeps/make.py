"""Make what recipes need, up to what measures, side by side: what several share is one task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vitdeploy.errors import VitdeployError
from vitdeploy.stages.step import Outline
from vitdeploy.store.store import Store, files_digest
from vitdeploy.workflows.executors import Pool
from vitdeploy.workflows.sweeps.entries import Entry, Outlined, unmeasured
from vitdeploy.workflows.sweeps.stage import StageDone, StageTask, make_stage


@dataclass
class _Line:
    """One recipe at one of its image sizes. `digests` and `keys` of the steps that are there; `asked`: those of which
    nothing is to be begun any more."""

    outlined: Outlined
    size: int
    steps: list[Outline]
    digests: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


class Making:
    """The stages of some recipes on their way. A step is begun when its inputs are there, so that its key is known: of
    steps with one key one is made, for all recipes that need it.

    Args:
        told: called with a line on what a user should know.
        over: whether nothing more is to be begun.
        progress: called with how many steps of all are there, and how many there are.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        told: Callable[[str], None],
        over: Callable[[], bool],
        progress: Callable[[int, int], None],
    ) -> None:
        self._pool, self._store, self._told, self._over, self._progress = pool, store, told, over, progress
        self._lines: list[_Line] = []
        # By key: the digest of what is there; and who waits for what is being made.
        self._there: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[_Line, Outline]]] = {}
        self._failed: dict[str, VitdeployError] = {}
        self._elsewhere: set[str] = set()
        self._asked, self._made = 0, 0
        self.errors: dict[Entry, VitdeployError] = {}

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many stages all recipes asked for, how many of these are distinct and there, and how many were made."""
        return self._asked, len(self._there), self._made

    def run(self, recipes: Sequence[Outlined]) -> None:
        """Make the steps of these recipes. `errors` has the recipes that failed, by what."""
        self._lines = [_Line(each, size, unmeasured(plan)) for each in recipes for size, plan in enumerate(each.plans)]
        self._asked += sum(len(line.steps) for line in self._lines)
        for line in self._lines:
            self._advance(line)
        self._tell()
        while (found := self._pool.next()) is not None:
            self._finish(*found)
            self._tell()
            if self._over():
                for key in self._pool.drop():
                    self._waiting.pop(key)

    def _tell(self) -> None:
        self._progress(sum(len(line.digests) for line in self._lines), sum(len(line.steps) for line in self._lines))

    def _advance(self, line: _Line) -> None:
        """Take what is there, and begin what can be."""
        for step in line.steps:
            ready = step.name not in line.asked and all(name in line.digests for name in step.inputs)
            if not ready or line.outlined.entry in self.errors:
                continue
            line.asked.add(step.name)
            key = line.keys[step.name] = step.key(line.digests)
            if (digest := self._look(key, step)) is not None:
                line.digests[step.name] = digest
            elif key in self._failed:
                self.errors[line.outlined.entry] = self._failed[key]
            elif key in self._waiting:
                self._waiting[key].append((line, step))
            elif not self._over():
                self._waiting[key] = [(line, step)]
                self._begin(line, step, key)

    def _begin(self, line: _Line, step: Outline, key: str) -> None:
        inputs = tuple((name, line.keys[name]) for name in step.inputs)
        task = StageTask(line.outlined.entry, line.size, step.name, inputs, key)
        self._pool.submit(key, make_stage, task, f"{line.outlined.recipe.name}: {step.name}")

    def _look(self, key: str, step: Outline) -> str | None:
        """The digest of a step that is there already."""
        if key not in self._there and (record := self._store.look(key)) is not None:
            folder = self._store.folder(key)
            if not folder.is_dir() or step.usable(folder):
                self._there[key] = files_digest(record.files)
        return self._there.get(key)

    def _finish(self, key: str, found: StageDone | VitdeployError) -> None:
        waiting = self._waiting.pop(key)
        if isinstance(found, VitdeployError):
            self._failed[key] = found
            for line, _ in waiting:
                self.errors.setdefault(line.outlined.entry, found)
            return
        if found.digest is None:
            self._leave(found.host)
            return
        self._made += found.made
        self._there[key] = found.digest
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
