"""Compare the exported graph with the model: run both at three batch sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.extensions import lazy
from vitdeploy.runtime.inputs import random_inputs
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import SPARSE, PreprocessSpec, TensorSpec

# It imports torch, which comparing engines does not need.
ties = lazy("vitdeploy.exporter.ties")

BATCHES = (1, 2, 5)
TOLERANCE = 1e-4
# Minimum change of an output between inputs, relative to its largest value, for the tolerance to separate two models.
LEAST_CHANGE = 10 * TOLERANCE
_MANY_QUERIES = 100
_OTHER_KEYS = 1e-2  # the effect of two different keys among many on the outputs of all other queries
SEED = 0
TIED = (
    "the model selects its queries by scores that are equal up to rounding: the export was compared for the same "
    "selection; on the same image, another runtime may select other queries and return other objects"
)
FREE_BATCH = (
    "in the model, take the batch from x.shape[0] or len(x): int(x.shape[0]) and TorchScript turn it into a constant; "
    "or export with a fixed --batch"
)


@dataclass(frozen=True)
class ParityRow:
    """max|a - b| / max|b|, the worst over all outputs, between the exported graph on ONNX Runtime and the original, at
    one batch size; for sequences also the source length and the number of steps; for one of several graphs its name.
    `unproven`: outputs that are almost the same for all inputs, so that their difference proves nothing. `tied`: the
    scores that select queries are tied; outputs are compared for the same selection."""

    batch: int
    max_relative_difference: float
    source_length: int | None = field(default=None, metadata=SPARSE)
    steps: int | None = field(default=None, metadata=SPARSE)
    graph: str | None = field(default=None, metadata=SPARSE)
    unproven: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
    tied: bool | None = field(default=None, metadata=SPARSE)

    def facts(self) -> dict[str, Any]:
        """Return the row for export.json, without fields that do not apply."""
        return {key: value for key, value in vars(self).items() if value is not None or key in ("unproven", "tied")}


@dataclass(frozen=True)
class ReferenceAnswers:
    """uint8 pixels [batch, height, width, channels], the original's outputs for them by name, the indices that its
    `torch.topk` returned, and the further inputs of each image, [batch, ...] by name."""

    pixels: npt.NDArray[np.uint8]
    outputs: Mapping[str, np.ndarray]
    choices: Sequence[np.ndarray] = ()
    further: Mapping[str, np.ndarray] = field(default_factory=dict)


def ask(reference: Runner, preprocess: PreprocessSpec, fixed_batch: int | None) -> list[ReferenceAnswers]:
    """Run the loaded original on seeded random pixels, so that it can be closed before the graph is loaded: at batch 1,
    2 and 5, or three times at a fixed batch, each time with other pixels.

    Raises:
        ExportError: the original does not run at a batch, or gives two different results for the same images; or a
            per-image input has no effect.
    """
    generator = np.random.default_rng(SEED)
    (image, *others), (height, width), answers = reference.inputs, preprocess.crop, list[ReferenceAnswers]()
    for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
        pixels = generator.integers(0, 256, (batch, height, width, preprocess.channels), dtype=np.uint8)
        brought = random_inputs(others, batch, len(answers))
        try:
            with ties.Choices() as choices:
                outputs = reference.infer(_feed(image, ReferenceAnswers(pixels, {}, further=brought), preprocess))
        except Exception as error:  # the user's own module, which may raise anything
            raise ExportError(
                f"the original does not run at batch {batch}",
                found=(str(error).strip().splitlines() or [type(error).__name__])[0][:300],
                expected="every batch size" if fixed_batch is None else f"batch {batch}",
                fix=FREE_BATCH,
            ) from error
        answers.append(ReferenceAnswers(pixels, outputs, choices.taken, brought))
    refuse_two_answers(reference.infer(_feed(image, answers[0], preprocess)), answers[0].outputs)
    for tensor in others:
        changes = (
            worst_difference(
                reference.infer(
                    {**_feed(image, each, preprocess), **random_inputs([tensor], len(each.pixels), number + 1)}
                ),
                each.outputs,
            )
            for number, each in enumerate(answers)
        )
        if not any(change > 0 for change in changes):
            raise ExportError(
                f"the outputs do not depend on the per-image input {tensor.name}",
                found="the same outputs for other values of it",
                expected="outputs that change with it",
                fix=f"bind it to a value: --bind {tensor.name}=VALUE (source.bind in a recipe)",
            )
    return answers


def _feed(tensor: TensorSpec, answers: ReferenceAnswers, preprocess: PreprocessSpec) -> dict[str, np.ndarray]:
    pixels = answers.pixels if tensor.dtype == "uint8" else normalise(answers.pixels, preprocess)
    return {tensor.name: pixels, **answers.further}


def refuse_two_answers(second: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> None:
    """Raise ExportError if the original's outputs for the same images differ."""
    apart = worst_difference(second, first)
    if apart > TOLERANCE:
        raise ExportError(
            "the original gives two different results for the same image",
            found=f"max|a-b| / max|b| = {apart:.2e}",
            expected="the same result",
            fix="remove random numbers from the forward pass (dropout, torch.rand)",
        )


def check_graph(graph: Path, asked: Sequence[ReferenceAnswers], preprocess: PreprocessSpec) -> list[ParityRow]:
    """Compare the ONNX file with the outputs of the original.

    Raises:
        ExportError: a batch that does not run (a batch baked into a constant), or a difference above 1e-4.
    """
    with OnnxRuntimeRunner(graph, name="the exported graph") as runner:
        feeds = [_feed(runner.inputs[0], answers, preprocess) for answers in asked]
        rows = _rows(runner, feeds, [each.outputs for each in asked])
    if not all(row.max_relative_difference <= TOLERANCE for row in rows) and asked[0].choices:
        rows = _at_the_choice(graph, asked, feeds, rows)
    _refuse_different(rows)
    return rows


def check_outputs(
    graph: Path, feeds: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]], name: str
) -> list[ParityRow]:
    """Like `check_graph` for a graph with any inputs: each of `feeds` has inputs and the original's outputs."""
    with OnnxRuntimeRunner(graph, name=f"the exported graph {name}") as runner:
        rows = _rows(runner, [inputs for inputs, _ in feeds], [answers for _, answers in feeds], graph=name)
    _refuse_different(rows)
    return rows


def _rows(
    runner: Runner,
    feeds: Sequence[Mapping[str, np.ndarray]],
    answers: Sequence[Mapping[str, np.ndarray]],
    graph: str | None = None,
) -> list[ParityRow]:
    rows, unproven = [], all_but_constant(answers)
    for inputs, theirs in zip(feeds, answers, strict=True):
        batch = len(next(iter(inputs.values())))
        try:
            ours = runner.infer(inputs)
        except (EngineError, TensorError) as error:
            raise _baked(batch, error.found) from None
        for name, expected in theirs.items():
            if ours[name].shape != expected.shape:
                raise _baked(batch, f"{name} {list(ours[name].shape)}, expected {list(expected.shape)}")
        rows.append(ParityRow(batch, worst_difference(ours, theirs), graph=graph, unproven=unproven))
    return rows


def _at_the_choice(
    graph: Path,
    references: Sequence[ReferenceAnswers],
    feeds: Sequence[Mapping[str, np.ndarray]],
    rows: list[ParityRow],
) -> list[ParityRow]:
    """Return the rows of the graph's outputs for the original's selection of queries; `rows` if the graph selects other
    queries although no scores are tied."""
    answers = ties.answers_of_choices(graph, feeds, [reference.choices for reference in references], TOLERANCE)
    if answers is None:
        return rows
    worst = [worst_difference(ours, each.outputs) for ours, each in zip(answers, references, strict=True)]
    return [replace(row, max_relative_difference=apart, tied=True) for row, apart in zip(rows, worst, strict=True)]


def _refuse_different(rows: Sequence[ParityRow]) -> None:
    worst = rows[int(np.argmax([row.max_relative_difference for row in rows]))]  # a NaN, where there is one
    if not worst.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graph is not the same function as the original",
            found=f"max|a-b| / max|b| = {worst.max_relative_difference:.2e} at batch {worst.batch}",
            expected=f"at most {TOLERANCE:.0e}",
            fix="use an ONNX file that was exported another way, and please report this",
        )


def all_but_constant(answers: Sequence[Mapping[str, np.ndarray]]) -> tuple[str, ...] | None:
    """Return the outputs [batch, ...] that change between inputs by less than `LEAST_CHANGE` of their largest value:
    any model with the same constants is within the tolerance. None if all outputs change more."""
    found = [name for name in answers[0] if _change([answer[name] for answer in answers]) < LEAST_CHANGE]
    return tuple(found) or None


def unproven_told(parity: Sequence[Mapping[str, Any]], pair: tuple[str, str] = ("export", "original")) -> list[str]:
    """Return one sentence each on the `unproven` outputs and on ties in the rows of export.json, if there are any.
    `pair`: the names of the two sides compared."""
    names = ", ".join(dict.fromkeys(name for row in parity for name in row.get("unproven") or ()))
    ours, theirs = pair
    sentence = f"agreement of {ours} and {theirs} is not proven for {names}: all inputs give almost the same values"
    tied = [TIED] if any(row.get("tied") for row in parity) else []
    return [sentence, *tied] if names else tied


def _change(arrays: Sequence[np.ndarray]) -> float:
    """Return the largest change among outputs of the same shape."""
    shapes = {array.shape[1:] for array in arrays}
    rows = [np.concatenate([each for each in arrays if each.shape[1:] == shape]) for shape in shapes]
    largest = max(float(np.abs(each.astype(np.float64)).max(initial=0.0)) for each in rows)
    spans = (each.max(axis=0).astype(np.float64) - each.min(axis=0) for each in rows)
    return max(float(span.max(initial=0.0)) for span in spans) / max(largest, float(np.finfo(np.float64).tiny))


def compare_graphs(before: Path, after: Path) -> tuple[float, tuple[str, ...] | None]:
    """Return max|a - b| / max|b| over all outputs of two graphs with the same inputs, on ONNX Runtime and two sets of
    seeded random inputs; and the outputs for which this proves nothing, as named by `all_but_constant`.

    Raises:
        ExportError: different inputs or outputs, or a difference above 1e-4.
    """
    with OnnxRuntimeRunner(after, name="the graph after", external=before.name) as runner:
        # Feeds for this graph's inputs: the graph before may have dynamic sizes that are fixed here.
        feeds, outputs = [_random_feeds(runner.inputs, seed) for seed in (SEED, SEED + 1)], runner.outputs
        ours = [runner.infer(feed) for feed in feeds]
    with OnnxRuntimeRunner(before, name="the graph before", external=before.name) as runner:
        if [tensor.name for tensor in runner.outputs] != [tensor.name for tensor in outputs]:
            raise ExportError("the rewritten graph has other outputs", found=str(outputs), expected=str(runner.outputs))
        theirs = [runner.infer(feed) for feed in feeds]
    worst = float(np.max([worst_difference(*answers) for answers in zip(ours, theirs, strict=True)]))
    if not worst <= TOLERANCE:
        raise ExportError(
            "the rewritten graph is not the same function as the original graph",
            found=f"max|a-b| / max|b| = {worst:.2e}",
            expected=f"at most {TOLERANCE:.0e}",
            fix="exclude the rewrite that causes it (--without), and please report this",
        )
    return worst, all_but_constant(theirs)


def _random_feeds(inputs: Sequence[TensorSpec], seed: int) -> dict[str, np.ndarray]:
    """Return arrays for any inputs; an axis name has the same size everywhere. Token ids are 0 and 1, always valid."""
    generator = np.random.default_rng(seed)
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
    """Return max|a - b| / max|b|, the worst over all outputs; NaN if any output has one.

    Detections are a set: a rounding error swaps two objects whose scores differ by less, whether the graph ranks them
    ("labels", "boxes" and "scores") or selects its queries ("logits" and "boxes"). So each object is compared with the
    nearest one on the other side, whatever its rank.
    """
    ranked = {"labels", "boxes", "scores"}
    if ranked <= set(reference):
        others = [relative_difference(ours[name], reference[name]) for name in reference if name not in ranked]
        return float(np.max([_ranked_difference(ours, reference), *others]))  # unlike Python's max, it keeps a NaN
    worst = float(np.max([relative_difference(ours[name], reference[name]) for name in reference]))
    if worst > TOLERANCE and {"logits", "boxes"} <= set(reference) and reference["logits"].ndim == 3:
        return _query_difference(ours, reference)
    return worst


def _ranked_difference(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Compare each object with the nearest one of its label. An object without a counterpart counts by how far its
    score lies above the lowest score there: among objects with nearly that score, any may be last."""
    both = [np.concatenate([each["boxes"], each["scores"][..., None]], axis=-1) for each in (ours, reference)]
    scale, worst = max(float(np.abs(both[1]).max()), float(np.finfo(np.float32).tiny)), 0.0
    for i in range(len(both[0])):
        apart = np.abs(both[0][i][:, None] - both[1][i][None]).max(axis=-1).astype(np.float64)
        apart[ours["labels"][i][:, None] != reference["labels"][i][None]] = np.inf
        for axis, mine, other in ((1, ours, reference), (0, reference, ours)):
            above = mine["scores"][i].astype(np.float64) - other["scores"][i].min()
            missing = np.minimum(apart.min(axis=axis), np.maximum(above, 0))
            worst = float(np.max([worst, missing.max() / scale]))
    return worst


def _query_difference(ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray]) -> float:
    """Compare each query with the one with the nearest logits and box.

    A rounding error may also swap the last selected cell with the first one not selected; or two cells, if each rank
    has its own learned query (RF-DETR). Then one or two queries differ, and all others attend to different keys: such
    an image is skipped if the batch has one without.
    """
    scales = {name: max(float(np.abs(b).max()), float(np.finfo(np.float32).tiny)) for name, b in reference.items()}
    images = [_of_queries(ours, reference, scales, index) for index in range(len(reference["logits"]))]
    comparable = [worst for worst, most in images if not (worst > TOLERANCE and most <= _OTHER_KEYS)]
    return float(np.max(comparable or [worst for worst, _ in images]))


def _of_queries(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], scales: Mapping[str, float], index: int
) -> tuple[float, float]:
    """Return the largest difference of a query of one image, and the largest without the worst two (with few queries,
    the largest twice)."""
    apart = np.max(
        [_apart(ours[name][index], reference[name][index]) / scales[name] for name in ("logits", "boxes")], 0
    )
    largest = []
    for nearest, mine, theirs in ((apart.argmin(1), ours, reference), (apart.argmin(0), reference, ours)):
        queries = np.zeros(len(nearest))
        for name, scale in scales.items():
            a, b = (each[name][index].astype(np.float64) for each in (mine, theirs))
            queries = np.maximum(queries, np.abs(a - b[nearest]).reshape(len(a), -1).max(axis=1) / scale)
        largest.append(np.sort(queries)[[-1, -3 if len(queries) >= _MANY_QUERIES else -1]])  # a NaN is the last
    worst, most = np.max(largest, axis=0)
    return float(worst), float(most)


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return max|a_i - b_j| over the last axis, [n, n]."""
    columns = zip(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0), strict=True)
    found = np.zeros((len(a), len(b)))
    for mine, theirs in columns:
        np.maximum(found, np.abs(mine[:, None].astype(np.float64) - theirs[None]), out=found)
    return found


def relative_difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """Return max|a - b| / max|b|, in float64; NaN if either has one. For integers and booleans, return the share of
    unequal elements: indices have no distance."""
    if reference.dtype.kind not in "fc":
        return float((ours != reference).mean())
    difference = np.abs(ours.astype(np.float64) - reference.astype(np.float64)).max()
    return float(difference / max(np.abs(reference.astype(np.float64)).max(), np.finfo(np.float64).tiny))


def _baked(batch: int, found: str) -> ExportError:
    return ExportError(
        f"the exported graph does not run at batch {batch}: a batch size is baked into a constant of the graph",
        found=found,
        expected="every batch size",
        fix=FREE_BATCH,
    )
