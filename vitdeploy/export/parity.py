"""Is the graph the same function as the model? Run both at three batch sizes and compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import PreprocessSpec, TensorSpec

BATCHES = (1, 2, 5)
TOLERANCE = 1e-4
SEED = 0
FREE_BATCH = (
    "in the model, take the batch from x.shape[0]: len(x), int(x.shape[0]) and TorchScript make a plain number of it; "
    "or export with a fixed --batch"
)


@dataclass(frozen=True)
class Parity:
    """max|a - b| / max|b|, the worst of all outputs, of one batch; a the graph on ONNX Runtime, b the original."""

    batch: int
    max_relative_difference: float


@dataclass(frozen=True)
class Asked:
    """uint8 pixels [batch, height, width, channels], and what the original gives for them, by output."""

    pixels: npt.NDArray[np.uint8]
    outputs: Mapping[str, np.ndarray]


def check_parity(
    graph: Path, reference: Runner, preprocess: PreprocessSpec, *, fixed_batch: int | None = None
) -> list[Parity]:
    """Compare the ONNX file with the loaded reference on seeded random pixels.

    A graph with a dynamic batch is run at 1, 2 and 5; one with a fixed batch thrice at that batch, on other pixels.

    Raises:
        ExportError: a batch that does not run (a batch baked into a constant), or a difference above 1e-4.
    """
    return check_graph(graph, ask(reference, preprocess, fixed_batch), preprocess)


def ask(reference: Runner, preprocess: PreprocessSpec, fixed_batch: int | None) -> list[Asked]:
    """The first half of `check_parity`: what the original says, so that it can go before the graph is loaded.

    Raises:
        ExportError: the original itself does not run at a batch.
    """
    generator = np.random.default_rng(SEED)
    name, (height, width), asked = reference.inputs[0].name, preprocess.crop, []
    for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
        pixels = generator.integers(0, 256, (batch, height, width, preprocess.channels), dtype=np.uint8)
        try:
            outputs = reference.infer({name: normalise(pixels, preprocess)})
        except Exception as error:  # the user's own module, which may raise anything
            raise ExportError(
                f"the original does not run at batch {batch}",
                found=(str(error).strip().splitlines() or [type(error).__name__])[0][:300],
                wanted="every batch size" if fixed_batch is None else f"batch {batch}",
                fix=FREE_BATCH,
            ) from error
        asked.append(Asked(pixels, outputs))
    return asked


def check_graph(graph: Path, asked: Sequence[Asked], preprocess: PreprocessSpec) -> list[Parity]:
    """The second half of `check_parity`; errors as there."""
    rows = []
    with OnnxRuntimeRunner(graph, name="the exported graph") as runner:
        tensor = runner.inputs[0]
        for each in asked:
            batch, theirs = len(each.pixels), each.outputs
            feed = each.pixels if tensor.dtype == "uint8" else normalise(each.pixels, preprocess)
            try:
                ours = runner.infer({tensor.name: feed})
            except (EngineError, TensorError) as error:
                raise _baked(batch, error.found) from None
            for name, wanted in theirs.items():
                if ours[name].shape != wanted.shape:
                    raise _baked(batch, f"{name} {list(ours[name].shape)}, wanted {list(wanted.shape)}")
            rows.append(Parity(batch, worst_difference(ours, theirs)))
    worst = rows[int(np.argmax([row.max_relative_difference for row in rows]))]  # a NaN, where there is one
    if not worst.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graph is not the same function as the original",
            found=f"max|a-b| / max|b| = {worst.max_relative_difference:.2e} at batch {worst.batch}",
            wanted=f"at most {TOLERANCE:.0e}",
            fix="a model that draws random numbers when it runs (dropout, torch.rand) has no one answer: take that out",
        )
    return rows


def compare_graphs(before: Path, after: Path) -> float:
    """max|a - b| / max|b| of all outputs of two graphs with the same inputs, on ONNX Runtime and seeded random inputs.

    Raises:
        ExportError: other inputs or outputs, or a difference above 1e-4.
    """
    with OnnxRuntimeRunner(after, name="the graph after") as runner:
        # Of its inputs: the graph before may leave sizes open that this one has.
        feeds, outputs = _random_feeds(runner.inputs), runner.outputs
        found = runner.infer(feeds)
    with OnnxRuntimeRunner(before, name="the graph before") as runner:
        if [tensor.name for tensor in runner.outputs] != [tensor.name for tensor in outputs]:
            raise ExportError("the rewritten graph has other outputs", found=str(outputs), wanted=str(runner.outputs))
        wanted = runner.infer(feeds)
    worst = worst_difference(found, wanted)
    if not worst <= TOLERANCE:
        raise ExportError(
            "the rewritten graph is not the same function as the graph before",
            found=f"max|a-b| / max|b| = {worst:.2e}",
            wanted=f"at most {TOLERANCE:.0e}",
            fix="leave out the rewrite that does it (--without), and report it please",
        )
    return worst


def _random_feeds(inputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Arrays for any inputs; an axis of one name has one size everywhere. Token numbers are 0 and 1, which all have."""
    generator = np.random.default_rng(SEED)
    sizes: dict[str, int] = {}
    feeds = {}
    for tensor in inputs:
        shape = [size if isinstance(size, int) else sizes.setdefault(size, 2 + len(sizes)) for size in tensor.shape]
        if tensor.dtype == "uint8":
            feeds[tensor.name] = generator.integers(0, 256, shape, dtype=np.uint8)
        elif np.dtype(tensor.dtype).kind in "iub":
            feeds[tensor.name] = generator.integers(0, 2, shape).astype(tensor.dtype)
        else:
            feeds[tensor.name] = generator.standard_normal(shape).astype(tensor.dtype)
    return feeds


def worst_difference(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """max|a - b| / max|b|, the worst of all outputs; NaN where any has one.

    A detector that ranks its objects in the graph ("labels", "boxes" and "scores") swaps two of them when their scores
    differ by a rounding error. So each object is compared with the nearest one of its label, whatever its rank.
    """
    ranked = {"labels", "boxes", "scores"}
    worst = [relative_difference(ours[name], reference[name]) for name in reference if not ranked <= set(reference)]
    if ranked <= set(reference):
        both = [np.concatenate([each["boxes"], each["scores"][..., None]], axis=-1) for each in (ours, reference)]
        scale = max(float(np.abs(both[1]).max()), float(np.finfo(np.float32).tiny))
        for i in range(len(both[0])):
            apart = np.abs(both[0][i][:, None] - both[1][i][None]).max(axis=-1).astype(np.float64)
            apart[ours["labels"][i][:, None] != reference["labels"][i][None]] = np.inf
            worst += [float(apart.min(axis=axis).max()) / scale for axis in (0, 1)]
    return float(np.max(worst))  # unlike Python's max, it keeps a NaN


def relative_difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """max|a - b| / max|b|, in float64; NaN where either has one."""
    difference = np.abs(ours.astype(np.float64) - reference.astype(np.float64)).max()
    return float(difference / max(np.abs(reference.astype(np.float64)).max(), np.finfo(np.float64).tiny))


def _baked(batch: int, found: str) -> ExportError:
    return ExportError(
        f"the exported graph does not run at batch {batch}: a batch is baked into a constant of the graph",
        found=found,
        wanted="every batch size",
        fix=FREE_BATCH,
    )
