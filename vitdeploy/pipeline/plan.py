"""The plan of a job: its candidates and steps, and the answers for its report."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from vitdeploy.backends import TARGETS
from vitdeploy.extensions import lazy
from vitdeploy.pipeline.job import Job, export_config_of, rewrites_of
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.spec import FloatRest
from vitdeploy.stages import answers, attention, calibrate, optimize, rows, search, typed
from vitdeploy.stages.compile import compile_step
from vitdeploy.stages.place import PlaceConfig, place_step
from vitdeploy.stages.step import ORIGINAL, QUANTIZED, REFERENCE, UNPRUNED, Candidate, Step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.store import Artifact
from vitdeploy.tasks.adapter import Calibration, Data, ImageAdapter, TaskAdapter
from vitdeploy.tasks.answers import AnswerFacts, ChangedCounts, ExampleFacts
from vitdeploy.tasks.examples import choose, example
from vitdeploy.verification import classes, records
from vitdeploy.verification.changes import Changes

if TYPE_CHECKING:
    from vitdeploy.stages import export
else:
    export = lazy("vitdeploy.stages.export")  # needs PyTorch, which measuring and comparing do not

# --- From a job to its plan: the steps in order. Each stage defines its own key ---------------------------------------


# Below this size every precision takes 1-2 ms, and an extra BF16 candidate is not worth benchmarking.
LEAST_PARAMETERS = 4_000_000


def candidates(job: Job) -> list[Candidate]:
    """The candidates of a job: every target in the recipe's precision and, as baselines, in FP32; with mixed precision
    also in INT8; with INT8 or mixed precision also in BF16, if this CPU may be faster in it than in INT8."""
    precision = job.recipe.precision
    asked = [Candidate(target, precision, True) for target in job.recipe.targets]
    baselines = [Candidate(c.target, "int8", False) for c in asked] if precision == "mixed" else []
    if precision in ("int8", "mixed") and job.reference_model.parameters >= LEAST_PARAMETERS:
        task = job.reference_model.task
        baselines += [Candidate(c.target, "bf16", False) for c in asked if search.has_half_rest(c.target, "int8", task)]
    baselines += [Candidate(c.target, "fp32", False) for c in asked] if precision != "fp32" else []
    return asked + baselines


def make_plan(job: Job, workers: Workers = HERE) -> list[Step]:
    """All storable steps of a job; measuring and bundling follow and are never stored. The original's answers come
    first: they show whether the budget can be proven. `workers` run the shards of a step."""
    contenders = candidates(job)
    reference, *verdicts = judge_plan(job, contenders)
    steps = [reference, *engine_plan(job, contenders, workers), *verdicts]
    if job.adapter.attention and isinstance(job.adapter, ImageAdapter) and not job.reference_model.inputs:
        steps.append(attention.attention_step(job.adapter, job.data, contenders))
    return [dataclasses.replace(step, about=_about(job, step)) for step in steps]


def _about(job: Job, step: Step) -> dict[str, int]:
    """The factors of a step's time and size: the model's size, and the number of samples that the key depends on."""
    model, samples = job.reference_model, {"samples": job.data.evaluation, "images": job.data.calibration}
    counts = {name: len(of) for name, of in samples.items() if name in step.outside}
    return {"parameters": model.parameters, "pixels": math.prod(model.image_size), **counts}


def engine_plan(job: Job, contenders: Sequence[Candidate], workers: Workers = HERE) -> list[Step]:
    """The plan from the original to the compiled engines of some candidates. Measuring steps use no workers."""
    recipe = job.recipe
    steps = [export.export_step(job.reference_model, export_config_of(recipe)), *float_steps(job)]
    if any(candidate.precision in QUANTIZED for candidate in contenders):
        shown = Calibration(job.data.calibration, texts=job.data.classes, inputs=job.data.inputs)
        drive = job.adapter.drive(shown)
        steps.append(calibrate.calibrate_step(job.data, drive, workers))
    for candidate in contenders:
        plain = _plain(job, candidate)
        if candidate.precision == "mixed":
            steps.append(search.search_step(candidate, plain, recipe.to_budget(), job.data))
        rest = float_rest_of(job, candidate)
        if rest == "chosen":
            steps.append(search.float_rest_step(candidate, plain, recipe.engine_batch, job.data))
        steps += placement_plan(job, candidate, rest)
        parts = row_parts_of(job, candidate)
        if parts == "chosen":
            steps.append(rows.parts_step(candidate, recipe.engine_batch))
        build, accepted = recipe.to_build(), recipe.accept_known_bad
        steps.append(compile_step(candidate, recipe.engine_batch, build, accepted, parts, rest))
    return steps


def placement_plan(job: Job, candidate: Candidate, rest: FloatRest | Literal["chosen"] = "fp32") -> list[Step]:
    """The plan from the calibrated graph to a candidate's placement. `rest`: the result of `float_rest_of`."""
    recipe, plain = job.recipe, _plain(job, candidate)
    if TARGETS[candidate.target].typed and candidate.precision != "fp32":
        return [typed.typed_step(candidate, job.data, recipe.ignore)]
    price, batch = recipe.high_precision, recipe.engine_batch
    raises = search.raises_precision(candidate.target, candidate.precision, job.reference_model.task, price)
    raises = raises and candidate.shipped and not job.reference_model.inputs
    place = place_step(candidate, plain, recipe.float_parts, raises=raises)
    return [*([search.high_precision_step(candidate, plain, price, batch, job.data, rest)] if raises else []), place]


def _plain(job: Job, candidate: Candidate) -> PlaceConfig:
    """The config of a candidate's placement in plain INT8."""
    return PlaceConfig(candidate.target, "int8", job.recipe.ignore, job.weight_bits)


def float_steps(job: Job) -> list[Step]:
    """The steps from the export to the float graph that engines are made from; the last one is named OPTIMIZE."""
    section = job.recipe.optimize
    if section.prune == "none":
        return [optimize.optimize_step(rewrites_of(section))]
    unpruned = optimize.optimize_step(rewrites_of(section), UNPRUNED)
    return [unpruned, rows.pruning_step(job.data, UNPRUNED), rows.prune_step(section.prune, job.data)]


def row_parts_of(job: Job, candidate: Candidate) -> tuple[int, ...] | Literal["chosen"] | None:
    """The parts in which a candidate's engine computes its rows: the recipe's, "chosen" by a step, or None."""
    expected, model = job.recipe.optimize.split_rows, job.reference_model
    if expected == "none" or model.inputs or not rows.splits_rows(candidate.target, candidate.precision, model.task):
        return None
    if expected == "auto":
        return "chosen" if rows.chooses_rows(candidate.target, candidate.precision, model.task) else None
    return expected


def float_rest_of(job: Job, candidate: Candidate) -> FloatRest | Literal["chosen"]:
    """The precision of a candidate's float operators: the recipe's, or "chosen" by a step."""
    expected = job.recipe.optimize.float_rest
    if expected == "auto" and job.reference_model.inputs:
        return "fp32"
    if not search.has_half_rest(candidate.target, candidate.precision, job.reference_model.task):
        return "fp32"
    return "chosen" if expected == "auto" else expected


def original_step(job: Job) -> Step:
    """The step that computes the original's answers to the evaluation samples."""
    return answers.reference_step(job.reference_model, job.adapter, job.data)


def judge_plan(job: Job, contenders: Sequence[Candidate]) -> list[Step]:
    """The steps that compute the answers of the original and of compiled engines to the evaluation samples."""
    model = job.reference_model
    verdicts = (answers.verify_step(c, model.preprocess, model.postprocess, job.adapter, job.data) for c in contenders)
    return [original_step(job), *verdicts]


# --- The differences between the engines' and the original's answers, by sample and by class --------------------------
# `answers` in report.json.
#
# Its size is bounded for any number of classes and samples; the limits are in `verification.classes`.


def report_answers(
    job: Job, artifacts: Mapping[str, Artifact]
) -> tuple[tuple[ExampleFacts, ...], AnswerFacts, dict[str, bytes]]:
    """`examples` and `answers` of report.json, and the pictures by the names in the examples."""
    reference = answers.read_answers(artifacts[REFERENCE].path)
    engines = {c.artifact: answers.read_answers(artifacts[c.step("verify")].path) for c in candidates(job)}
    labels = job.labels or None
    examples: list[ExampleFacts] = []
    images: dict[str, bytes] = {}
    for chosen in choose(job.adapter, reference, engines, job.data):
        row, pictures = example(job.adapter, job.data, chosen, reference, engines, labels)
        examples.append(row)
        images |= pictures
    return tuple(examples), answer_facts(job.adapter, job.data, reference, engines, labels), images


def answer_facts(
    adapter: TaskAdapter,
    data: Data,
    reference: records.Answers,
    engines: Mapping[str, records.Answers],
    labels: Sequence[str] | None,
) -> AnswerFacts:
    """Summarize all answers; by class if samples have classes."""
    changed = {name: _counts(adapter.changes(found, reference, data)) for name, found in engines.items()}
    original = adapter.classified(reference, data)
    if original is None:
        return AnswerFacts(changed)
    found = {name: known for name, each in engines.items() if (known := adapter.classified(each, data)) is not None}
    every = {ORIGINAL: original, **found}
    highest = max(int(max(each.truth.max(), each.answer.max())) for each in every.values())
    known_names = labels or data.classes
    names = [label_of(i, known_names) for i in range(max(len(known_names), highest + 1))]
    return AnswerFacts(
        changed,
        classes.confusion(every, names),
        classes.by_class(original, found, names),
        {name: classes.reliability(each) for name, each in every.items() if each.confidence is not None},
    )


def _counts(changes: Changes) -> ChangedCounts:
    return ChangedCounts(
        int(changes.changed.sum()),
        None if changes.lost is None else int(changes.lost.sum()),
        None if changes.gained is None else int(changes.gained.sum()),
        0 if changes.kept is None else int(changes.kept.sum()),
    )
