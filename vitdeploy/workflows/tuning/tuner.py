"""The search: variants are made and scored, compared in speed, and the best of them judged on the evaluation images.

Nothing is chosen by the evaluation images but what `choice` says. Every step is stored, so that an interrupted search
goes on where it stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.candidate import engine_candidate
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.document.bench import Bench
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.pipeline.foresight import criterion_of, foresee
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.measure import measure, original_candidate
from vitdeploy.pipeline.outcome import engine_bytes, verified
from vitdeploy.pipeline.plan import engine_plan, judge_plan, original_step
from vitdeploy.pipeline.run import run_plan
from vitdeploy.pipeline.verdict import engine_gate
from vitdeploy.progress import Progress
from vitdeploy.search.expected import Expected
from vitdeploy.search.front import pareto_front
from vitdeploy.search.pruning import Pruning
from vitdeploy.search.pruning import select as select_prunings
from vitdeploy.search.rows import RowTable
from vitdeploy.search.schedules import Schedule, select
from vitdeploy.spec import Budget
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import read_json
from vitdeploy.stages.high_precision import raises_precision
from vitdeploy.stages.place import read_high_precision
from vitdeploy.stages.pruning import PRUNING, pruning_step, read_prunings
from vitdeploy.stages.rows import read_rows, rows_step
from vitdeploy.stages.schedules import Schedules, read_schedules, schedules_step
from vitdeploy.stages.score import Score, read_score, score_step
from vitdeploy.stages.screen import SCREEN, SCREEN_FILE, screen_step
from vitdeploy.stages.step import HIGH_PRECISION, OPTIMIZE, ORIGINAL, REFERENCE, Step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact, Store
from vitdeploy.verification.gate import GUARD, accuracy_gate, guards
from vitdeploy.workflows.tuning.choice import Choice, Finalist, choose
from vitdeploy.workflows.tuning.variants import Variant, float_variants

# The share of a time budget after which no new variant is begun; the rest is for measuring the finalists.
SEARCH_SHARE = 0.5
# Nearer than this, answers differ by the rounding of float32 alone.
SAME_DISTANCE = 1e-8


@dataclass(frozen=True)
class Made:
    """A variant with its artifacts, and how far its answers are from the original's on the calibration images."""

    variant: Variant
    job: Job
    artifacts: dict[str, Artifact]
    score: Score

    @property
    def engine(self) -> Artifact:
        return self.artifacts[self.variant.candidate.step("compile")]


@dataclass(frozen=True)
class Tuned:
    """The results of a search.

    made: every variant; `finals`: those that were judged, with the results; `front`: the same as finalists, the
        nearest to the original first.
    medians_ms: medians of each round of the screening, by name. disturbed: why these are unreliable; empty if they are
        reliable.
    rows: the speed of the model by number of rows, by target.
    schedules: the trials of token merging, by target. prunings: those of pruning, () where nothing was tried.
    left_out: (what, why).
    """

    job: Job
    made: tuple[Made, ...]
    finals: tuple[Made, ...]
    medians_ms: dict[str, list[float]]
    disturbed: str
    front: tuple[Finalist, ...]
    bench: Bench
    choice: Choice
    rows: dict[str, RowTable]
    schedules: dict[str, Schedules]
    prunings: tuple[Pruning, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def chosen(self) -> Made:
        return next(each for each in self.finals if each.variant == self.choice.best.variant)


@dataclass
class Tuner:
    """One search. `finished` gets each step and whether it was reused; `seconds`: the time budget, or None; `workers`:
    do what can be shared out of a step. Variants are made one after the other, as most of them are measured too."""

    job: Job
    store: Store
    resume: bool
    progress: Progress
    finished: Callable[[Step, bool], None]
    seconds: float | None = None
    workers: Workers = HERE
    made: list[Made] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    rows: dict[str, RowTable] = field(default_factory=dict)
    schedules: dict[str, Schedules] = field(default_factory=dict)
    prunings: tuple[Pruning, ...] = ()
    _fresh: set[str] = field(default_factory=set)
    _begun: float = field(default_factory=time.monotonic)

    @property
    def budget(self) -> Budget:
        return self.job.recipe.to_budget()

    def foresee(self) -> list[str]:
        """Bounds of the budget that the data cannot prove, whatever is found. Runs the original."""
        answers = read_answers(self._run([original_step(self.job)])[REFERENCE].path)
        return foresee(self.job.adapter, answers, self.job.data, self.job.budget)

    def run(self) -> Tuned:
        """All of it. Errors of any stage propagate."""
        targets = self.job.recipe.targets
        for target in targets:
            for variant in float_variants(target):
                self._make(variant)
        for target in targets:
            self._make(Variant(target, "int8"))
        for variant in self._further(targets):
            if self._late():
                self.left_out.append((variant.name, "no time was left for it"))
            else:
                self._make(variant)
        medians, disturbed = self._screen()
        front = pareto_front(
            self._small_enough(),
            lambda made: (max(made.score.distance, SAME_DISTANCE), float(np.median(medians[made.variant.name]))),
        )
        return self._judge(front, medians, disturbed)

    def _small_enough(self) -> list[Made]:
        """What is within the bound of size; everything where nothing is, or there is none."""
        bound = self.budget.max_size
        if bound is None:
            return self.made
        sizes = {each.variant.name: engine_bytes(each.artifacts, each.variant.candidate) for each in self.made}
        small = [each for each in self.made if sizes[each.variant.name] <= bound]
        if small:
            large = [name for name, size in sizes.items() if size > bound]
            self.left_out += [(f"{name} as a finalist", f"{sizes[name]:,} bytes, max_size {bound:,}") for name in large]
        return small or self.made

    def _further(self, targets: Sequence[str]) -> Iterator[Variant]:
        """Trials beyond plain float and INT8: first the fastest number of rows, which changes no answer; then fixes for
        INT8 if it needs them, because nothing else helps without them; then what makes it faster; last INT4 weights,
        which are smaller, and faster where few rows are multiplied."""
        plain = {each.variant.target: each for each in self.made if each.variant.precision == "int8"}
        for target in plain:
            yield from self._aligned(target)
        for target in plain:
            yield from self._raised(target)
        needy = [target for target in plain if not self._meets(plain[target].score.expected)]
        yield from (self._mixed(target) for target in needy)
        for target in plain:
            yield from self._merging(target, plain[target].score)
        for target in plain:
            yield from self._pruned(target, plain[target].score)
        for target in plain:
            if target not in needy and self._bounded(plain[target].score.expected):
                self.left_out.append((f"{target}-mixed", "INT8 is expected to meet the budget as it is"))
            elif target not in needy:
                yield self._mixed(target)
        yield from (Variant(target, "int4") for target in plain if "int4" in TARGETS[target].precisions)

    def _mixed(self, target: str) -> Variant:
        return Variant(target, "mixed", rows=self.rows[target].aligned if target in self.rows else None)

    def _raised(self, target: str) -> Iterator[Variant]:
        what, variant = f"layers out of plain INT8 on {target}", Variant(target, "int8", raised=True)
        recipe, task = self.job.recipe, self.job.reference_model.task
        if not raises_precision(target, "int8", task, recipe.high_precision):
            return
        if self._late():
            self.left_out.append((what, "no time was left for it"))
            return
        job, step = replace(self.job, recipe=variant.recipe(recipe)), variant.candidate.step(HIGH_PRECISION)
        plan = engine_plan(job, [variant.candidate], self.workers)
        until = [each.name for each in plan].index(step)
        found = read_high_precision(self._run(plan[: until + 1])[step].path)
        if found.raised is None:
            self.left_out.append((what, found.why))
            return
        yield variant

    def _aligned(self, target: str) -> Iterator[Variant]:
        what = f"aligned rows on {target}"
        if self._late():
            self.left_out.append((what, "no time was left for it"))
            return
        try:
            artifacts = self._run([*engine_plan(self.job, ()), rows_step(target)])
        except GraphError as error:
            self._refused(what, error)
            return
        found = self.rows[target] = read_rows(artifacts[f"rows {target}"].path)
        if found.disturbed:
            self.left_out.append((what, f"its times are not decided: {found.disturbed}"))
        elif found.aligned is None:
            self.left_out.append((what, f"no number of rows is surely faster than {found.tokens}, one per token"))
        else:
            yield Variant(target, "int8", rows=found.aligned)

    def _refused(self, what: str, error: GraphError) -> None:
        self.left_out.append((what, error.message + (f": {error.found}" if error.found else "")))

    def _merging(self, target: str, plain: Score) -> Iterator[Variant]:
        if self._late():
            self.left_out.append((f"token merging on {target}", "no time was left for it"))
            return
        try:
            artifacts = self._run([*engine_plan(self.job, ()), schedules_step(target, self.job.data)])
        except GraphError as error:
            self._refused(f"token merging on {target}", error)
            return
        found = self.schedules[target] = read_schedules(artifacts[f"schedules {target}"].path)
        chosen = select(found.schedules, lambda schedule: self._acceptable(schedule, plain))
        if not found.schedules:
            self.left_out.append((f"token merging on {target}", "by the times of its layers it saves nothing"))
        elif not chosen:
            self.left_out.append((f"token merging on {target}", "every schedule changes too many answers"))
        for schedule in chosen:
            yield Variant(target, "int8", schedule.merges)

    def _pruned(self, target: str, plain: Score) -> Iterator[Variant]:
        what = f"pruning on {target}"
        if self._late():
            self.left_out.append((what, "no time was left for it"))
            return
        try:
            artifacts = self._run([*engine_plan(self.job, ()), pruning_step(self.job.data)])
        except GraphError as error:
            self._refused(what, error)
            return
        self.prunings = read_prunings(artifacts[PRUNING].path).prunings
        chosen = select_prunings(self.prunings, lambda each: self._acceptable(each, plain), plain.distance)
        if not chosen:
            self.left_out.append((what, "whatever goes changes too many answers"))
        for each in chosen:
            yield Variant(target, "int8", prune=each.asked)

    def _acceptable(self, trial: Schedule | Pruning, plain: Score) -> bool:
        """Acceptable by the budget if it bounds answers; else a trial may change as much as INT8 does."""
        if self._bounded(trial.expected):
            return self._meets(trial.expected)
        return trial.distance <= plain.distance

    def _bounded(self, expected: Expected | None) -> bool:
        return expected is not None and (self.budget.min_agreement, self.budget.max_drop) != (None, None)

    def _meets(self, expected: Expected | None) -> bool:
        """Whether answers are expected to be within the budget; True if there is no evidence."""
        return expected is None or expected.meets(self.budget)

    def _late(self) -> bool:
        return self.seconds is not None and time.monotonic() - self._begun > SEARCH_SHARE * self.seconds

    def _make(self, variant: Variant) -> None:
        """Make and score a variant, unless this machine or its runtime cannot, or the graph has nothing for it."""
        job, candidate = replace(self.job, recipe=variant.recipe(self.job.recipe)), variant.candidate
        try:
            artifacts = self._run(engine_plan(job, [candidate], self.workers))
        except CapabilityError as error:
            self.left_out.append((variant.name, error.message))
            return
        except GraphError as error:
            if variant.precision != "int4":  # anything else takes every graph that came so far
                raise
            self._refused(variant.name, error)
            return
        changed = variant.merges or variant.prune is not None
        reference = self.made[0].artifacts[OPTIMIZE] if changed else artifacts[OPTIMIZE]
        step = score_step(candidate, reference, job.data)
        artifacts = self._run([step], artifacts)
        self.made.append(Made(variant, job, artifacts, read_score(artifacts[step.name].path)))

    def _run(self, plan: list[Step], artifacts: dict[str, Artifact] | None = None) -> dict[str, Artifact]:
        return run_plan(
            plan,
            self.store,
            resume=self.resume,
            progress=self.progress,
            finished=self.finished,
            artifacts=artifacts,
            fresh=self._fresh,
        )

    def _screen(self) -> tuple[dict[str, list[float]], str]:
        """The medians of each round by name, and why they are not to be relied on."""
        step = screen_step(self.job.recipe.engine_batch, {each.variant.name: each.engine for each in self.made})
        found = read_json(self._run([step])[SCREEN].path / SCREEN_FILE)
        return dict(found["block_medians_ms"]), str(found["disturbed"])

    def _judge(self, front: Sequence[Made], medians: dict[str, list[float]], disturbed: str) -> Tuned:
        bench_candidates = [original_candidate(self.job.reference_model.source)]
        finals = []
        for made in front:
            plan = judge_plan(made.job, [made.variant.candidate])
            finals.append(replace(made, artifacts=self._run(plan, made.artifacts)))
            folder = made.engine.path
            bench_candidates.append(engine_candidate(read_engine(folder), folder, made.variant.name))
        bench = self.job.recipe.bench
        names = [bench_candidate.artifact for bench_candidate in bench_candidates]
        pairs = [(a, b) for a in names for b in names if a != b and a != ORIGINAL]
        protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration, max_extension=1)
        measured = measure(bench_candidates, protocol, pairs, self.progress)
        reference = read_answers(finals[0].artifacts[REFERENCE].path)
        criterion = criterion_of(self.job.adapter, reference, self.job.data, self.job.budget)
        finalists = []
        for made in finals:
            name = made.variant.name
            facts = verified(made.artifacts, made.variant.candidate)
            accuracy = accuracy_gate(facts, self.job.budget, criterion, GUARD[self.job.reference_model.task])
            size = engine_bytes(made.artifacts, made.variant.candidate)
            gate = engine_gate(accuracy, self.job.budget, size, measured.row(name))
            finalists.append(Finalist(made.variant, made.score.distance, facts, accuracy, gate, guards(self.budget)))
        return Tuned(
            self.job,
            tuple(self.made),
            tuple(finals),
            medians,
            disturbed,
            tuple(finalists),
            measured,
            choose(finalists, measured),
            self.rows,
            self.schedules,
            self.prunings,
            tuple(self.left_out),
        )
