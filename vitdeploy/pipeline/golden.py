"""The golden set of a bundle: a few inputs with the outputs of the original and of every engine, to check an engine
wherever it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitdeploy.bundle.write import GOLDEN_BYTES, Golden, GoldenAnswers
from vitdeploy.pipeline.job import Job
from vitdeploy.runtime.answers import bound, count_same
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs, largest_difference
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, GateStatus
from vitdeploy.stages.reference_model import reference_runner
from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.gate import GUARD

GOLDEN_SAMPLES = 8
# How far the outputs of one engine may lie apart on two machines, of max|a - b| / max|b|: as measured over instruction
# sets, threads and batches (docs/bundle.md), and some room. A wrong engine is off by about 1.
TOLERANCE = {
    "fp32": 1e-3,
    "fp16": 2e-2,
    "bf16": 1e-1,
    "fp8": 1e-1,
    "int8": 1e-1,
    "mixed": 1e-1,
    "int4": 1e-1,
}
# Of a tolerance, to which it may be lowered where outputs hardly change from sample to sample.
LEAST_PART = 0.1
# How seldom an engine that gives as many of the original's answers as it must is to fail on a few golden ones.
FALSE_ALARM = 0.01


def golden_of(
    job: Job, reference: Answers, engines: Sequence[tuple[EngineSpec, Path]], gates: Mapping[str, GateStatus]
) -> Golden:
    """The golden set of a job's bundle. `reference`: the original's answers to all evaluation samples."""
    asked, model = job.budget.min_agreement, job.reference_model
    least = GUARD[model.task] if asked is None else asked
    with reference_runner(model.source) as original:
        return golden_set(job.adapter, job.data, reference, original, engines, gates, least)


def golden_set(
    adapter: TaskAdapter,
    data: Data,
    reference: Answers,
    original: Runner,
    engines: Sequence[tuple[EngineSpec, Path]],
    gates: Mapping[str, GateStatus],
    agreement: float,
) -> Golden:
    """Evaluation samples whose answers differ, with the answers of the loaded original and of every engine, which are
    to agree to so many percent."""
    task, preprocess, postprocess = adapter.setting.task, adapter.setting.preprocess, adapter.setting.postprocess
    name, shared = original.inputs[0].name, adapter.shared_golden(data)
    samples = adapter.golden_inputs(data, adapter.unlike(reference, data, GOLDEN_SAMPLES))
    runner, samples = bound(task, original, {name: samples, **shared}, postprocess)
    outputs = engine_outputs(runner, preprocess, samples[:1])
    count = max(1, min(len(samples), GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
    seen = samples[: max(count, 2)]  # of one sample nothing shows how the answers to others would do
    if len(seen) > 1:
        outputs = engine_outputs(runner, preprocess, seen)
    least = least_same(count, agreement)
    kept, others = _first(outputs, count), _first(_rolled(outputs), count)
    by_chance = count_same(task, preprocess, postprocess, others, kept)
    answers = {}
    for engine, folder in engines:
        with make_runner(folder, engine) as whole:
            found = engine_outputs(bound(task, whole, {name: samples, **shared}, postprocess)[0], preprocess, seen)
        names = list(found) if postprocess is None else postprocess.comparable(found)
        names = [each for each in names if found[each].dtype.kind not in "iu"]
        varies, own = largest_difference(_rolled(found), found, names), _first(found, count)
        same = count_same(task, preprocess, postprocess, own, kept)
        # One that was proven on all evaluation samples may have more of its differences among the golden ones.
        wanted = min(least, same) if gates[engine.artifact] == "pass" else least
        tolerance = _tolerance(engine.precision, varies)
        nothing = None if tolerance is not None or 2 * by_chance <= wanted else _nothing(varies, by_chance, count)
        answers[engine.artifact] = GoldenAnswers(own, tolerance or TOLERANCE[engine.precision], wanted, nothing)
    return Golden({name: samples[:count], **shared}, kept, answers)


def _first(outputs: Mapping[str, Array], count: int) -> dict[str, Array]:
    return {name: array[:count] for name, array in outputs.items()}


def _rolled(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Each sample's outputs in the place of another's."""
    return {name: np.roll(array, 1, axis=0) for name, array in outputs.items()}


def _tolerance(precision: str, varies: float) -> float | None:
    """At most half of what changes from sample to sample, so that answers to other samples are out of it; None where
    that is too little for one engine on two machines."""
    most = TOLERANCE[precision]
    return None if varies / 2 < LEAST_PART * most else min(most, varies / 2)


def _nothing(varies: float, by_chance: int, count: int) -> str:
    if not varies and count == 1:
        return "there is one sample, so nothing shows how unrelated answers would do"
    same = f"{by_chance} of {count} answers to other samples are the same"
    return f"{same}, and their outputs {varies:.1e} of the largest apart"


def least_same(count: int, agreement: float) -> int:
    """The least number of equal answers among `count` that an engine with `agreement` percent gives in 99 of 100 cases
    (binomial)."""
    p = 1 - agreement / 100
    chances = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    others = next((k for k in range(count + 1) if sum(chances[k + 1 :]) < FALSE_ALARM), count)
    return count - others
