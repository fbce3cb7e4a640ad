"""The golden set of a bundle: a few inputs with the original's outputs, to check an engine wherever it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from vitdeploy.bundle.write import Golden
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.origin import reference_runner
from vitdeploy.runtime.batches import run_batches
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array

GOLDEN_SAMPLES = 8
# Masks of a panoptic model are large: fewer samples then, so that a bundle stays small beside its engines.
GOLDEN_BYTES = 16 << 20


def golden_of(job: Job, differences: Mapping[str, float]) -> Golden:
    """The first evaluation samples; the tolerance of a target is twice the difference that was measured on all."""
    inputs = job.kit.golden_inputs(job.data, min(GOLDEN_SAMPLES, len(job.data.evaluation)))
    with reference_runner(job.origin.source) as runner:
        [tensor, *_] = runner.inputs
        name, plain = tensor.name, job.origin.preprocess is None or tensor.dtype == "uint8"
        fed = inputs if plain else normalise(inputs, job.origin.images)
        fixed = tensor.shape[0] if isinstance(tensor.shape[0], int) else None

        def answers(count: int) -> dict[str, Array]:
            size = fixed or count
            chunks = [fed[start : min(start + size, count)] for start in range(0, count, size)]
            return run_batches(chunks, fixed, lambda chunk: runner.infer({name: chunk}))

        outputs = answers(1)
        count = max(1, min(len(inputs), GOLDEN_BYTES // max(1, sum(array.nbytes for array in outputs.values()))))
        if count > 1:
            outputs = answers(count)
    tolerance = {target: 2 * difference for target, difference in differences.items()}
    return Golden({name: inputs[:count]}, outputs, tolerance)
