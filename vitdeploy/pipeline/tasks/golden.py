"""The golden set of a bundle: a few inputs with the original's outputs, to check an engine wherever it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from vitdeploy.bundle.write import Golden
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.origin import reference_runner
from vitdeploy.runtime.preprocess import normalise

GOLDEN_SAMPLES = 8
# Masks of a panoptic model are large: fewer samples then, so that a bundle stays small beside its engines.
GOLDEN_BYTES = 16 << 20


def golden_of(job: Job, differences: Mapping[str, float]) -> Golden:
    """The first evaluation samples; the tolerance of a target is twice the difference that was measured on all."""
    inputs = job.kit.golden_inputs(job.data, min(GOLDEN_SAMPLES, len(job.data.evaluation)))
    with reference_runner(job.origin.source) as runner:
        name = runner.inputs[0].name
        fed = inputs if job.origin.preprocess is None else normalise(inputs, job.origin.preprocess)
        outputs = runner.infer({name: fed[:1]})
        count = max(1, min(len(inputs), GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
        if count > 1:
            outputs = runner.infer({name: fed[:count]})
    tolerance = {target: 2 * difference for target, difference in differences.items()}
    return Golden({name: inputs[:count]}, outputs, tolerance)
