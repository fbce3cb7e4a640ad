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
from vitdeploy.runtime.golden import changes_between, engine_outputs
from vitdeploy.spec import EngineSpec, GateStatus
from vitdeploy.stages.reference_model import reference_runner
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
    """Evaluation samples whose answers differ, with the answers of the original and of every engine of the bundle.
    `reference`: the original's answers to all of them."""
    chosen = job.adapter.unlike(reference, job.data, GOLDEN_SAMPLES)
    inputs = job.adapter.golden_inputs(job.data, chosen)
    shared, model = job.adapter.shared_golden(job.data), job.reference_model
    with reference_runner(model.source) as whole:
        name = whole.inputs[0].name
        runner, inputs = bound(model.task, whole, {name: inputs, **shared}, model.postprocess)
        outputs = engine_outputs(runner, model.preprocess, inputs[:1])
        count = max(1, min(len(inputs), GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
        seen = min(len(inputs), max(count, 2))  # of one sample nothing shows how the answers to others would do
        if seen > 1:
            outputs = engine_outputs(runner, model.preprocess, inputs[:seen])
    asked = job.budget.min_agreement
    least = least_same(count, GUARD[model.task] if asked is None else asked)
    reading = model.task, model.preprocess, model.postprocess
    first = {name: array[:count] for name, array in outputs.items()}
    unrelated = {name: np.roll(array, 1, axis=0)[:count] for name, array in outputs.items()}
    by_chance = count_same(*reading, unrelated, first)
    answers = {}
    for engine, folder in engines:
        with make_runner(folder, engine) as whole:
            runner, _ = bound(model.task, whole, {name: inputs, **shared}, model.postprocess)
            found = engine_outputs(runner, model.preprocess, inputs[:seen])
        names = list(found) if model.postprocess is None else model.postprocess.comparable(found)
        varies = changes_between(found, [name for name in names if found[name].dtype.kind not in "iu"])
        found = {name: array[:count] for name, array in found.items()}
        same = count_same(*reading, found, first)
        # One that was proven on all evaluation samples may have more of its differences among the golden ones.
        wanted = min(least, same) if gates[engine.artifact] == "pass" else least
        bound_of = _tolerance(engine.precision, varies)
        nothing = None if bound_of is not None or 2 * by_chance <= wanted else _nothing(varies, by_chance, count)
        answers[engine.artifact] = GoldenAnswers(found, bound_of or TOLERANCE[engine.precision], wanted, nothing)
    return Golden({name: inputs[:count], **shared}, first, answers)


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
