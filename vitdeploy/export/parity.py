"""Is the graph the same function as the model? Run both at three batch sizes and compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import PreprocessSpec

BATCHES = (1, 2, 5)
TOLERANCE = 1e-4
SEED = 0


@dataclass(frozen=True)
class Parity:
    """max|a - b| / max|b| over the outputs of one batch; a the graph on ONNX Runtime, b the PyTorch model."""

    batch: int
    max_relative_difference: float


def check_parity(
    graph: Path, reference: Runner, preprocess: PreprocessSpec, *, fixed_batch: int | None = None
) -> list[Parity]:
    """Compare the ONNX file with the loaded reference on seeded random pixels.

    A graph with a dynamic batch is run at 1, 2 and 5; one with a fixed batch thrice at that batch, on other pixels.

    Raises:
        ExportError: a batch that does not run (a batch baked into a constant), or a difference above 1e-4.
    """
    generator = np.random.default_rng(SEED)
    rows = []
    with OnnxRuntimeRunner(graph, name="the exported graph") as runner:
        tensor = runner.inputs[0]
        for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
            height, width = preprocess.crop
            pixels = generator.integers(0, 256, (batch, height, width, preprocess.channels), dtype=np.uint8)
            floats = normalise(pixels, preprocess)
            try:
                ours = runner.infer({tensor.name: pixels if tensor.dtype == "uint8" else floats})
            except (EngineError, TensorError) as error:
                raise _baked(batch, error.found) from None
            theirs = reference.infer({reference.inputs[0].name: floats})[reference.outputs[0].name]
            result = ours[runner.outputs[0].name]
            if result.shape != theirs.shape:
                raise _baked(batch, f"output {list(result.shape)}, wanted {list(theirs.shape)}")
            rows.append(Parity(batch, relative_difference(result, theirs)))
    worst = max(rows, key=lambda row: row.max_relative_difference)
    if not worst.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graph is not the same function as the PyTorch model",
            found=f"max|a-b| / max|b| = {worst.max_relative_difference:.2e} at batch {worst.batch}",
            wanted=f"at most {TOLERANCE:.0e}",
        )
    return rows


def relative_difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """max|a - b| / max|b|, in float64; NaN where either has one."""
    difference = np.abs(ours.astype(np.float64) - reference.astype(np.float64)).max()
    return float(difference / max(np.abs(reference.astype(np.float64)).max(), np.finfo(np.float64).tiny))


def _baked(batch: int, found: str) -> ExportError:
    return ExportError(
        f"the exported graph does not run at batch {batch}: a batch is baked into a constant of the graph",
        found=found,
        wanted="every batch size",
        fix="in the model, take sizes from the tensor, or export with a fixed --batch",
    )
