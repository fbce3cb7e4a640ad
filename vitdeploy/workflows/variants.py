"""Variants of a model that a tuning tries: their steps, which of them is chosen, and what is said of the others."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import evidence, summary
from vitdeploy.document import report, sweep
from vitdeploy.document.bench import Bench, Omission
from vitdeploy.errors import CapabilityError, GraphError, InputError, RecipeError, VitdeployError, WorkerError
from vitdeploy.pipeline import outcome, plan, schedule
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.verdict import beats, between, find_ratio, keeps_answers, kept, relative_times, sentence
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing
from vitdeploy.recipe.load import recipe_text, validate
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.report.html import render_tuning
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.inputs import require_image_alone
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search.pruning import Pruning
from vitdeploy.spec import Grade, Precision, encode
from vitdeploy.stages.rows import pruning_step
from vitdeploy.stages.search import Score, score_step
from vitdeploy.stages.step import OPTIMIZE, ORIGINAL, RECIPE_FILE, TUNED_NAMES, Candidate, Step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate

FLOATS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Variant:
    """One way to run a model. `merges`: of tokens, (block, tokens that remain) each. `prune`: the least share of
    MACs that goes, None for none. `raised`: with the layers out of plain INT8 that the recipe's `high_precision`
    allows."""

    target: str
    precision: Precision
    merges: tuple[tuple[int, int], ...] = ()
    prune: float | None = None
    raised: bool = False

    @property
    def name(self) -> str:
        """The artifact name, with the further changes."""
        merged = "+".join(f"{block}:{count}" for block, count in self.merges)
        changes = [f"tokens {merged}"] * bool(merged)
        changes += [] if self.prune is None else [f"pruned {self.prune:g}"]
        changes += ["high precision"] * self.raised
        return " ".join([f"{self.target}-{self.precision}", *changes])

    @property
    def plain(self) -> Variant:
        """The same without what changes the graph, and all in plain INT8."""
        return Variant(self.target, self.precision)

    @property
    def changes_answers(self) -> bool:
        """Whether its float graph is another one, with other answers."""
        return bool(self.merges) or self.prune is not None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.target, self.precision, True)

    def recipe(self, base: Recipe) -> Recipe:
        """The recipe that makes this variant, for the target alone."""
        changes = {"token_merging": dict(self.merges) or "none", "prune": self.prune or "none"}
        further = {
            "precision": self.precision,
            "targets": (self.target,),
            "optimize": base.optimize.model_copy(update=changes),
            "high_precision": base.high_precision if self.raised else 0.0,
        }
        return base.model_copy(update=further)


def float_variants(target: str) -> list[Variant]:
    """A variant for every float precision of the target; the runtime tells whether this machine supports it."""
    return [Variant(target, precision) for precision in FLOATS if precision in TARGETS[target].precisions]


# --- What is made of a variant: its steps, and where a worker process has them from -----------------------------------

# The float graph that nothing is merged in and nothing is pruned of, for a variant that has another one itself. Its
# first word is the kind.
UNCHANGED = f"{OPTIMIZE} unchanged"


def job_of(job: Job, variant: Variant) -> Job:
    return replace(job, recipe=variant.recipe(job.recipe))


def scored_plan(job: Job, variant: Variant, workers: Workers = HERE) -> list[Step]:
    """From the original to the distance of a variant's answers from those of the float graph: its own, or `UNCHANGED`
    where its answers are others even in float. `job`: of the search."""
    own, candidate = job_of(job, variant), variant.candidate
    reference = UNCHANGED if variant.changes_answers else OPTIMIZE
    return [*plan.engine_plan(own, [candidate], workers), score_step(candidate, reference, job.data)]


def judged_plan(job: Job, variant: Variant) -> list[Step]:
    """The answers of the original, and of a variant's engine, to the evaluation samples. `job`: of the search."""
    return plan.judge_plan(job_of(job, variant), [variant.candidate])


def pruning_plan(job: Job) -> list[Step]:
    """What can be pruned of the graph of a search."""
    return [*plan.engine_plan(job, ()), pruning_step(job.data)]


def steps_of(search: schedule.LoadedRecipe, variant: Variant | None) -> schedule.StepSource:
    """The steps of a variant of a search; None: what can be pruned of its graph."""
    return schedule.StepSource(search, functools.partial(_plan_of, variant))


def _plan_of(variant: Variant | None, jobs: tuple[Job, ...]) -> list[Step]:
    [job] = jobs
    return pruning_plan(job) if variant is None else [*scored_plan(job, variant), *judged_plan(job, variant)]


# --- A recipe as the starting point of a search -----------------------------------------------------------------------


def begin_search(
    recipe: Recipe,
    targets: Sequence[str],
    bounds: Mapping[str, float | None],
    store: Path,
    skip_bad: bool,
    function: str | None = None,
    module: Path | None = None,
) -> schedule.LoadedRecipe:
    """What is searched: the recipe in FP32 for all targets, without anything that the search is to choose; its
    `high_precision` bounds what may be raised.

    Args:
        targets: in the place of the recipe's, where there are any.
        bounds: fields of the budget; None keeps what the recipe says.

    Raises:
        RecipeError: more than one image size, or targets and bounds that do not fit.
    """
    if recipe.source.image_sizes is not None:
        raise RecipeError("the recipe", ["$.source.image_sizes: one size is tuned at a time; give image_size"])
    budget = recipe.budget.model_copy(update={key: bound for key, bound in bounds.items() if bound is not None})
    chosen = tuple(targets) or recipe.targets
    kept = {"budget": budget, "targets": chosen, "high_precision": recipe.high_precision}
    base = Variant(chosen[0], "fp32").recipe(recipe).model_copy(update=kept)
    code = function or (module.stem if module else None)
    checked = validate(base.model_dump(exclude_unset=True), "the recipe", code)
    return schedule.LoadedRecipe(checked, store, skip_bad, function, module)


def prepare_search(search: schedule.LoadedRecipe, progress: Progress) -> Job:
    """The job of a search.

    Raises:
        InputError: a bound on the accuracy, no labels, and a metric that agreement does not bound.
        CapabilityError: an encoder-decoder, or a model that takes no images. Errors of `prepare` propagate.
    """
    [job] = search.prepare(progress)
    recipe, task = job.recipe, job.reference_model.task
    if recipe.budget.max_drop is not None and recipe.data.labels == "none" and task != "classification":
        raise InputError(
            "max_drop cannot be proven without labels",
            found=f"data: {{labels: none}}, for {task}",
            expected="labels, or a bound on the agreement with the original",
            fix="--min-agreement in its place",
        )
    if flow_of(task) or job.reference_model.preprocess is None:
        raise CapabilityError(
            "only models of images are tuned by this version, and only such of one graph",
            found=f"the task {task}",
            expected="a model of one graph that takes images",
            fix="vitdeploy run RECIPE makes its engines; `float_parts` and `ignore` say what of them stays in float",
        )
    require_image_alone(job.reference_model.name, job.reference_model.inputs, "a search")
    return job


# --- Choose the finalist to ship --------------------------------------------------------------------------------------
# a test in a fixed order, so that trying many of them makes no wrong answer likelier.
#
# The finalists are tested in the order of their distance on the calibration images, the nearest to the original first.
# The first one that the evaluation images do not confirm ends the test: those further away are not considered. Each
# step is a test at the usual level, and so is the whole (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995, in
# Biometrie in der chemisch-pharmazeutischen Industrie 6; Wiens 2003, Pharmaceutical Statistics 2:211-215). To take
# whichever of many passes would be a choice by the evaluation images, which could not judge it any more.


@dataclass(frozen=True)
class MadeVariant:
    """A variant with its artifacts, and how far its answers are from the original's on the calibration images."""

    variant: Variant
    artifacts: dict[str, Artifact]
    score: Score

    @property
    def engine(self) -> Artifact:
        return self.artifacts[self.variant.candidate.step("compile")]

    @property
    def bytes(self) -> int:
        """Of what the runtime loads."""
        return outcome.engine_bytes(self.artifacts, self.variant.candidate)


@dataclass(frozen=True)
class Finalist:
    """`verified`: the result of `verify`. `accuracy`: the gate of its answers, `gate`: that of the whole budget.
    `guarded`: no budget bounds the loss."""

    made: MadeVariant
    verified: Comparison
    accuracy: Gate
    gate: Gate
    guarded: bool = False

    @property
    def variant(self) -> Variant:
        return self.made.variant

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def distance(self) -> float:
        return self.made.score.distance

    @property
    def keeps(self) -> bool:
        return keeps_answers(self.accuracy, self.verified, guarded=self.guarded)


@dataclass(frozen=True)
class TuneChoice:
    """`best`: what to ship, or the best found where `gate` is not met; `grade`: how surely by the times; `rivals`: the
    other finalists to ship that may be as fast. `confirmed`: by name, the nearest first; `stopped`: the finalist that
    was not."""

    best: Finalist
    gate: Gate
    sentence: str
    remarks: tuple[str, ...]
    confirmed: tuple[str, ...]
    stopped: str | None
    grade: Grade
    rivals: tuple[Finalist, ...]


def choose(finalists: Sequence[Finalist], bench: Bench) -> TuneChoice:
    """The fastest finalist that is confirmed and meets the budget; among those not provably slower, prefer one whose
    graph is not changed, then the nearest to the original.

    `bench` is the result of `pipeline.measure` for the original and all finalists. What its times leave open is said:
    nothing is ruled out by a time that is not decided.
    """
    order = sorted(finalists, key=lambda each: each.distance)
    kept_count = next((i for i, each in enumerate(order) if not each.keeps), len(order))
    confirmed, stopped = order[:kept_count], order[kept_count] if kept_count < len(order) else None
    allowed = [each for each in confirmed if each.gate.status in ("pass", "none")]
    # Where nothing is allowed, the best found is what comes nearest to it: confirmed but too slow or large, or else the
    # nearest to the original.
    best = _fastest(allowed or confirmed or order[:1], bench)
    rivals = tuple(each for each in allowed if each is not best and _is_open(each, best, bench))
    remarks = [kept(best.name, best.verified)]
    if rivals:
        names = " or ".join(each.name for each in (best, *rivals))
        remarks.insert(0, f"Undecided: whether {names} is fastest; the recipe keeps the targets of all.")
    if stopped is not None:
        remarks.append(_stopped(stopped, order[kept_count + 1 :]))
    return TuneChoice(
        best,
        best.gate,
        _sentence(best, allowed, bench),
        tuple(remarks),
        tuple(each.name for each in confirmed),
        stopped.name if stopped is not None else None,
        _grade(best, allowed, bench),
        rivals,
    )


def _sentence(best: Finalist, allowed: Sequence[Finalist], bench: Bench) -> str:
    if not allowed:
        return f"Nothing is proven to meet the budget; the best is {best.name}."
    return sentence(best.name, bench.ratios)


def _grade(best: Finalist, allowed: Sequence[Finalist], bench: Bench) -> Grade:
    against = between(bench, best.name, ORIGINAL)
    if not allowed or against is None or against.decided or beats(bench, best.name, ORIGINAL):
        return "recommended" if allowed else "no ranking"
    return "leading" if against.verdict == "seems faster" else "no ranking"


def _is_open(one: Finalist, best: Finalist, bench: Bench) -> bool:
    """Whether another finalist may be as fast, for all that its times say."""
    ratio = between(bench, one.name, best.name)
    return (ratio is None or not ratio.decided) and not beats(bench, best.name, one.name)


def _fastest(among: Sequence[Finalist], bench: Bench) -> Finalist:
    times = relative_times(bench)
    fastest = min(among, key=lambda each: times[each.name])
    as_fast = [each for each in among if each is fastest or not _slower(each.name, fastest.name, bench.ratios)]
    return min(as_fast, key=lambda each: (each.variant != each.variant.plain, each.distance))


def _slower(a: str, b: str, ratios: Sequence[summary.Ratio]) -> bool:
    """Whether `a` is provably slower than `b`; if undecided, whether it seems so."""
    ratio = find_ratio(ratios, a, b)
    if ratio is None:
        return True
    return (ratio.ci95[0] if ratio.decided else ratio.ratio) > 1


def _stopped(stopped: Finalist, further: Sequence[Finalist]) -> str:
    reasons = "; ".join(stopped.accuracy.reasons) or _loss(stopped.verified)
    text = f"{stopped.name} is not confirmed: {reasons}."
    if further:
        names = ", ".join(each.name for each in further)
        text += f" What is further from the original is not considered: {names}."
    return text


def _loss(verified: Comparison) -> str:
    low, high = verified.drop_ci95 or (math.nan, math.nan)
    return f"it loses {verified.drop:.2f} points of {verified.metric} [{low:.2f}, {high:.2f}]"


# --- What a search has made, and what it found ------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """The results of a search.

    made: every variant; `front`: those that were judged.
    medians_ms: medians of each round of the screening, by name. disturbed: why these are unreliable; empty if they are
        reliable.
    merging: the trials of token merging, by target. prunings: those of pruning, () where nothing was tried.
    left_out: (what, why).
    """

    job: Job
    made: tuple[MadeVariant, ...]
    medians_ms: dict[str, list[float]]
    disturbed: str
    front: tuple[Finalist, ...]
    bench: Bench
    choice: TuneChoice
    merging: dict[str, sweep.MergingTrial]
    prunings: tuple[Pruning, ...]
    left_out: tuple[tuple[str, str], ...]


# --- Summarize the screening in words: which of the usual measures pay on this machine, and which do not --------------


Medians = Mapping[str, Sequence[float]]


def remarks(variants: Sequence[Variant], medians: Medians, disturbed: str = "") -> list[str]:
    """A sentence for each pair of variants that a person would ask about.

    Args:
        variants: what was measured.
        medians: milliseconds of each round by name, all measured in the same rounds, in one process of each.
        disturbed: why these are not to be relied on; then nothing is said but that.
    """
    if disturbed:
        return [f"Which variants are faster than others was not decided: {disturbed}."]
    found = []
    for variant in variants:
        if variant.raised:  # it is there for the answers, which the table shows
            continue
        if variant.plain != variant and variant.plain.name in medians:
            found.append(_changed(variant, medians))
        elif variant.precision == "int8":
            found += _int8(variant, variants, medians)
    return found


def _int8(variant: Variant, variants: Sequence[Variant], medians: Medians) -> list[str]:
    """INT8 against the fastest float of the same target."""
    floats = [each for each in variants if each.target == variant.target and each.precision in FLOATS]
    if not floats:
        return []
    best = min(floats, key=lambda each: sorted(medians[each.name])[len(medians[each.name]) // 2])
    ratio, low, high = evidence.ratio_of_medians(medians[variant.name], medians[best.name]).interval
    name, shown = best.precision.upper(), f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
    if low > 1:
        return [f"{name} is faster than INT8 on {variant.target} ({shown}): ship {name} there."]
    if high >= 1:
        return [f"INT8 is not provably faster than {name} on {variant.target} ({shown})."]
    return []


def _changed(variant: Variant, medians: Medians) -> str:
    """Say whether a change of the graph pays, compared with the same variant without it."""
    ratio, low, high = evidence.ratio_of_medians(medians[variant.name], medians[variant.plain.name]).interval
    word = "pays" if high < 1 else "does not pay" if low > 1 else "is not provably faster"
    merges = ", then ".join(f"to {count} tokens in block {block}" for block, count in variant.merges)
    what = f"Merging {merges}" if variant.prune is None else f"Pruning {100 * variant.prune:g} % of the products"
    return f"{what} {word} on {variant.target}: latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}] to without."


def four_bits_remarks(variants: Sequence[sweep.VariantFacts], unit: str, disturbed: str = "") -> list[str]:
    """A sentence on INT4 weights for each target: what they save and cost against plain INT8. `unit`: of distances;
    `disturbed`: as in `remarks`."""
    plain = {each.target: each for each in variants if each.name == Variant(each.target, "int8").name}
    sentences = []
    for four in variants:
        if four.precision != "int4" or four.target not in plain:
            continue
        int8 = plain[four.target]
        times = "times not decided"
        if not disturbed:
            ratio, low, high = evidence.ratio_of_medians(four.rounds_ms, int8.rounds_ms).interval
            times = f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        end = "a finalist" if four.finalist else "no finalist, as another one is nearer to the original and as fast"
        sentences.append(
            f"INT4 weights on {four.target} against INT8: {four.bytes / 1e6:.1f} MB for {int8.bytes / 1e6:.1f}, "
            f"{times}, {unit} {four.distance:.3g} for {int8.distance:.3g}: {end}."
        )
    return sentences


# --- Write the results of a search: tune.json, tune.html, and the recipe of what to ship ------------------------------


UNITS = {"classification": "KL, nats"}


def write_tuned(tuned: SearchResult, out: Path) -> sweep.TuneDocument:
    """Publish a search at `out`. Returns tune.json.

    Raises:
        OutputError: `out` holds something that is not such a folder.
    """
    document = _document(tuned)
    recipe = recipe_text(_recipe(tuned), out, _comment(tuned))
    with replacing(out, TUNED_NAMES) as work:
        text = json.dumps(encode(document), indent=1, allow_nan=False)
        (work / "tune.json").write_text(f"{text}\n", encoding="utf-8")
        (work / "tune.html").write_text(render_tuning(document, recipe), encoding="utf-8")
        (work / RECIPE_FILE).write_text(recipe, encoding="utf-8")
    return document


def _recipe(tuned: SearchResult) -> Recipe:
    """The recipe of what is chosen, with the targets of all that may be as fast: `run` measures them again."""
    targets = dict.fromkeys(each.variant.target for each in (tuned.choice.best, *tuned.choice.rivals))
    return tuned.choice.best.variant.recipe(tuned.job.recipe).model_copy(update={"targets": tuple(targets)})


def _comment(tuned: SearchResult) -> str:
    open_names = ", ".join(each.name for each in tuned.choice.rivals)
    return "Chosen by vitdeploy tune." + (f" Not decided: whether {open_names} is as fast." if open_names else "")


def _document(tuned: SearchResult) -> sweep.TuneDocument:
    """The parts that report.json has too have its names there, for the same tables and plots show them."""
    job, choice = tuned.job, tuned.choice
    finalists = {each.variant for each in tuned.front}
    variants = tuple(_variant(each, tuned, each.variant in finalists) for each in tuned.made)
    unit = UNITS.get(job.reference_model.task, "relative squared error")
    sentences = remarks([each.variant for each in tuned.made], tuned.medians_ms, tuned.disturbed)
    sentences += four_bits_remarks(variants, unit, tuned.disturbed)
    for each in tuned.front:
        sentences += outcome.said_of_weights(each.made.artifacts, each.variant.candidate)
    return sweep.TuneDocument(
        format=report.FORMAT,
        name=job.recipe.name,
        task=job.reference_model.task,
        created=outcome.now(),
        verdict=sweep.TuneVerdict(
            sentence=choice.sentence,
            remarks=(*choice.remarks, *job.data.remarks, *dict.fromkeys(sentences)),
            recommended=choice.best.name,
            gate=choice.gate.status,
            reasons=choice.gate.reasons,
            confirmed=choice.confirmed,
            stopped=choice.stopped,
            grade=choice.grade,
            rivals=tuple(each.name for each in choice.rivals),
        ),
        warnings=outcome.warnings_of(job, tuned.front[0].made.artifacts, tuned.front[0].variant.candidate),
        budget=job.recipe.to_budget(),
        data=outcome.data_facts(job),
        unit=unit,
        variants=variants,
        engines=tuple(
            replace(outcome.engine_facts(each.made.artifacts, each.variant.candidate, each.gate), artifact=each.name)
            for each in tuned.front
        ),
        bench=tuned.bench,
        merging=dict(tuned.merging),
        left_out=tuple(Omission(what, why) for what, why in tuned.left_out),
        environment={**describe_host(), **tool_versions(outcome.TOOLS)},
        recipe=_recipe(tuned).model_dump(mode="json"),
        pruning=tuned.prunings or None,
    )


def _variant(made: MadeVariant, tuned: SearchResult, finalist: bool) -> sweep.VariantFacts:
    variant = made.variant
    return sweep.VariantFacts(
        name=variant.name,
        target=variant.target,
        precision=variant.precision,
        merges=variant.merges,
        latency_ms=float(np.median(tuned.medians_ms[variant.name])),
        rounds_ms=tuple(tuned.medians_ms[variant.name]),
        bytes=made.bytes,
        finalist=finalist,
        prune=variant.prune,
        **vars(made.score),
    )


# --- Why something is not tried, or not shipped -----------------------------------------------------------------------


# (what, why)
LeftOut: TypeAlias = tuple[str, str]
NO_TIME = "no time was left for it"


def why_not(owner: Hashable, error: VitdeployError) -> str | None:
    """Why a variant, or what says which ones to try, is left out for an error; None where that ends the search."""
    if isinstance(error, CapabilityError):
        return error.message
    optional = not isinstance(owner, Variant) or owner.precision == "int4"  # anything else takes every graph so far
    if isinstance(error, WorkerError) or (isinstance(error, GraphError) and optional):
        return said(error)
    return None


def said(error: VitdeployError) -> str:
    """What has gone wrong, in one line."""
    return error.message + (f": {error.found}" if error.found else "")
