"""What a tuning has found: the choice, the recipe, and what is said of the rest."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from vitdeploy.benchmark.evidence import ratio_of_medians
from vitdeploy.document.bench import Bench, Omission, Ratio
from vitdeploy.document.report import FORMAT
from vitdeploy.document.sweep import MergingTrial, TuneDocument, TuneVerdict, VariantFacts
from vitdeploy.errors import CapabilityError, GraphError, VitdeployError, WorkerError
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.outcome import (
    TOOLS,
    data_facts,
    engine_bytes,
    engine_facts,
    now,
    said_of_weights,
    warnings_of,
)
from vitdeploy.pipeline.verdict import beats, between, find_ratio, keeps_answers, kept, relative_times, sentence
from vitdeploy.publish import replacing
from vitdeploy.recipe.load import recipe_text
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.report.html import render_tuning
from vitdeploy.runtime.host import describe_host
from vitdeploy.search.pruning import Pruning
from vitdeploy.search.rows import RowTable
from vitdeploy.spec import Grade, encode
from vitdeploy.stages.rows import Schedules
from vitdeploy.stages.search import Score
from vitdeploy.stages.step import ORIGINAL, TUNED_NAMES
from vitdeploy.stages.step import RECIPE_FILE as RECIPE_FILE
from vitdeploy.store.store import Artifact
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.gate import Gate
from vitdeploy.workflows.tuning.variants import FLOATS, Variant

# --- Choose the finalist to ship --------------------------------------------------------------------------------------
# a test in a fixed order, so that trying many of them makes no wrong answer likelier.
#
# The finalists are tested in the order of their distance on the calibration images, the nearest to the original first.
# The first one that the evaluation images do not confirm ends the test: those further away are not considered. Each
# step is a test at the usual level, and so is the whole (fixed-sequence testing: Maurer, Hothorn and Lehmacher 1995, in
# Biometrie in der chemisch-pharmazeutischen Industrie 6; Wiens 2003, Pharmaceutical Statistics 2:211-215). To take
# whichever of many passes would be a choice by the evaluation images, which could not judge it any more.


@dataclass(frozen=True)
class Finalist:
    """`distance`: on the calibration images. `verified`: the result of `verify`. `accuracy`: the gate of its answers,
    `gate`: that of the whole budget. `guarded`: no budget bounds the loss."""

    variant: Variant
    distance: float
    verified: Comparison
    accuracy: Gate
    gate: Gate
    guarded: bool = False

    @property
    def name(self) -> str:
        return self.variant.name

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


def _slower(a: str, b: str, ratios: Sequence[Ratio]) -> bool:
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
class MadeVariant:
    """A variant with its artifacts, and how far its answers are from the original's on the calibration images."""

    variant: Variant
    job: Job
    artifacts: dict[str, Artifact]
    score: Score

    @property
    def engine(self) -> Artifact:
        return self.artifacts[self.variant.candidate.step("compile")]


@dataclass(frozen=True)
class SearchResult:
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
    made: tuple[MadeVariant, ...]
    finals: tuple[MadeVariant, ...]
    medians_ms: dict[str, list[float]]
    disturbed: str
    front: tuple[Finalist, ...]
    bench: Bench
    choice: TuneChoice
    rows: dict[str, RowTable]
    schedules: dict[str, Schedules]
    prunings: tuple[Pruning, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def chosen(self) -> MadeVariant:
        return next(each for each in self.finals if each.variant == self.choice.best.variant)


# --- Summarize the screening in words: which of the usual measures pay on this machine, and which do not --------------


Medians = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Traits:
    """What a variant is judged by besides its times: the distance of its answers, and the bytes of its engine."""

    variant: Variant
    distance: float
    bytes: int
    finalist: bool


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
    ratio, low, high = ratio_of_medians(medians[variant.name], medians[best.name]).interval
    name, shown = best.precision.upper(), f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
    if low > 1:
        return [f"{name} is faster than INT8 on {variant.target} ({shown}): ship {name} there."]
    if high >= 1:
        return [f"INT8 is not provably faster than {name} on {variant.target} ({shown})."]
    return []


def _changed(variant: Variant, medians: Medians) -> str:
    """Say whether a change of the graph pays, compared with the same variant without it."""
    ratio, low, high = ratio_of_medians(medians[variant.name], medians[variant.plain.name]).interval
    word = "pays" if high < 1 else "does not pay" if low > 1 else "is not provably faster"
    merges = ", then ".join(f"to {count} tokens in block {block}" for block, count in variant.merges)
    what = f"Merging {merges}" if variant.merges else f"Computing {variant.rows} rows"
    what = what if variant.prune is None else f"Pruning {100 * variant.prune:g} % of the products"
    return f"{what} {word} on {variant.target}: latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}] to without."


def four_bits_remarks(traits: Sequence[Traits], medians: Medians, unit: str, disturbed: str = "") -> list[str]:
    """A sentence on INT4 weights for each target: what they save and cost against plain INT8.

    Args:
        traits: of everything that was made.
        unit: of distances.
        medians, disturbed: as in `remarks`.
    """
    plain = {each.variant.target: each for each in traits if each.variant == Variant(each.variant.target, "int8")}
    found = []
    for each in traits:
        target = each.variant.target
        if each.variant.precision != "int4" or target not in plain:
            continue
        int8 = plain[target]
        times = "times not decided"
        if not disturbed:
            ratio, low, high = ratio_of_medians(medians[each.variant.name], medians[int8.variant.name]).interval
            times = f"latency ratio {ratio:.2f} [{low:.2f}, {high:.2f}]"
        end = "a finalist" if each.finalist else "no finalist, as another one is nearer to the original and as fast"
        found.append(
            f"INT4 weights on {target} against INT8: {each.bytes / 1e6:.1f} MB for {int8.bytes / 1e6:.1f}, {times}, "
            f"{unit} {each.distance:.3g} for {int8.distance:.3g}: {end}."
        )
    return found


# --- Write the results of a search: tune.json, tune.html, and the recipe of what to ship ------------------------------


UNITS = {"classification": "KL, nats"}


def write_tuned(tuned: SearchResult, out: Path) -> TuneDocument:
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
    return tuned.chosen.variant.recipe(tuned.job.recipe).model_copy(update={"targets": tuple(targets)})


def _comment(tuned: SearchResult) -> str:
    open_names = ", ".join(each.name for each in tuned.choice.rivals)
    return "Chosen by vitdeploy tune." + (f" Not decided: whether {open_names} is as fast." if open_names else "")


def _document(tuned: SearchResult) -> TuneDocument:
    """The parts that report.json has too have its names there, for the same tables and plots show them."""
    job, choice = tuned.job, tuned.choice
    finalists = {each.variant: each for each in tuned.front}
    unit = UNITS.get(job.reference_model.task, "relative squared error")
    said = remarks([each.variant for each in tuned.made], tuned.medians_ms, tuned.disturbed)
    traits = [
        Traits(each.variant, each.score.distance, engine_bytes(each.artifacts, each.variant.candidate), kept)
        for each in tuned.made
        for kept in [each.variant in finalists]
    ]
    said += four_bits_remarks(traits, tuned.medians_ms, unit, tuned.disturbed)
    for each in tuned.finals:
        said += [text for text in said_of_weights(each.artifacts, each.variant.candidate) if text not in said]
    return TuneDocument(
        format=FORMAT,
        name=job.recipe.name,
        task=job.reference_model.task,
        created=now(),
        verdict=TuneVerdict(
            sentence=choice.sentence,
            remarks=(*choice.remarks, *job.data.remarks, *said),
            recommended=choice.best.name,
            gate=choice.gate.status,
            reasons=choice.gate.reasons,
            confirmed=choice.confirmed,
            stopped=choice.stopped,
            grade=choice.grade,
            rivals=tuple(each.name for each in choice.rivals),
        ),
        warnings=warnings_of(job, tuned.finals[0].artifacts, tuned.finals[0].variant.candidate),
        budget=job.recipe.to_budget(),
        data=data_facts(job),
        unit=unit,
        variants=tuple(_variant(each, tuned, each.variant in finalists) for each in tuned.made),
        engines=tuple(
            replace(engine_facts(made.artifacts, made.variant.candidate, found.gate), artifact=found.name)
            for made in tuned.finals
            for found in [finalists[made.variant]]
        ),
        bench=tuned.bench,
        rows=dict(tuned.rows),
        merging={target: MergingTrial(found.tokens, found.schedules) for target, found in tuned.schedules.items()},
        left_out=tuple(Omission(what, why) for what, why in tuned.left_out),
        environment={**describe_host(), **tool_versions(TOOLS)},
        recipe=_recipe(tuned).model_dump(mode="json"),
        pruning=tuned.prunings or None,
    )


def _variant(made: MadeVariant, tuned: SearchResult, finalist: bool) -> VariantFacts:
    variant = made.variant
    return VariantFacts(
        name=variant.name,
        target=variant.target,
        precision=variant.precision,
        merges=variant.merges,
        rows=variant.rows,
        latency_ms=float(np.median(tuned.medians_ms[variant.name])),
        rounds_ms=tuple(tuned.medians_ms[variant.name]),
        bytes=engine_bytes(made.artifacts, variant.candidate),
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
