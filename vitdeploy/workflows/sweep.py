"""Sweeps: many recipes or grids. Shared stages are made once, measurements run alone on a machine, and one table shows
all results."""

import contextlib
import hashlib
import os
import shutil
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from vitdeploy.benchmark.run import ExpectedTime
from vitdeploy.bundle.read import file_sha256
from vitdeploy.document import sweep
from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.report import Report, read_report
from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.pipeline import assemble, outcome, schedule
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import StepTimes
from vitdeploy.progress import Progress, silent
from vitdeploy.publish import replacing, storage_errors
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import encode
from vitdeploy.stages.step import OUTPUT_NAMES, Step, package_versions
from vitdeploy.stages.workers import Executor, Pool, Workers
from vitdeploy.store.key import Identity, canonical_json, code_version
from vitdeploy.store.store import (
    Store,
    append_line,
    decoded_lines,
    files_digest,
    read_log,
    shared_store,
)

# --- The recipes of a sweep, and the stages of each -------------------------------------------------------------------


@dataclass(frozen=True)
class Entry(schedule.LoadedRecipe):
    """One recipe of a sweep; `file` and `choices` as in `ListedRecipe`."""

    file: Path = Path()
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.recipe.name


@dataclass(frozen=True)
class _Outlined:
    """An examined recipe: its steps for each image size, and `key`, the digest of everything that its result depends
    on, except the machine that measures. `jobs` are kept if it is made and measured at once."""

    entry: Entry
    plans: tuple[tuple[Step, ...], ...]
    key: str
    jobs: tuple[Job, ...] | None = None

    @property
    def name(self) -> str:
        return self.entry.name


def outline(entry: Entry, jobs: Sequence[Job]) -> _Outlined:
    """The outline of an entry from its `jobs`, which `prepare` returns."""
    plans = tuple(tuple(step.outline() for step in make_plan(job)) for job in jobs)
    steps = [planned_keys(plan) for plan in plans]
    tools = {"code": code_version(everything=True), **package_versions(outcome.TOOLS)}
    parts = {"recipe": entry.recipe.model_dump(mode="json"), "steps": steps, "tools": tools}
    return _Outlined(entry, plans, hashlib.sha256(canonical_json(parts).encode()).hexdigest())


def planned_keys(plan: Sequence[Step]) -> dict[str, str]:
    """A key for each step, as if none were made: the key of an input replaces its digest. Two recipes with the same key
    have the same result in that step."""
    keys: dict[str, str] = {}
    for step in plan:
        keys[step.name] = step.key({name: f"planned:{keys[name]}" for name in step.inputs})
    return keys


def unmeasured(plan: Sequence[Step]) -> list[Step]:
    """The steps that neither measure nor depend on a measurement."""
    left_out: set[str] = set()
    kept = []
    for step in plan:
        if step.measured or left_out.intersection(step.inputs):
            left_out.add(step.name)
        else:
            kept.append(step)
    return kept


# --- The cost of stages and measurements, estimated from similar earlier stages ---------------------------------------


def added(estimates: Sequence[sweep.Estimate]) -> sweep.Estimate | None:
    """The estimate for several stages run one by one; None for no stages."""
    if not estimates:
        return None
    return sweep.Estimate(
        sum(estimate.least for estimate in estimates),
        sum(each.median for each in estimates),
        sum(each.most for each in estimates),
    )


def measuring(outlined: _Outlined) -> ExpectedTime:
    """How long the bench of a recipe takes, at all its image sizes."""
    found = [assemble.expected_bench(outlined.entry.recipe, plan) for plan in outlined.plans]
    return ExpectedTime(sum(each.seconds for each in found), sum(each.most for each in found))


# --- Finished recipes of a sweep: a file next to their bundles, from which the same command resumes -------------------
# `finished.jsonl` has a line for each bundle, appended once the bundle has its name. A line is valid while the recipe
# would give the same result and the bundle is unchanged.


FINISHED_FILE = "finished.jsonl"
_FILES = ("manifest.json", "report.json")


@dataclass(frozen=True)
class _Finished:
    """A finished bundle: the name of its recipe, `key` of `_Outlined`, `files`: SHA-256 of its manifest.json and
    report.json, which has all other digests; `host`: the name of the machine that measured, if another one."""

    name: str
    key: str
    files: dict[str, str]
    host: str | None


class _FinishedRecipes:
    """The finished recipes in the folder `home`."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / FINISHED_FILE
        self._known: dict[str, _Finished] = {}
        with contextlib.suppress(FileNotFoundError):
            self._known = {line.name: line for line in decoded_lines(_Finished, self._path.read_bytes())}

    def find(self, outlined: _Outlined) -> tuple[Report, str | None] | None:
        """The report of a recipe with a finished bundle, and the host that measured it; None if not finished."""
        bundle, found = self._home / outlined.name, self._known.get(outlined.name)
        if found is None or found.key != outlined.key or _digests(bundle) != found.files:
            return None
        return read_report(bundle / "report.json"), found.host

    def add(self, outlined: _Outlined, host: str | None) -> None:
        """Add a recipe whose bundle is complete.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        name = outlined.name
        line = _Finished(name, outlined.key, _digests(self._home / name) or {}, host)
        data = b"\n" * self._torn() + canonical_json(encode(line)).encode() + b"\n"
        with storage_errors(self._path):
            append_line(self._path, data, flushed=True)
        self._known[name] = line

    def _torn(self) -> bool:
        """Whether a crash has truncated the last line."""
        with contextlib.suppress(FileNotFoundError, OSError), self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
        return False


def _digests(bundle: Path) -> dict[str, str] | None:
    try:
        return {name: file_sha256(bundle / name) for name in _FILES}
    except OSError:
        return None


# --- The plan of a sweep with its cost. Models are loaded and data is listed; nothing is made -------------------------


@dataclass
class _Stage:
    step: Step
    there: bool
    recipes: dict[str, None] = field(default_factory=dict)


def plan_sweep(
    entries: Sequence[Entry], out: Path, store: Store, progress: Progress, *, resume: bool, anywhere: bool
) -> sweep.SweepPlanDocument:
    """The plan of `sweep` with these arguments. A recipe that would fail is in the plan with its error.

    Args:
        anywhere: estimate stages also from other kinds of machines, such as those of a cluster.

    Errors of a shared store propagate.
    """
    finished, costs = _FinishedRecipes(out), StepTimes(read_log(store.root), anywhere=anywhere)
    rows: list[sweep.PlannedRecipe] = []
    stages: dict[str, _Stage] = {}
    asked = 0
    for done, entry in enumerate(entries):
        progress("plan", done, len(entries))
        row = sweep.PlannedRecipe(entry.name, str(entry.file), False, None, None, None, dict(entry.choices) or None)
        try:
            outlined = outline(entry, entry.prepare())
        except VitdeployError as error:
            rows.append(replace(row, error=ErrorFacts.of(error)))
            continue
        if resume and finished.find(outlined) is not None:
            rows.append(replace(row, finished=True))
            continue
        time = measuring(outlined)
        rows.append(replace(row, seconds=time.seconds, most=time.most))
        for plan in outlined.plans:
            asked += len(plan)
            _look(outlined, plan, stages, store)
    progress("plan", len(entries), len(entries))
    planned = tuple(_planned(stage, costs) for stage in stages.values())
    return sweep.SweepPlanDocument(
        1, outcome.now(), tuple(rows), planned, _total(asked, planned, rows), describe_host()
    )


def _look(outlined: _Outlined, plan: Sequence[Step], stages: dict[str, _Stage], store: Store) -> None:
    """Add the stages of a plan, by their keys. The digest of a missing input is replaced by a word with its key, so two
    stages have the same key if they would have the same result."""
    digests: dict[str, str] = {}
    for step in plan:
        key = step.key(digests)
        known = all(not digests[name].startswith("planned:") for name in step.inputs)
        record = store.look(key) if known else None
        folder = store.folder(key)
        there = record is not None and (not folder.is_dir() or step.usable(folder))
        digests[step.name] = files_digest(record.files) if record is not None and there else f"planned:{key}"
        stages.setdefault(key, _Stage(step, there)).recipes[outlined.name] = None


def _planned(stage: _Stage, costs: StepTimes) -> sweep.PlannedStage:
    seconds, size, seen = (None, None, 0) if stage.there else costs.of(stage.step)
    return sweep.PlannedStage(stage.step.name, tuple(stage.recipes), stage.there, seconds, size, seen)


def _total(asked: int, stages: Sequence[sweep.PlannedStage], recipes: Sequence[sweep.PlannedRecipe]) -> sweep.PlanTotal:
    to_make = [stage for stage in stages if not stage.there]
    return sweep.PlanTotal(
        asked=asked,
        distinct=len(stages),
        there=len(stages) - len(to_make),
        to_make=len(to_make),
        unknown=sum(not stage.seen for stage in to_make),
        seconds=added([stage.seconds for stage in to_make if stage.seconds is not None]),
        bytes=added([stage.bytes for stage in to_make if stage.bytes is not None]),
        measuring=sum(recipe.seconds or 0.0 for recipe in recipes),
        measuring_most=sum(recipe.most or 0.0 for recipe in recipes),
    )


# --- The run of one recipe of a sweep, here or on a node that measures ------------------------------------------------


# The kind of artifact that transports a bundle, and the bundle's folder in it.
TRAVELS, BUNDLE = "swept", "bundle"


def measure(entry: Entry, jobs: tuple[Job, ...], out: Path, told: Callable[[str], None]) -> Report:
    """Run a recipe with the `jobs` of `Entry.prepare`, and write the bundle to `out`. Stored stages are reused. `told`:
    called with notes for the user. Errors of stages and of the bench propagate."""

    def finished(job: Job, step: Step, reused: bool) -> None:
        if step.measured and reused:
            told(f"{entry.name}: {step.name} reused times measured earlier on this device")

    for note in dict.fromkeys(note for job in jobs for note in (*job.data.notes, *job.data.warnings)):
        told(f"{entry.name}: {note}")
    report, _ = assemble.run_pipeline(
        entry,
        jobs,
        out,
        Store(entry.store, shared_store()),
        resume=True,
        progress=lambda job: silent,
        finished=finished,
        note=lambda job, text: told(f"{entry.name}: {text}"),
    )
    return report


@dataclass(frozen=True)
class _MeasuredThere:
    """The result of a node that measured: its bundle is in the store under `key`. `told`: notes for the user; `host`:
    the node's name."""

    key: str
    told: tuple[str, ...]
    host: str


def measure_there(entry: Entry) -> _MeasuredThere:
    """Run a recipe on this node; its bundle goes to the store, from which the requesting command fetches it. Errors as
    in `measure`."""
    told: list[str] = []
    by = Identity(TRAVELS, {"recipe": entry.name, "of": uuid.uuid4().hex}, {}, {})
    store = Store(entry.store, shared_store())

    def write(work: Path) -> None:
        measure(entry, entry.prepare(), work / BUNDLE, told.append)

    store.make(by, write)
    if store.shared is not None:  # fetched from there
        store.remove(by.key)
    return _MeasuredThere(by.key, tuple(told), socket.gethostname())


def bring(found: _MeasuredThere, store: Store, out: Path) -> Report:
    """Move the bundle that a node has measured from the store of this machine to `out`.

    Raises:
        WorkerError: it is not in the store. OutputError: `out` holds something that is not a bundle.
    """
    artifact = store.find(found.key)
    if artifact is None:
        raise WorkerError(
            f"the bundle measured by {found.host} is not in the store",
            found=f"no complete artifact {found.key[:12]}",
            expected="a store that the node and this machine share",
            fix="run the same command to measure it again",
        )
    with replacing(out, OUTPUT_NAMES) as work:
        shutil.copytree(artifact.path / BUNDLE, work, dirs_exist_ok=True)
    store.remove(found.key)
    return read_report(out / "report.json")


# --- Many recipes -----------------------------------------------------------------------------------------------------
# Stages are made in parallel where possible, measurements run alone on a machine, and one table shows all results.


# With a time limit, recipes are made and measured in groups of this size, so that finished stages are measured too when
# the limit is reached.
AT_ONCE = 8
# Seconds between two updates of the page while stages are made.
PAGE_SECONDS = 10.0
OVER = "the time limit of the sweep was reached"


@dataclass
class RecipeSweep:
    """Runs recipes, with the bundle of each at `out`/<its name>.

    `told` is called with a line on each finished or failed recipe. `executor` runs the steps without measurements in
    advance, shared ones once; without it, a recipe is made when it is measured. `seconds`: no recipe starts that would
    be expected to end later. `resume`: keep the bundles that an earlier sweep has finished. `page` is called with the
    growing document.
    """

    entries: Sequence[Entry]
    out: Path
    progress: Progress
    told: Callable[[str], None]
    executor: Executor | None = None
    seconds: float | None = None
    resume: bool = True
    page: Callable[[sweep.SweepDocument], None] | None = None
    _rows: dict[str, sweep.SweptRecipe] = field(default_factory=dict, init=False)
    _begun: float = field(default_factory=time.monotonic, init=False)
    _page_at: float = field(default=0.0, init=False)
    _measured: int = field(default=0, init=False)
    _scheduler: schedule.Scheduler | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._store = Store(self.entries[0].store, shared_store())
        self._finished = _FinishedRecipes(self.out)
        self._phase = ("begin", 0, len(self.entries))

    def run(self) -> sweep.SweepDocument:
        """Run all recipes and return sweep.json; errors of the executor propagate.

        A failed recipe does not stop the others. Measurements run alone: on the measuring nodes of the executor, or
        else one recipe at once in this process and its children.
        """
        self._show(at_once=True)
        with schedule.pooled(Workers(self.executor)) as (_, pool):
            for some in self._parts(pool):
                looked = [found for entry in some if (found := self._look(entry, keep=pool is None)) is not None]
                if pool is not None:
                    looked = self._make(pool, looked)
                if pool is not None and pool.lonely:
                    self._measure_there(pool, looked)
                else:
                    self._measure_here(looked)
        return self._document(None)

    # --- one after the other, or in parts -----------------------------------------------------------------------------

    def _parts(self, pool: Pool | None) -> Iterator[Sequence[Entry]]:
        """The groups of recipes that are made and measured together."""
        count = len(self.entries)
        size = 1 if pool is None else count if self.seconds is None else max(AT_ONCE, pool.lonely)
        for first in range(0, count, size):
            if not self._over():
                yield self.entries[first : first + size]

    def _left(self) -> float:
        return float("inf") if self.seconds is None else self._begun + self.seconds - time.monotonic()

    def _over(self) -> bool:
        return self._left() <= 0

    def _look(self, entry: Entry, *, keep: bool) -> _Outlined | None:
        """Outline a recipe; None if it is already finished, or fails."""
        names = [each.name for each in self.entries]
        self._set_phase("prepare recipes", names.index(entry.name), len(names))
        try:
            jobs = entry.prepare()
            outlined = outline(entry, jobs)
        except VitdeployError as error:
            self._failed(entry, error)
            return None
        finished = self._finished.find(outlined) if self.resume else None
        if finished is None:
            return replace(outlined, jobs=jobs if keep else None)
        self.told(f"{entry.name}: already finished, measured {finished[0].created}")
        self._row(entry, *finished)
        return None

    def _make(self, pool: Pool, looked: Sequence[_Outlined]) -> list[_Outlined]:
        """Run the stages of these recipes; return the recipes that have not failed."""
        if self._scheduler is None:
            self._scheduler = schedule.Scheduler(pool, self._store, self._set_phase, "make", self.told)
        plans = [
            schedule.PlanProgress(
                outlined.name, schedule.at_size(outlined.entry, size), outlined.name, unmeasured(plan)
            )
            for outlined in looked
            for size, plan in enumerate(outlined.plans)
        ]
        self._scheduler.run(plans, self._over)
        for outlined in looked:
            if (error := self._scheduler.errors.get(outlined.name)) is not None:
                self._failed(outlined.entry, error)
        return [outlined for outlined in looked if outlined.name not in self._scheduler.errors]

    # --- measure ------------------------------------------------------------------------------------------------------

    def _measure_here(self, looked: Iterable[_Outlined]) -> None:
        for outlined in looked:
            if not self._fits(outlined):
                continue
            entry = outlined.entry
            self._set_phase(f"measure {entry.name}", len(self._rows), len(self.entries), at_once=True)
            try:
                report = measure(entry, outlined.jobs or entry.prepare(), self.out / entry.name, self.told)
                self._done(outlined, report, None)
            except VitdeployError as error:
                self._failed(entry, error)

    def _measure_there(self, pool: Pool, looked: Iterable[_Outlined]) -> None:
        """Measure recipes on all measuring nodes in parallel."""
        waiting, running = deque(looked), 0
        while waiting or running:
            while waiting and running < max(1, pool.lonely):
                outlined = waiting.popleft()
                if self._fits(outlined):
                    pool.submit(outlined, measure_there, outlined.entry, outlined.name, alone=True)
                    running += 1
            self._set_phase(f"measure on {pool.lonely} nodes", len(self._rows), len(self.entries), at_once=True)
            if (done := pool.next()) is None:
                continue
            running -= 1
            self._take(*cast("tuple[_Outlined, _MeasuredThere | VitdeployError]", done))

    def _take(self, outlined: _Outlined, result: _MeasuredThere | VitdeployError) -> None:
        """Take the result or the error of a node."""
        if isinstance(result, VitdeployError):
            self._failed(outlined.entry, result)
            return
        for line in result.told:
            self.told(line)
        try:
            self._done(outlined, bring(result, self._store, self.out / outlined.name), result.host)
        except VitdeployError as error:
            self._failed(outlined.entry, error)

    def _fits(self, outlined: _Outlined) -> bool:
        """Whether a recipe may start within the time limit: measuring is never cut off."""
        return self.seconds is None or self._left() >= measuring(outlined).seconds

    def _done(self, outlined: _Outlined, report: Report, host: str | None) -> None:
        self._finished.add(outlined, host)
        self._measured += 1
        self.told(f"{outlined.name}: {report.verdict.sentence}")
        self._row(outlined.entry, report, host)

    # --- the document -------------------------------------------------------------------------------------------------

    def _failed(self, entry: Entry, error: VitdeployError) -> None:
        self.told(f"{entry.name}: {error}")
        self._row(entry, None, None, ErrorFacts.of(error))

    def _row(self, entry: Entry, report: Report | None, host: str | None, error: ErrorFacts | None = None) -> None:
        row = sweep.SweptRecipe(entry.name, str(entry.file), report, error, dict(entry.choices) or None, host)
        self._rows[entry.name] = row
        self._show(at_once=True)

    def _set_phase(self, text: str, done: int, total: int, *, at_once: bool = False) -> None:
        self.progress(text, done, total)
        self._phase = (text, done, total)
        self._show(at_once=at_once)

    def _show(self, *, at_once: bool) -> None:
        """Write the page, if requested; drawing takes a second, so not at every step."""
        if self.page is not None and (at_once or time.monotonic() > self._page_at + PAGE_SECONDS):
            self.page(self._document(sweep.Running(*self._phase, outcome.now(), self._seconds_left())))
            self._page_at = time.monotonic()

    def _seconds_left(self) -> float | None:
        """The remaining seconds, estimated from the measured recipes; None before the first one."""
        if not self._measured:
            return None
        return (len(self.entries) - len(self._rows)) * (time.monotonic() - self._begun) / self._measured

    def _document(self, running: sweep.Running | None) -> sweep.SweepDocument:
        rows = tuple(self._rows.get(entry.name) or _not_begun(entry, running) for entry in self.entries)
        stages = sweep.StageCounts(*self._scheduler.counts) if self._scheduler is not None else None
        return sweep.SweepDocument(1, outcome.now(), rows, describe_host(), stages, running)


def _not_begun(entry: Entry, running: sweep.Running | None) -> sweep.SweptRecipe:
    why = OVER if running is None else "not measured yet"
    return sweep.SweptRecipe(entry.name, str(entry.file), None, None, dict(entry.choices) or None, None, why)
