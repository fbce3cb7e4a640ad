"""The golden set of a bundle: a few inputs with the outputs of the original and of every engine, to check an engine
wherever it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from vitdeploy.bundle.write import GOLDEN_BYTES, Golden, GoldenAnswers
from vitdeploy.pipeline.job import Job
from vitdeploy.runtime.answers import bound, count_same
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs
from vitdeploy.spec import EngineSpec, GateStatus
from vitdeploy.stages.reference_model import reference_runner
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
# How seldom an engine that gives as many of the original's answers as it must is to fail on a few golden ones.
FALSE_ALARM = 0.01


def golden_of(job: Job, engines: Sequence[tuple[EngineSpec, Path]], gates: Mapping[str, GateStatus]) -> Golden:
    """The first evaluation samples, with the answers of the original and of every engine of the bundle."""
    inputs = job.adapter.golden_inputs(job.data, min(GOLDEN_SAMPLES, len(job.data.evaluation)))
    shared, model = job.adapter.shared_golden(job.data), job.reference_model
    with reference_runner(model.source) as whole:
        name = whole.inputs[0].name
        runner, inputs = bound(model.task, whole, {name: inputs, **shared}, model.postprocess)
        outputs = engine_outputs(runner, job.reference_model.preprocess, inputs[:1])
        count = max(1, min(len(inputs), GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
        if count > 1:
            outputs = engine_outputs(runner, job.reference_model.preprocess, inputs[:count])
    asked = job.budget.min_agreement
    least = least_same(count, GUARD[job.reference_model.task] if asked is None else asked)
    answers = {}
    for engine, folder in engines:
        with make_runner(folder, engine) as whole:
            runner, _ = bound(model.task, whole, {name: inputs, **shared}, model.postprocess)
            found = engine_outputs(runner, job.reference_model.preprocess, inputs[:count])
        same = count_same(
            job.reference_model.task, job.reference_model.preprocess, job.reference_model.postprocess, found, outputs
        )
        # One that was proven on all evaluation samples may have more of its differences among the golden ones.
        wanted = min(least, same) if gates[engine.artifact] == "pass" else least
        answers[engine.artifact] = GoldenAnswers(found, TOLERANCE[engine.precision], wanted)
    return Golden({name: inputs[:count], **shared}, outputs, answers)


def least_same(count: int, agreement: float) -> int:
    """The least number of equal answers among `count` that an engine with `agreement` percent gives in 99 of 100 cases
    (binomial)."""
    p = 1 - agreement / 100
    chances = [math.comb(count, k) * p**k * (1 - p) ** (count - k) for k in range(count + 1)]
    others = next((k for k in range(count + 1) if sum(chances[k + 1 :]) < FALSE_ALARM), count)
    return count - others
