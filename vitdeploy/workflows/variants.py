"""Variants of a model in a search: their steps, the choice among them, and the remarks on the others."""

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
    """One way to run a model. `merges`: token merging, each (block, tokens to keep). `prune`: the minimum share of MACs
    to remove, None for none. `raised`: some layers in higher precision, as the recipe's `high_precision` allows."""

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
        """The variant without changes of the graph, in plain INT8."""
        return Variant(self.target, self.precision)

    @property
    def changes_answers(self) -> bool:
        """Whether its float graph differs, and gives other answers."""
        return bool(self.merges) or self.prune is not None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.target, self.precision, True)

    def recipe(self, base: Recipe) -> Recipe:
        """The recipe of this variant, only for its target."""
        changes = {"token_merging": dict(self.merges) or "none", "prune": self.prune or "none"}
        further = {
            "precision": self.precision,
            "targets": (self.target,),
            "optimize": base.optimize.model_copy(update=changes),
            "high_precision": base.high_precision if self.raised else 0.0,
        }
        return base.model_copy(update=further)


def float_variants(target: str) -> list[Variant]:
    """A variant for every float precision of the target; the runtime decides whether this machine supports it."""
    return [Variant(target, precision) for precision in FLOATS if precision in TARGETS[target].precisions]


# --- The steps of a variant, also for a worker process ----------------------------------------------------------------

# The float graph without merging and pruning, for a variant with a changed graph. Its first word is the kind.
UNCHANGED = f"{OPTIMIZE} unchanged"


def job_of(job: Job, variant: Variant) -> Job:
    return replace(job, recipe=variant.recipe(job.recipe))


def scored_plan(job: Job, variant: Variant, workers: Workers = HERE) -> list[Step]:
    """The steps from the original to the distance between a variant's answers and those of the float graph: its own, or
    `UNCHANGED` if its answers differ even in float. `job`: the job of the search."""
    own, candidate = job_of(job, variant), variant.candidate
    reference = UNCHANGED if variant.changes_answers else OPTIMIZE
    return [*plan.engine_plan(own, [candidate], workers), score_step(candidate, reference, job.data)]


def judged_plan(job: Job, variant: Variant) -> list[Step]:
    """The steps to the answers of the original and of a variant's engine to the evaluation samples."""
    return plan.judge_plan(job_of(job, variant), [variant.candidate])


def pruning_plan(job: Job) -> list[Step]:
    """The steps to the possible prunings of the graph of a search."""
    return [*plan.engine_plan(job, ()), pruning_step(job.data)]


def steps_of(search: schedule.LoadedRecipe, variant: Variant | None) -> schedule.StepSource:
    """The steps of a variant of a search; None: those of its prunings."""
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
    """The base of a search: the recipe in FP32 for all targets, without the fields that the search chooses; its
    `high_precision` limits layers in higher precision.

    Args:
        targets: replace the recipe's targets, if any.
        bounds: fields of the budget; None keeps the recipe's bound.

    Raises:
        RecipeError: more than one image size, or invalid targets or bounds.
    """
    if recipe.source.image_sizes is not None:
        raise RecipeError("the recipe", ["$.source.image_sizes: tune takes one size; use image_size"])
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
        InputError: a bound on the accuracy without labels, for a metric that agreement does not bound.
        CapabilityError: an encoder-decoder, or a model that takes no images. Errors of `prepare` propagate.
    """
    [job] = search.prepare(progress)
    recipe, task = job.recipe, job.reference_model.task
    if recipe.budget.max_drop is not None and recipe.data.labels == "none" and task != "classification":
        raise InputError(
            "max_drop cannot be proven without labels",
            found=f"data: {{labels: none}}, for {task}",
            expected="labels, or a bound on the agreement with the original",
            fix="use --min-agreement instead",
        )
    if flow_of(task) or job.reference_model.preprocess is None:
        raise CapabilityError(
            "tune supports only models of one graph that take images",
            found=f"the task {task}",
            expected="a model of one graph that takes images",
            fix="use vitdeploy run RECIPE; `float_parts` and `ignore` keep graphs or layers in float",
        )
    require_image_alone(job.reference_model.name, job.reference_model.inputs, "a search")
    return job


# --- Choose the best finalist -----------------------------------------------------------------------------------------
# A test in a fixed order, so that testing many finalists does not raise the error rate.
#
# The finalists are tested in the order of their distance on the calibration images, the closest to the original first.
# The first one that the evaluation images do not confirm ends the test: those further away are not considered. Each
# step is a test at the usual level, and so is the whole (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995, in
# Biometrie in der chemisch-pharmazeutischen Industrie 6; Wiens 2003, Pharmaceutical Statistics 2:211-215). Taking any
# finalist that passes would be a selection by the evaluation images, which then could no longer test it.


@dataclass(frozen=True)
class MadeVariant:
    """A variant with its artifacts, and the distance of its answers from the original's on the calibration images."""

    variant: Variant
    artifacts: dict[str, Artifact]
    score: Score

    @property
    def engine(self) -> Artifact:
        return self.artifacts[self.variant.candidate.step("compile")]

    @property
    def bytes(self) -> int:
        """Total size of the files that the runtime loads."""
        return outcome.engine_bytes(self.artifacts, self.variant.candidate)


@dataclass(frozen=True)
class Finalist:
    """A tested variant. `verified`: the result of `verify`. `accuracy`: the gate of its answers, `gate`: the gate of
    the whole budget. `guarded`: the budget does not bound the loss."""

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
    """`best`: the finalist to ship, or the best one if `gate` is not met; `grade`: the certainty by the times;
    `rivals`: other finalists that may be as fast. `confirmed`: names, the closest to the original first; `stopped`: the
    finalist that was not confirmed."""

    best: Finalist
    gate: Gate
    sentence: str
    remarks: tuple[str, ...]
    confirmed: tuple[str, ...]
    stopped: str | None
    grade: Grade
    rivals: tuple[Finalist, ...]


def choose(finalists: Sequence[Finalist], bench: Bench) -> TuneChoice:
    """Choose the fastest finalist that is confirmed and meets the budget; among those not provably slower, prefer an
    unchanged graph, then the closest to the original.

    `bench` is the result of `pipeline.measure` for the original and all finalists. Undecided times are reported, and
    rule out no finalist.
    """
    order = sorted(finalists, key=lambda each: each.distance)
    kept_count = next((i for i, each in enumerate(order) if not each.keeps), len(order))
    confirmed, stopped = order[:kept_count], order[kept_count] if kept_count < len(order) else None
    allowed = [each for each in confirmed if each.gate.status in ("pass", "none")]
    # If no finalist is allowed, the best is a confirmed one that is too slow or large, or else the closest to the
    # original.
    best = _fastest(allowed or confirmed or order[:1], bench)
    rivals = tuple(each for each in allowed if each is not best and _is_open(each, best, bench))
    remarks = [kept(best.name, best.verified)]
    if rivals:
        names = " or ".join(each.name for each in (best, *rivals))
        remarks.insert(0, f"Not decided: {names} may be fastest; the recipe keeps the targets of all.")
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
        return f"No variant provably meets the budget; the best is {best.name}."
    return sentence(best.name, bench.ratios)


def _grade(best: Finalist, allowed: Sequence[Finalist], bench: Bench) -> Grade:
    against = between(bench, best.name, ORIGINAL)
    if not allowed or against is None or against.decided or beats(bench, best.name, ORIGINAL):
        return "recommended" if allowed else "no ranking"
    return "leading" if against.verdict == "seems faster" else "no ranking"


def _is_open(one: Finalist, best: Finalist, bench: Bench) -> bool:
    """Whether another finalist may be as fast, by its times."""
    ratio = between(bench, one.name, best.name)
    return (ratio is None or not ratio.decided) and not beats(bench, best.name, one.name)


def _fastest(among: Sequence[Finalist], bench: Bench) -> Finalist:
    times = relative_times(bench)
    fastest = min(among, key=lambda each: times[each.name])
    as_fast = [each for each in among if each is fastest or not _slower(each.name, fastest.name, bench.ratios)]
    return min(as_fast, key=lambda each: (each.variant != each.variant.plain, each.distance))


def _slower(a: str, b: str, ratios: Sequence[summary.Ratio]) -> bool:
    """Whether `a` is provably slower than `b`; if undecided, whether it seems slower."""
    ratio = find_ratio(ratios, a, b)
    if ratio is None:
        return True
    return (ratio.ci95[0] if ratio.decided else ratio.ratio) > 1


def _stopped(stopped: Finalist, further: Sequence[Finalist]) -> str:
    reasons = "; ".join(stopped.accuracy.reasons) or _loss(stopped.verified)
    text = f"{stopped.name} is not confirmed: {reasons}."
    if further:
        names = ", ".join(finalist.name for finalist in further)
        text += f" Not considered, as further from the original: {names}."
    return text


def _loss(verified: Comparison) -> str:
    low, high = verified.drop_ci95 or (math.nan, math.nan)
    return f"{verified.metric} drops by {verified.drop:.2f} points [{low:.2f}, {high:.2f}]"


# --- The results of a search ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """The results of a search.

    made: every variant; `front`: the tested ones.
    medians_ms: medians of each round of the screening, by name. disturbed: the reason why these are unreliable; "" if
        they are reliable.
    merging: the trials of token merging, by target. prunings: the trials of pruning, () without any.
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


# --- Summarize the screening in words: the methods that pay off on this machine, and those that do not ----------------


Medians = Mapping[str, Sequence[float]]


def remarks(variants: Sequence[Variant], medians: Medians, disturbed: str = "") -> list[str]:
    """A sentence for each interesting pair of variants.

    Args:
        variants: the measured variants.
        medians: milliseconds of each round by name, all measured in the same rounds, in one process each.
        disturbed: the reason why these are unreliable, which is then the only remark; "" if they are reliable.
    """
    if disturbed:
        return [f"The speed ranking of the variants is not decided: {disturbed}."]
    found = []
    for variant in variants:
        if variant.raised:  # made for better answers, which the table shows
            continue
        if variant.plain != variant and variant.plain.name in medians:
            found.append(_changed(variant, medians))
        elif variant.precision == "int8":
            found += _int8(variant, variants, medians)
    return found


def _int8(variant: Variant, variants: Sequence[Variant], medians: Medians) -> list[str]:
    """INT8 compared with the fastest float precision of the same target."""
    floats = [each for each in variants if each.target == variant.target and each.precision in FLOATS]
    if not floats:
        return []
    best = min(floats, key=lambda each: sorted(medians[each.name])[len(medians[each.name]) // 2])
    ratio, low, high = evidence.ratio_of_medians(medians[variant.name], medians[best.name]).interval
    name, shown = best.precision.upper(), f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
    if low > 1:
        return [f"{name} is faster than INT8 on {variant.target} ({shown}): use {name} there."]
    if high >= 1:
        return [f"INT8 is not provably faster than {name} on {variant.target} ({shown})."]
    return []


def _changed(variant: Variant, medians: Medians) -> str:
    """A sentence on whether a change of the graph pays off, compared with the variant without it."""
    ratio, low, high = evidence.ratio_of_medians(medians[variant.name], medians[variant.plain.name]).interval
    word = "is faster" if high < 1 else "is slower" if low > 1 else "is not provably faster"
    merges = ", then ".join(f"to {count} tokens in block {block}" for block, count in variant.merges)
    what = f"Merging {merges}" if variant.prune is None else f"Pruning {100 * variant.prune:g} % of the MACs"
    return (
        f"{what} {word} on {variant.target}: latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}] to the unchanged graph."
    )


def four_bits_remarks(variants: Sequence[sweep.VariantFacts], unit: str, disturbed: str = "") -> list[str]:
    """A sentence on INT4 weights for each target: savings and costs compared with plain INT8. `unit`: the unit of
    distances; `disturbed`: as in `remarks`."""
    plain = {variant.target: variant for variant in variants if variant.name == Variant(variant.target, "int8").name}
    sentences = []
    for four in variants:
        if four.precision != "int4" or four.target not in plain:
            continue
        int8 = plain[four.target]
        times = "times not decided"
        if not disturbed:
            ratio, low, high = evidence.ratio_of_medians(four.rounds_ms, int8.rounds_ms).interval
            times = f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        end = "a finalist" if four.finalist else "not a finalist: another variant is closer to the original and as fast"
        sentences.append(
            f"INT4 weights on {four.target} vs. INT8: {four.bytes / 1e6:.1f} MB vs. {int8.bytes / 1e6:.1f} MB, "
            f"{times}, {unit} {four.distance:.3g} vs. {int8.distance:.3g}: {end}."
        )
    return sentences


# --- Write the results of a search: tune.json, tune.html, and the recipe of the best variant --------------------------


UNITS = {"classification": "KL, nats"}


def write_tuned(tuned: SearchResult, out: Path) -> sweep.TuneDocument:
    """Publish a search at `out`; return tune.json.

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
    """The recipe of the chosen variant, with the targets of all that may be as fast: `run` measures them again."""
    targets = dict.fromkeys(each.variant.target for each in (tuned.choice.best, *tuned.choice.rivals))
    return tuned.choice.best.variant.recipe(tuned.job.recipe).model_copy(update={"targets": tuple(targets)})


def _comment(tuned: SearchResult) -> str:
    open_names = ", ".join(rival.name for rival in tuned.choice.rivals)
    return "Chosen by vitdeploy tune." + (f" Not decided: {open_names} may be as fast." if open_names else "")


def _document(tuned: SearchResult) -> sweep.TuneDocument:
    """Parts that are also in report.json have the same names, because the same tables and plots show them."""
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
            rivals=tuple(rival.name for rival in choice.rivals),
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
        disturbed=tuned.disturbed,
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


# --- The reasons why variants are not tried or not shipped ------------------------------------------------------------


# (what, why)
LeftOut: TypeAlias = tuple[str, str]
NO_TIME = "no time left"


def why_not(owner: Hashable, error: VitdeployError) -> str | None:
    """The reason why an error leaves out a variant or a selection of variants; None if the error ends the search."""
    if isinstance(error, CapabilityError):
        return error.message
    optional = not isinstance(owner, Variant) or owner.precision == "int4"  # all others apply to every graph
    if isinstance(error, WorkerError) or (isinstance(error, GraphError) and optional):
        return said(error)
    return None


def said(error: VitdeployError) -> str:
    """One line on an error."""
    return error.message + (f": {error.found}" if error.found else "")
