"""Sweeps: a recipe or a grid of them, each entry measured once."""

from __future__ import annotations

import shutil
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.report import Report, read_report
from vitdeploy.document.sweep import Running, StageCounts, SweepDocument, SweptRecipe
from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.pipeline.assemble import run_pipeline
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.outcome import now
from vitdeploy.pipeline.schedule import AtSize, PlanProgress, Scheduler, pooled
from vitdeploy.progress import Progress, silent
from vitdeploy.publish import replacing
from vitdeploy.runtime.host import describe_host
from vitdeploy.stages.step import OUTPUT_NAMES, Step
from vitdeploy.stages.workers import Executor, Pool, Workers
from vitdeploy.store.key import Identity
from vitdeploy.store.store import Store, shared_store
from vitdeploy.workflows.sweeps.entries import (
    Entry,
    FinishedRecipes,
    Outlined,
    load_all,
    measuring,
    outline,
    unmeasured,
)

# --- The run of one recipe of a sweep, here or on a node that measures ------------------------------------------------


# The kind of artifact by which a bundle travels, and its folder in there.
TRAVELS, BUNDLE = "swept", "bundle"


def measure(entry: Entry, jobs: tuple[Job, ...], out: Path, told: Callable[[str], None]) -> Report:
    """Run a recipe, whose `jobs` are those of `Entry.prepare`, with the bundle at `out`. What the store has is taken
    from there. `told`: called with a line on what a user should know. Errors of stages and of the bench propagate."""
    recipe = entry.load()

    def finished(job: Job, step: Step, reused: bool) -> None:
        if step.measured and reused:
            told(f"{recipe.name}: {step.name} was chosen by times that were measured earlier on this device")

    for note in dict.fromkeys(note for job in jobs for note in (*job.data.notes, *job.data.warnings)):
        told(f"{recipe.name}: {note}")
    report, _ = run_pipeline(
        jobs,
        recipe,
        out,
        Store(entry.store, shared_store()),
        resume=True,
        progress=lambda job: silent,
        finished=finished,
        note=lambda job, text: told(f"{recipe.name}: {text}"),
    )
    return report


@dataclass(frozen=True)
class MeasuredThere:
    """What a node has measured: its bundle is in the store under `key`. `told`: lines for the user; `host`: its
    name."""

    key: str
    told: tuple[str, ...]
    host: str


def measure_there(entry: Entry) -> MeasuredThere:
    """Run a recipe on this node; its bundle goes to the store, where the command that asked takes it from. Errors as
    those of `measure`."""
    told: list[str] = []
    asked = {"recipe": entry.load().name, "of": uuid.uuid4().hex}
    by = Identity(TRAVELS, asked, {}, {})
    store = Store(entry.store, shared_store())

    def write(work: Path) -> None:
        measure(entry, entry.prepare(), work / BUNDLE, told.append)

    store.make(by, write)
    if store.shared is not None:  # from there it is taken
        store.remove(by.key)
    return MeasuredThere(by.key, tuple(told), socket.gethostname())


def bring(found: MeasuredThere, store: Store, out: Path) -> Report:
    """Give the bundle that a node has measured its place, and take it out of the store of this machine.

    Raises:
        WorkerError: it is not in the store. OutputError: `out` holds something that is not a bundle.
    """
    artifact = store.find(found.key)
    if artifact is None:
        raise WorkerError(
            f"the bundle that {found.host} has measured is not in the store",
            found=f"no artifact {found.key[:12]} that is whole",
            wanted="a store that the node and this machine share",
            fix="the same command measures it again",
        )
    with replacing(out, OUTPUT_NAMES) as work:
        shutil.copytree(artifact.path / BUNDLE, work, dirs_exist_ok=True)
    store.remove(found.key)
    return read_report(out / "report.json")


# --- Many recipes -----------------------------------------------------------------------------------------------------
# what can be made side by side is, what is measured has a machine for itself, and one table of all.


# Of a sweep that is to end at a time, so many recipes are made and then measured, before any of the next: what is done
# when it ends was measured too.
AT_ONCE = 8
# How often a page is written while stages are made.
PAGE_SECONDS = 10.0
OVER = "the time of the sweep was over"


@dataclass(frozen=True)
class _Looked:
    """A recipe that is to be measured. `jobs` are kept where it is made and measured at once."""

    index: int
    outlined: Outlined
    jobs: tuple[Job, ...] | None


@dataclass
class RecipeSweep:
    """Recipes that are run, with the bundle of each at `out`/<its name>.

    `told` is called with a line on each recipe that is finished, or failed. `executor` makes the steps that measure
    nothing ahead of time, those that recipes share once; without one, a recipe is made when it is measured. `seconds`:
    no recipe is begun that would end later, as far as is known. `resume`: keep the bundles that an earlier sweep has
    finished. `page` is given the document as it grows.
    """

    entries: Sequence[Entry]
    out: Path
    progress: Progress
    told: Callable[[str], None]
    executor: Executor | None = None
    seconds: float | None = None
    resume: bool = True
    page: Callable[[SweepDocument], None] | None = None
    _rows: dict[int, SweptRecipe] = field(default_factory=dict, init=False)
    _begun: float = field(default_factory=time.monotonic, init=False)
    _page_at: float = field(default=0.0, init=False)
    _measured: int = field(default=0, init=False)
    _scheduler: Scheduler | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """InputError: two recipes have one name. Errors of recipes propagate."""
        self._recipes = load_all(self.entries)
        self._store = Store(self.entries[0].store, shared_store())
        self._finished = FinishedRecipes(self.out)
        self._phase = ("begin", 0, len(self.entries))

    def run(self) -> SweepDocument:
        """Run all recipes, and return sweep.json; errors of the executor propagate.

        A recipe that fails does not end the others. What measures runs alone: on the nodes of the executor that are for
        it, or, where there are none, one recipe after the other in this process and its children.
        """
        self._show(at_once=True)
        with pooled(Workers(self.executor)) as (_, pool):
            for some in self._parts(pool):
                looked = [found for index in some if (found := self._look(index, keep=pool is None)) is not None]
                if pool is not None:
                    looked = self._make(pool, looked)
                if pool is not None and pool.lonely:
                    self._measure_there(pool, looked)
                else:
                    self._measure_here(looked)
        return self._document(None)

    # --- one after the other, or in parts -----------------------------------------------------------------------------

    def _parts(self, pool: Pool | None) -> Iterator[range]:
        """Which recipes are made and measured before the next are looked at."""
        count = len(self.entries)
        size = 1 if pool is None else count if self.seconds is None else max(AT_ONCE, pool.lonely)
        for first in range(0, count, size):
            if not self._over():
                yield range(first, min(first + size, count))

    def _left(self) -> float:
        return float("inf") if self.seconds is None else self._begun + self.seconds - time.monotonic()

    def _over(self) -> bool:
        return self._left() <= 0

    def _look(self, index: int, *, keep: bool) -> _Looked | None:
        """A recipe that is to be measured; None if it is finished, or fails by now."""
        entry, recipe = self.entries[index], self._recipes[index]
        self._set_phase("look at the recipes", index, len(self.entries))
        try:
            jobs = entry.prepare()
            outlined = outline(entry, recipe, jobs)
        except VitdeployError as error:
            self._failed(index, error)
            return None
        found = self._finished.find(outlined) if self.resume else None
        if found is None:
            return _Looked(index, outlined, jobs if keep else None)
        report, host = found
        self.told(f"{recipe.name}: finished already, measured {report.created}")
        self._row(index, report, host)
        return None

    def _make(self, pool: Pool, looked: Sequence[_Looked]) -> list[_Looked]:
        """Make what these need; returns those that have not failed."""
        if self._scheduler is None:
            self._scheduler = Scheduler(pool, self._store, self._made, "make", self.told)
        plans = [
            PlanProgress(
                each.outlined.entry, AtSize(each.outlined.entry, size), each.outlined.recipe.name, unmeasured(plan)
            )
            for each in looked
            for size, plan in enumerate(each.outlined.plans)
        ]
        self._scheduler.run(plans, self._over)
        left = []
        for each in looked:
            error = self._scheduler.errors.get(each.outlined.entry)
            if error is None:
                left.append(each)
            else:
                self._failed(each.index, error)
        return left

    def _made(self, text: str, done: int, total: int) -> None:
        self.progress(text, done, total)
        self._set_phase(text, done, total)

    # --- measure ------------------------------------------------------------------------------------------------------

    def _measure_here(self, looked: Iterable[_Looked]) -> None:
        for each in looked:
            if not self._fits(each):
                continue
            entry, name = self.entries[each.index], each.outlined.recipe.name
            self._set_phase(f"measure {name}", len(self._rows), len(self.entries), at_once=True)
            try:
                report = measure(entry, each.jobs or entry.prepare(), self.out / name, self.told)
                self._done(each, report, None)
            except VitdeployError as error:
                self._failed(each.index, error)

    def _measure_there(self, pool: Pool, looked: Iterable[_Looked]) -> None:
        """As many at a time as there are nodes that measure."""
        waiting, running = deque(looked), 0
        while waiting or running:
            while waiting and running < max(1, pool.lonely):
                each = waiting.popleft()
                if self._fits(each):
                    pool.submit(each, measure_there, self.entries[each.index], each.outlined.recipe.name, alone=True)
                    running += 1
            self._set_phase(f"measure on {pool.lonely} nodes", len(self._rows), len(self.entries), at_once=True)
            if (found := pool.next()) is None:
                continue
            running -= 1
            self._take(*cast("tuple[_Looked, MeasuredThere | VitdeployError]", found))

    def _take(self, each: _Looked, found: MeasuredThere | VitdeployError) -> None:
        """What a node has measured, or the error that it had."""
        if isinstance(found, VitdeployError):
            self._failed(each.index, found)
            return
        for line in found.told:
            self.told(line)
        try:
            self._done(each, bring(found, self._store, self.out / each.outlined.recipe.name), found.host)
        except VitdeployError as error:
            self._failed(each.index, error)

    def _fits(self, each: _Looked) -> bool:
        """Whether a recipe may be begun: measuring is never cut off."""
        return self.seconds is None or self._left() >= measuring(each.outlined).seconds

    def _done(self, each: _Looked, report: Report, host: str | None) -> None:
        self._finished.add(each.outlined, host)
        self._measured += 1
        self.told(f"{each.outlined.recipe.name}: {report.verdict.sentence}")
        self._row(each.index, report, host)

    # --- the document -------------------------------------------------------------------------------------------------

    def _failed(self, index: int, error: VitdeployError) -> None:
        self.told(f"{self._recipes[index].name}: {error}")
        self._row(index, None, None, ErrorFacts.of(error))

    def _row(self, index: int, report: Report | None, host: str | None, error: ErrorFacts | None = None) -> None:
        entry, name = self.entries[index], self._recipes[index].name
        self._rows[index] = SweptRecipe(name, str(entry.file), report, error, dict(entry.choices) or None, host)
        self.progress("measure", len(self._rows), len(self.entries))
        self._show(at_once=True)

    def _set_phase(self, text: str, done: int, total: int, *, at_once: bool = False) -> None:
        self._phase = (text, done, total)
        self._show(at_once=at_once)

    def _show(self, *, at_once: bool) -> None:
        """Write the page, where one is asked for; to draw it takes a second, so not at every step."""
        if self.page is not None and (at_once or time.monotonic() > self._page_at + PAGE_SECONDS):
            self.page(self._document(Running(*self._phase, now(), self._seconds_left())))
            self._page_at = time.monotonic()

    def _seconds_left(self) -> float | None:
        """As the recipes took that were measured; None before any was."""
        if not self._measured:
            return None
        return (len(self.entries) - len(self._rows)) * (time.monotonic() - self._begun) / self._measured

    def _document(self, running: Running | None) -> SweepDocument:
        rows = tuple(self._rows.get(index) or self._not_begun(index, running) for index in range(len(self.entries)))
        stages = StageCounts(*self._scheduler.counts) if self._scheduler is not None else None
        return SweepDocument(1, now(), rows, describe_host(), stages, running)

    def _not_begun(self, index: int, running: Running | None) -> SweptRecipe:
        entry, name = self.entries[index], self._recipes[index].name
        why = OVER if running is None else "not measured yet"
        return SweptRecipe(name, str(entry.file), None, None, dict(entry.choices) or None, None, why)
