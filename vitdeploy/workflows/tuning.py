"""The search: variants are made, scored and timed, and the best of them are tested on the evaluation images.

Only `choose` uses the evaluation images for a choice. Every step is stored, so that an interrupted search resumes where
it stopped.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.machine import MACHINE
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import engine_candidate
from vitdeploy.document.sweep import MergingTrial
from vitdeploy.errors import CapabilityError, GraphError, VitdeployError
from vitdeploy.pipeline import outcome, verdict
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.measure import measure, original_candidate
from vitdeploy.pipeline.plan import engine_plan, original_step
from vitdeploy.pipeline.run import run_plan
from vitdeploy.pipeline.schedule import LoadedRecipe, PlanProgress, Scheduler, pooled
from vitdeploy.progress import Progress
from vitdeploy.search import frame, pruning
from vitdeploy.search.pruning import select as select_prunings
from vitdeploy.search.rows import Schedule, select
from vitdeploy.spec import Budget
from vitdeploy.stages.answers import read_answers
from vitdeploy.stages.place import HIGH_PRECISION_SEARCH
from vitdeploy.stages.rows import (
    PRUNING,
    PRUNING_SEARCH,
    SCHEDULES_SEARCH,
    schedules_step,
)
from vitdeploy.stages.search import SCORES, SCREEN, SCREEN_FILE, Score, raises_precision, screen_step
from vitdeploy.stages.step import HIGH_PRECISION, OPTIMIZE, ORIGINAL, REFERENCE, Step, read_engine, read_json
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact, Store
from vitdeploy.verification.gate import accuracy_gate, guards
from vitdeploy.workflows.variants import (
    NO_TIME,
    UNCHANGED,
    Finalist,
    LeftOut,
    MadeVariant,
    SearchResult,
    Variant,
    choose,
    float_variants,
    job_of,
    judged_plan,
    pruning_plan,
    said,
    scored_plan,
    steps_of,
    why_not,
)

# The share of a time budget after which no new variant starts; the rest is for measuring the finalists.
SEARCH_SHARE = 0.5
# With a time budget, variants are made in parallel in groups of this size, the most valuable first.
AT_ONCE = 4
# Below this distance, answers differ only by the rounding of float32.
SAME_DISTANCE = 1e-8


@dataclass
class Tuner:
    """One search. `finished` is called with each new step of this search, and whether it was reused; `seconds`: the
    time budget, or None; `note` is called with notes for the user.

    `workers` run the parallel parts of a step. With `search`, their starting point, they also make variants in
    parallel, except measurements.
    """

    job: Job
    store: Store
    resume: bool
    progress: Progress
    finished: Callable[[Step, bool], None]
    seconds: float | None = None
    workers: Workers = HERE
    search: LoadedRecipe | None = None
    note: Callable[[str], None] = lambda text: None
    made: list[MadeVariant] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    merging: dict[str, MergingTrial] = field(default_factory=dict)
    prunings: tuple[pruning.Pruning, ...] = ()
    _fresh: set[str] = field(default_factory=set)
    _begun: float = field(default_factory=time.monotonic)
    _waited: float = field(default_factory=lambda: MACHINE.waited)
    _scheduler: Scheduler | None = None

    @property
    def budget(self) -> Budget:
        return self.job.recipe.to_budget()

    def foresee(self) -> list[str]:
        """The bounds of the budget that the data cannot prove with any result. Runs the original."""
        answers = read_answers(self._run([original_step(self.job)])[REFERENCE].path)
        return verdict.foresee(self.job.adapter, answers, self.job.data, self.job.budget)

    def run(self) -> SearchResult:
        """Run the whole search. Errors of any stage propagate."""
        with self._pooled():  # reports a cluster that does not answer before any work
            for text in self.foresee():
                self.note(text)
            if self.seconds is not None:
                self.note(
                    f"no new variant starts after {SEARCH_SHARE * self.seconds:.0f} s of work; waiting for other "
                    "benchmarks on this machine is not counted (--max-wait limits it)"
                )
            targets = self.job.recipe.targets
            plain = [variant for target in targets for variant in float_variants(target)]
            self._try([*plain, *(Variant(target, "int8") for target in targets)], None)
            if not self.made:
                raise CapabilityError(
                    "no variant can be built on this machine",
                    found="; ".join(": ".join(each) for each in self.left_out),
                    expected="at least one variant of the recipe's targets",
                    fix="vitdeploy doctor shows what each target needs",
                )
            found = self._further(targets)
            while some := list(itertools.islice(found, self._at_once)):
                self._try(some, self._late)
            medians, disturbed, faster = self._screen()
            finals = self._answered(_front(self._small_enough(), medians, faster if disturbed else None))
        return self._judge(finals, medians, disturbed)

    @contextlib.contextmanager
    def _pooled(self) -> Iterator[None]:
        """Start the workers that make variants in parallel, if any."""
        with pooled(self.workers if self.search is not None else HERE) as (workers, pool):
            if pool is not None:
                self.workers = workers
                self._scheduler = Scheduler(
                    pool,
                    self.store,
                    self.progress,
                    "make variants",
                    self.note,
                    resume=self.resume,
                    fresh=self._fresh,
                    finished=self.finished,
                    fatal=lambda owner, error: why_not(owner, error) is None,
                )
            yield

    @property
    def _at_once(self) -> int | None:
        """The number of variants planned before they are made; None: all."""
        if self._scheduler is None:
            return 1
        return None if self.seconds is None else AT_ONCE

    def _try(self, some: Sequence[Variant | LeftOut], late: Callable[[], bool] | None) -> None:
        """Make these variants unless the time is over; record those left out."""
        there = self._make_ahead([each for each in some if isinstance(each, Variant)], late)
        for each in some:
            if not isinstance(each, Variant):
                self.left_out.append(each)
            elif late is not None and late() and each not in there:
                self.left_out.append((each.name, NO_TIME))
            else:
                self._make(each)

    def _make_ahead(self, variants: Sequence[Variant], late: Callable[[], bool] | None) -> set[Hashable]:
        """Make variants in parallel; return those that are made or have failed."""
        if self._scheduler is None or self.search is None:
            return set()
        plans = []
        for variant in variants:
            with contextlib.suppress(VitdeployError):  # raised again when its turn comes
                steps = scored_plan(self.job, variant, self.workers)
                source = steps_of(self.search, variant)
                plans.append(PlanProgress(variant, source, variant.name, steps, self._given(variant)))
        if late is None and self.seconds is None:  # needed later, and without measurements
            plans.append(PlanProgress(PRUNING, steps_of(self.search, None), PRUNING, pruning_plan(self.job)))
        there = self._scheduler.run(plans, late)
        for plan in plans:
            error = self._scheduler.errors.get(plan.owner)
            if error is not None and why_not(plan.owner, error) is None:
                raise error
        return there

    def _given(self, variant: Variant) -> dict[str, Artifact]:
        """The artifacts available before the plan of a variant."""
        return {UNCHANGED: self.made[0].artifacts[OPTIMIZE]} if variant.changes_answers else {}

    def _small_enough(self) -> list[MadeVariant]:
        """The variants within the size bound; all if none is, or without a bound."""
        bound = self.budget.max_size
        if bound is None:
            return self.made
        small = [each for each in self.made if each.bytes <= bound]
        for each in self.made if small else ():
            if each.bytes > bound:
                self.left_out.append(
                    (f"{each.variant.name} as a finalist", f"{each.bytes:,} bytes, max_size {bound:,}")
                )
        return small or self.made

    def _further(self, targets: Sequence[str]) -> Iterator[Variant | LeftOut]:
        """Trials beyond plain float and INT8: first fixes for INT8 if it needs them, because no other trial helps
        without them; then faster variants; last INT4 weights, which are smaller, and faster for few rows."""
        plain = {each.variant.target: each for each in self.made if each.variant.precision == "int8"}
        for target in plain:
            yield from self._raised(target)
        needy = [target for target in plain if not self._meets(plain[target].score.expected)]
        yield from (Variant(target, "mixed") for target in needy)
        for target in plain:
            yield from self._merging(target, plain[target].score)
        for target in plain:
            yield from self._pruned(target, plain[target].score)
        for target in plain:
            if target not in needy and self._bounded(plain[target].score.expected):
                yield f"{target}-mixed", "plain INT8 is expected to meet the budget"
            elif target not in needy:
                yield Variant(target, "mixed")
        yield from (Variant(target, "int4") for target in plain if "int4" in TARGETS[target].precisions)

    def _raised(self, target: str) -> Iterator[Variant | LeftOut]:
        what, variant = f"layers in higher precision on {target}", Variant(target, "int8", raised=True)
        if not raises_precision(target, "int8", self.job.reference_model.task, self.job.recipe.high_precision):
            return
        step = variant.candidate.step(HIGH_PRECISION)
        plan = engine_plan(job_of(self.job, variant), [variant.candidate], self.workers)
        found = self._asked(what, plan[: [each.name for each in plan].index(step) + 1])
        if not isinstance(found, Artifact):
            yield found
        elif not (high := HIGH_PRECISION_SEARCH.read(found.path)).layers:
            yield what, high.why
        else:
            yield variant

    def _merging(self, target: str, plain: Score) -> Iterator[Variant | LeftOut]:
        what = f"token merging on {target}"
        answer = self._asked(what, [*engine_plan(self.job, ()), schedules_step(target, self.job.data)])
        if not isinstance(answer, Artifact):
            yield answer
            return
        found = self.merging[target] = SCHEDULES_SEARCH.read(answer.path)
        chosen = select(found.schedules, lambda schedule: self._acceptable(schedule, plain))
        if not found.schedules:
            yield what, "by the times of its layers it saves no time"
        elif not chosen:
            yield what, "every schedule changes too many answers"
        for schedule in chosen:
            yield Variant(target, "int8", schedule.merges)

    def _pruned(self, target: str, plain: Score) -> Iterator[Variant | LeftOut]:
        what = f"pruning on {target}"
        answer = self._asked(what, pruning_plan(self.job))
        if not isinstance(answer, Artifact):
            yield answer
            return
        self.prunings = PRUNING_SEARCH.read(answer.path).prunings
        chosen = select_prunings(self.prunings, lambda each: self._acceptable(each, plain), plain.distance)
        if not chosen:
            yield what, "every pruning changes too many answers"
        for each in chosen:
            yield Variant(target, "int8", prune=each.asked)

    def _asked(self, what: str, plan: list[Step]) -> Artifact | LeftOut:
        """The artifact of the last step of a plan, which selects variants, or the reason for its absence."""
        if self._late():
            return what, NO_TIME
        name = plan[-1].name
        error = self._known(name)
        if error is None:
            try:
                return self._run(plan)[name]
            except GraphError as caught:
                error = caught
        return what, said(error)

    def _known(self, owner: Hashable) -> VitdeployError | None:
        """The error of a worker, if any."""
        return None if self._scheduler is None else self._scheduler.errors.get(owner)

    def _acceptable(self, trial: Schedule | pruning.Pruning, plain: Score) -> bool:
        """Whether a trial meets the budget's bounds on answers; without such bounds, whether it changes at most as much
        as INT8."""
        if self._bounded(trial.expected):
            return self._meets(trial.expected)
        return trial.distance <= plain.distance

    def _bounded(self, expected: frame.Expected | None) -> bool:
        return expected is not None and (self.budget.min_agreement, self.budget.max_drop) != (None, None)

    def _meets(self, expected: frame.Expected | None) -> bool:
        """Whether answers are expected to be within the budget; True without evidence."""
        return expected is None or expected.meets(self.budget)

    def _late(self) -> bool:
        if self.seconds is None:
            return False
        worked = time.monotonic() - self._begun - (MACHINE.waited - self._waited)
        return worked > SEARCH_SHARE * self.seconds

    def _make(self, variant: Variant) -> None:
        """Make and score a variant, unless this machine or its runtime cannot, or it does not apply to the graph."""
        error = self._known(variant)
        if error is None:
            try:
                artifacts = self._run(scored_plan(self.job, variant, self.workers), self._given(variant))
            except (CapabilityError, GraphError) as caught:
                error = caught
        if error is not None:
            if (why := why_not(variant, error)) is None:
                raise error
            self.left_out.append((variant.name, why))
            return
        score = SCORES.read(artifacts[variant.candidate.step("score")].path)
        self.made.append(MadeVariant(variant, artifacts, score))

    def _run(self, plan: list[Step], artifacts: Mapping[str, Artifact] | None = None) -> dict[str, Artifact]:
        return run_plan(
            plan,
            self.store,
            resume=self.resume,
            progress=self.progress,
            finished=self.finished,
            artifacts=artifacts,
            fresh=self._fresh,
        )

    def _screen(self) -> tuple[dict[str, list[float]], str, dict[str, list[str]]]:
        """The medians of each round by name, the reason why they are unreliable, and by name the variants that are
        still provably faster."""
        step = screen_step(self.job.recipe.engine_batch, {each.variant.name: each.engine for each in self.made})
        found = read_json(self._run([step])[SCREEN].path / SCREEN_FILE)
        return dict(found["block_medians_ms"]), str(found["disturbed"]), dict(found["faster"])

    def _answered(self, front: Sequence[MadeVariant]) -> list[MadeVariant]:
        """The variants with their answers to the evaluation samples."""
        plans = [judged_plan(self.job, made.variant) for made in front]
        if self._scheduler is not None and self.search is not None:
            self._scheduler.run(
                [
                    PlanProgress(
                        made.variant, steps_of(self.search, made.variant), made.variant.name, plan, made.artifacts
                    )
                    for made, plan in zip(front, plans, strict=True)
                ]
            )
            for made in front:
                if (error := self._known(made.variant)) is not None:
                    raise error
        return [
            replace(made, artifacts=self._run(plan, made.artifacts)) for made, plan in zip(front, plans, strict=True)
        ]

    def _judge(self, finals: Sequence[MadeVariant], medians: dict[str, list[float]], disturbed: str) -> SearchResult:
        bench_candidates = [original_candidate(self.job.reference_model.source)]
        for made in finals:
            folder = made.engine.path
            bench_candidates.append(engine_candidate(read_engine(folder), folder, made.variant.name))
        bench = self.job.recipe.bench
        names = [bench_candidate.artifact for bench_candidate in bench_candidates]
        pairs = [(a, b) for a in names for b in names if a != b and a != ORIGINAL]
        protocol = Protocol(scenarios=bench.scenarios, batch=bench.batch, duration=bench.duration, max_extension=1)
        measured = measure(bench_candidates, protocol, pairs, self.progress)
        reference = read_answers(finals[0].artifacts[REFERENCE].path)
        criterion = verdict.criterion_of(self.job.adapter, reference, self.job.data, self.job.budget)
        finalists = []
        for made in finals:
            name = made.variant.name
            facts = outcome.verified(made.artifacts, made.variant.candidate)
            accuracy = accuracy_gate(facts, self.job.budget, criterion, self.job.adapter.guard)
            gate = verdict.engine_gate(accuracy, self.job.budget, made.bytes, measured.row(name))
            finalists.append(Finalist(made, facts, accuracy, gate, guards(self.budget)))
        return SearchResult(
            self.job,
            tuple(self.made),
            medians,
            disturbed,
            tuple(finalists),
            measured,
            choose(finalists, measured),
            self.merging,
            self.prunings,
            tuple(self.left_out),
        )


def _front(
    made: Sequence[MadeVariant], medians: Mapping[str, Sequence[float]], faster: Mapping[str, Sequence[str]] | None
) -> list[MadeVariant]:
    """The candidates for the best variant: no other is as close to the original and faster. `faster`: for disturbed
    measurements, what they still prove; no other variant is then left out for its times."""

    def distance(item: MadeVariant) -> float:
        return max(item.score.distance, SAME_DISTANCE)

    if faster is not None:
        return frame.undominated(made, distance, lambda a, b: b.variant.name in faster[a.variant.name])
    return frame.pareto_front(made, lambda item: (distance(item), float(np.median(medians[item.variant.name]))))
