"""Entries of a sweep: recipes, their keys, what they cost, and which are finished."""

from __future__ import annotations

import contextlib
import hashlib
import os
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import BenchCandidate, ExpectedTime, expected
from vitdeploy.bundle.read import file_sha256
from vitdeploy.document.bench import ErrorFacts
from vitdeploy.document.report import Report, read_report
from vitdeploy.document.sweep import Estimate, PlannedRecipe, PlannedStage, PlanTotal, SweepPlanDocument
from vitdeploy.errors import VitdeployError
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.outcome import TOOLS, now
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.publish import storage_errors
from vitdeploy.recipe.grid import refuse_same_names
from vitdeploy.recipe.load import load_recipe
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import encode
from vitdeploy.stages.step import ORIGINAL, Step, package_versions
from vitdeploy.store.key import canonical_json, code_version
from vitdeploy.store.store import Line, Store, append_line, decoded_lines, files_digest, read_log, this_machine

# --- The recipes of a sweep, and what each would make -----------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One recipe of a sweep, as passed to a worker process. `skip_bad`, `function` as for `vitdeploy run`; `grid`, the
    file, and `choices`, (field, label), of a cell of a grid."""

    recipe: Path
    overrides: tuple[str, ...]
    store: Path
    skip_bad: bool
    function: str | None = None
    grid: Path | None = None
    choices: tuple[tuple[str, str], ...] = ()

    @property
    def file(self) -> Path:
        """Where a user finds the recipe."""
        return self.grid or self.recipe

    def load(self) -> Recipe:
        return load_recipe(self.recipe, self.overrides, self.function)

    def prepare(self) -> tuple[Job, ...]:
        return prepare(self.load(), skip_bad=self.skip_bad, progress=silent, function=self.function)


def load_all(entries: Sequence[Entry]) -> list[Recipe]:
    """Every recipe, before any work is done.

    Raises:
        InputError: two have one name, which their bundles are called by. Errors of recipes propagate.
    """
    recipes = [entry.load() for entry in entries]
    refuse_same_names([(recipe.name, entry.file) for recipe, entry in zip(recipes, entries, strict=True)])
    return recipes


@dataclass(frozen=True)
class Outlined:
    """A recipe that was looked at: its steps for each of its image sizes, and `key`: what its result is a function of,
    but for the machine that measures."""

    entry: Entry
    recipe: Recipe
    plans: tuple[tuple[Step, ...], ...]
    key: str


def outline(entry: Entry, recipe: Recipe, jobs: Sequence[Job]) -> Outlined:
    """What the `jobs` of an entry, which `Entry.prepare` gives, would make."""
    plans = tuple(tuple(step.outline() for step in make_plan(job)) for job in jobs)
    steps = [planned_keys(plan) for plan in plans]
    tools = {"code": code_version(everything=True), **package_versions(TOOLS)}
    parts = {"recipe": recipe.model_dump(mode="json"), "steps": steps, "tools": tools}
    return Outlined(entry, recipe, plans, hashlib.sha256(canonical_json(parts).encode()).hexdigest())


def planned_keys(plan: Sequence[Step]) -> dict[str, str]:
    """A key for each step, as if none were made: that of an input stands in the place of its digest. Two recipes that
    have one of these keys make the same there."""
    keys: dict[str, str] = {}
    for step in plan:
        keys[step.name] = step.key({name: f"planned:{keys[name]}" for name in step.inputs})
    return keys


def unmeasured(plan: Sequence[Step]) -> list[Step]:
    """The steps that measure nothing, and neither need what does."""
    left_out: set[str] = set()
    kept = []
    for step in plan:
        if step.measured or left_out.intersection(step.inputs):
            left_out.add(step.name)
        else:
            kept.append(step)
    return kept


# --- What stages and measurements cost, as far as it is known: a stage by what such stages took before ----------------


# A stage is like another one if its numbers, of parameters, pixels and images, differ by no more than this factor.
ALIKE = 1.25
# Estimates are from the last ones.
LAST = 20


class Costs:
    """What the log of a store says of stages. `anywhere`: also of those that other kinds of machines have made."""

    def __init__(self, log: Iterable[Line], *, anywhere: bool) -> None:
        self._seen: dict[str, deque[Line]] = defaultdict(lambda: deque(maxlen=1000))
        cpu, cores = this_machine()
        for line in log:
            if anywhere or (line.made.cpu, line.made.cores) == (cpu, cores):
                self._seen[line.made.name].append(line)

    def of(self, step: Step) -> tuple[Estimate | None, Estimate | None, int]:
        """The seconds and the bytes of a stage, and of how many such ones; None where there was none."""
        found = [line for line in self._seen[step.name] if _alike(line.made.about, step.about)][-LAST:]
        if not found:
            return None, None, 0
        return _estimate([line.made.seconds for line in found]), _estimate([line.bytes for line in found]), len(found)


def _alike(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    return one.keys() == other.keys() and all(
        max(one[name], other[name]) <= ALIKE * min(one[name], other[name]) for name in one
    )


def _estimate(values: Sequence[float]) -> Estimate:
    return Estimate(min(values), statistics.median(values), max(values))


def added(estimates: Sequence[Estimate]) -> Estimate | None:
    """Of several stages one after the other; None of none."""
    if not estimates:
        return None
    return Estimate(
        sum(each.least for each in estimates),
        sum(each.median for each in estimates),
        sum(each.most for each in estimates),
    )


def measuring(outlined: Outlined) -> ExpectedTime:
    """How long the bench of a recipe takes, at all its image sizes."""
    bench = outlined.recipe.bench
    protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration)
    found = []
    for plan in outlined.plans:
        engines = [step.name for step in plan if step.kind == "compile"]
        requests: dict[str, dict[str, dict[str, str]]] = {ORIGINAL: {}, **{name: {"engine": {}} for name in engines}}
        candidates = [BenchCandidate(name, "", "", (), request) for name, request in requests.items()]
        found.append(expected(candidates, protocol, context=True))
    return ExpectedTime(sum(each.seconds for each in found), sum(each.most for each in found))


# --- Which recipes of a sweep are done: a file beside their bundles, by which the same command goes on ----------------
# `finished.jsonl` has a line for each bundle, appended when that has its name. A line counts while what the recipe
# would make is the same, and while the bundle is the one that it was written for.


FINISHED_FILE = "finished.jsonl"
_FILES = ("manifest.json", "report.json")


@dataclass(frozen=True)
class Finished:
    """A bundle that is done: the name of its recipe, `key` of `Outlined`, `files`: SHA-256 of its manifest.json and
    report.json, which has all other digests; `host`: the name of the machine that measured, if that was another one."""

    name: str
    key: str
    files: dict[str, str]
    host: str | None


class FinishedRecipes:
    """Those of the folder `home`."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / FINISHED_FILE
        self._known: dict[str, Finished] = {}
        with contextlib.suppress(FileNotFoundError):
            self._known = {line.name: line for line in decoded_lines(Finished, self._path.read_bytes())}

    def find(self, outlined: Outlined) -> tuple[Report, str | None] | None:
        """The report of a recipe whose bundle is done, with the host that measured it."""
        name = outlined.recipe.name
        found = self._known.get(name)
        if found is None or found.key != outlined.key or _digests(self._home / name) != found.files:
            return None
        return read_report(self._home / name / "report.json"), found.host

    def add(self, outlined: Outlined, host: str | None) -> None:
        """A recipe whose bundle is at its place.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        name = outlined.recipe.name
        line = Finished(name, outlined.key, _digests(self._home / name) or {}, host)
        data = b"\n" * self._torn() + canonical_json(encode(line)).encode() + b"\n"
        with storage_errors(self._path):
            append_line(self._path, data, flushed=True)
        self._known[name] = line

    def _torn(self) -> bool:
        """Whether a crash has cut off the last line."""
        with contextlib.suppress(FileNotFoundError, OSError), self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
        return False


def _digests(bundle: Path) -> dict[str, str] | None:
    try:
        return {name: file_sha256(bundle / name) for name in _FILES}
    except OSError:
        return None


# --- The plan of a sweep with its cost. Models are read and data is listed; nothing is made ---------------------------


@dataclass
class _Stage:
    step: Step
    there: bool
    recipes: dict[str, None] = field(default_factory=dict)


def plan_sweep(
    entries: Sequence[Entry], out: Path, store: Store, progress: Progress, *, resume: bool, anywhere: bool
) -> SweepPlanDocument:
    """What `sweep` would do with these arguments. A recipe that would fail is in the plan with its error.

    Args:
        anywhere: estimate stages also by what other kinds of machines took, as those of a cluster.

    Raises:
        InputError: two recipes have one name. Errors of recipes and of a shared store propagate.
    """
    finished, costs = FinishedRecipes(out), Costs(read_log(store.root), anywhere=anywhere)
    rows: list[PlannedRecipe] = []
    stages: dict[str, _Stage] = {}
    asked = 0
    recipes = load_all(entries)
    for done, (entry, recipe) in enumerate(zip(entries, recipes, strict=True)):
        progress("plan", done, len(entries))
        row = PlannedRecipe(recipe.name, str(entry.file), False, None, None, None, dict(entry.choices) or None)
        try:
            outlined = outline(entry, recipe, entry.prepare())
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
    return SweepPlanDocument(1, now(), tuple(rows), planned, _total(asked, planned, rows), describe_host())


def _look(outlined: Outlined, plan: Sequence[Step], stages: dict[str, _Stage], store: Store) -> None:
    """Add the stages of a plan, by their keys. For the digest of what is not there stands a word that has its key: two
    stages have one key then where they would make the same of the same."""
    digests: dict[str, str] = {}
    for step in plan:
        key = step.key(digests)
        known = all(not digests[name].startswith("planned:") for name in step.inputs)
        record = store.look(key) if known else None
        folder = store.folder(key)
        there = record is not None and (not folder.is_dir() or step.usable(folder))
        digests[step.name] = files_digest(record.files) if record is not None and there else f"planned:{key}"
        stages.setdefault(key, _Stage(step, there)).recipes[outlined.recipe.name] = None


def _planned(stage: _Stage, costs: Costs) -> PlannedStage:
    seconds, size, seen = (None, None, 0) if stage.there else costs.of(stage.step)
    return PlannedStage(stage.step.name, tuple(stage.recipes), stage.there, seconds, size, seen)


def _total(asked: int, stages: Sequence[PlannedStage], recipes: Sequence[PlannedRecipe]) -> PlanTotal:
    to_make = [stage for stage in stages if not stage.there]
    return PlanTotal(
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
