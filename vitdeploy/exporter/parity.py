"""Is the graph the same function as the model? Run both at three batch sizes and compare."""

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

# It imports torch; what compares engines needs none.
ties = lazy("vitdeploy.exporter.ties")

BATCHES = (1, 2, 5)
TOLERANCE = 1e-4
# What an output has to change by from input to input, of its largest, for the tolerance to tell two models apart.
LEAST_CHANGE = 10 * TOLERANCE
_MANY_QUERIES = 100
_OTHER_KEYS = 1e-2  # what two keys of many that are others change in the answers of all others
SEED = 0
TIED = (
    "scores by which the model chooses its queries are equal up to rounding: the export was compared for the same "
    "choice, and on the same image another runtime may choose, and find, others"
)
FREE_BATCH = (
    "in the model, take the batch from x.shape[0] or len(x): int(x.shape[0]) and TorchScript make a plain number of "
    "it; or export with a fixed --batch"
)


@dataclass(frozen=True)
class ParityRow:
    """max|a - b| / max|b|, the worst of all outputs, of the exported graph on ONNX Runtime and the original, at one
    batch size; of sequences also with what length of the source, and after how many steps; of one of several graphs its
    name. `unproven`: outputs that are all but the same for all inputs, of which the difference proves nothing. `tied`:
    scores tie by which the model chooses its queries; compared is what both give for the same choice."""

    batch: int
    max_relative_difference: float
    source_length: int | None = field(default=None, metadata=SPARSE)
    steps: int | None = field(default=None, metadata=SPARSE)
    graph: str | None = field(default=None, metadata=SPARSE)
    unproven: tuple[str, ...] | None = field(default=None, metadata=SPARSE)
    tied: bool | None = field(default=None, metadata=SPARSE)

    def facts(self) -> dict[str, Any]:
        """The row of export.json: without what such a graph does not have."""
        return {key: value for key, value in vars(self).items() if value is not None or key in ("unproven", "tied")}


@dataclass(frozen=True)
class ReferenceAnswers:
    """uint8 pixels [batch, height, width, channels], what the original gives for them, by output, the indices that its
    `torch.topk` took, and what each image brought besides its pixels, [batch, ...] by name."""

    pixels: npt.NDArray[np.uint8]
    outputs: Mapping[str, np.ndarray]
    choices: Sequence[np.ndarray] = ()
    further: Mapping[str, np.ndarray] = field(default_factory=dict)


def ask(reference: Runner, preprocess: PreprocessSpec, fixed_batch: int | None) -> list[ReferenceAnswers]:
    """What the original, loaded, gives for seeded random pixels, so that it can go before the graph is loaded: at batch
    1, 2 and 5; of a fixed batch thrice at that batch, for other pixels.

    Raises:
        ExportError: the original itself does not run at a batch, or gives two answers to the same images; or an input
            that each image brings changes nothing.
    """
    generator = np.random.default_rng(SEED)
    (image, *others), (height, width), asked = reference.inputs, preprocess.crop, list[ReferenceAnswers]()
    for batch in BATCHES if fixed_batch is None else (fixed_batch,) * len(BATCHES):
        pixels = generator.integers(0, 256, (batch, height, width, preprocess.channels), dtype=np.uint8)
        brought = random_inputs(others, batch, len(asked))
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
        asked.append(ReferenceAnswers(pixels, outputs, choices.taken, brought))
    refuse_two_answers(reference.infer(_feed(image, asked[0], preprocess)), asked[0].outputs)
    for tensor in others:
        changes = (
            worst_difference(
                reference.infer(
                    {**_feed(image, each, preprocess), **random_inputs([tensor], len(each.pixels), number + 1)}
                ),
                each.outputs,
            )
            for number, each in enumerate(asked)
        )
        if not any(change > 0 for change in changes):
            raise ExportError(
                f"the answers do not depend on the input {tensor.name}, which each image is to bring",
                found="the same outputs for other values of it",
                expected="an input that changes something",
                fix=f"bind it to a value: --bind {tensor.name}=VALUE (source.bind in a recipe)",
            )
    return asked


def _feed(tensor: TensorSpec, asked: ReferenceAnswers, preprocess: PreprocessSpec) -> dict[str, np.ndarray]:
    pixels = asked.pixels if tensor.dtype == "uint8" else normalise(asked.pixels, preprocess)
    return {tensor.name: pixels, **asked.further}


def refuse_two_answers(second: Mapping[str, np.ndarray], first: Mapping[str, np.ndarray]) -> None:
    """Raise ExportError if the original's answers to the same images are not the same."""
    apart = worst_difference(second, first)
    if apart > TOLERANCE:
        raise ExportError(
            "the original gives two answers to the same image",
            found=f"max|a-b| / max|b| = {apart:.2e}",
            expected="one answer",
            fix="a model that draws random numbers when it runs (dropout, torch.rand) has no one answer: take that out",
        )


def check_graph(graph: Path, asked: Sequence[ReferenceAnswers], preprocess: PreprocessSpec) -> list[ParityRow]:
    """Compare the ONNX file with what the original gave.

    Raises:
        ExportError: a batch that does not run (a batch baked into a constant), or a difference above 1e-4.
    """
    with OnnxRuntimeRunner(graph, name="the exported graph") as runner:
        feeds = [_feed(runner.inputs[0], each, preprocess) for each in asked]
        rows = _rows(runner, feeds, [each.outputs for each in asked])
    if not all(row.max_relative_difference <= TOLERANCE for row in rows) and asked[0].choices:
        rows = _at_the_choice(graph, asked, feeds, rows)
    _refuse_different(rows)
    return rows


def check_outputs(
    graph: Path, feeds: Sequence[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]], name: str
) -> list[ParityRow]:
    """The same of a graph of any inputs: each of `feeds` has inputs, and what the original gives for them."""
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
    graph: Path, asked: Sequence[ReferenceAnswers], feeds: Sequence[Mapping[str, np.ndarray]], rows: list[ParityRow]
) -> list[ParityRow]:
    """The rows of what the graph gives for the choices that the original made among scores; `rows` where it would make
    others though nothing ties."""
    answers = ties.answers_of_choices(graph, feeds, [each.choices for each in asked], TOLERANCE)
    if answers is None:
        return rows
    worst = [worst_difference(ours, each.outputs) for ours, each in zip(answers, asked, strict=True)]
    return [replace(row, max_relative_difference=apart, tied=True) for row, apart in zip(rows, worst, strict=True)]


def _refuse_different(rows: Sequence[ParityRow]) -> None:
    worst = rows[int(np.argmax([row.max_relative_difference for row in rows]))]  # a NaN, where there is one
    if not worst.max_relative_difference <= TOLERANCE:
        raise ExportError(
            "the exported graph is not the same function as the original",
            found=f"max|a-b| / max|b| = {worst.max_relative_difference:.2e} at batch {worst.batch}",
            expected=f"at most {TOLERANCE:.0e}",
            fix="bring an ONNX file that was exported another way, and report it please",
        )


def all_but_constant(answers: Sequence[Mapping[str, np.ndarray]]) -> tuple[str, ...] | None:
    """The outputs [batch, ...] that change by less than `LEAST_CHANGE` of their largest from one input to another: the
    tolerance takes any model for the original that has the same constants. None of no output."""
    found = [name for name in answers[0] if _change([each[name] for each in answers]) < LEAST_CHANGE]
    return tuple(found) or None


def unproven_told(parity: Sequence[Mapping[str, Any]], pair: tuple[str, str] = ("export", "original")) -> list[str]:
    """A sentence each on the `unproven` outputs and on ties in the rows of export.json, if there are any. `pair`: what
    was compared with what."""
    names = ", ".join(dict.fromkeys(name for row in parity for name in row.get("unproven") or ()))
    ours, theirs = pair
    told = f"that the {ours} computes {names} as the {theirs} does is not shown: all inputs give all but the same there"
    tied = [TIED] if any(row.get("tied") for row in parity) else []
    return [told, *tied] if names else tied


def _change(arrays: Sequence[np.ndarray]) -> float:
    """Of outputs of several shapes the most that those of one shape change."""
    shapes = {each.shape[1:] for each in arrays}
    rows = [np.concatenate([each for each in arrays if each.shape[1:] == shape]) for shape in shapes]
    largest = max(float(np.abs(each.astype(np.float64)).max(initial=0.0)) for each in rows)
    spans = (each.max(axis=0).astype(np.float64) - each.min(axis=0) for each in rows)
    return max(float(span.max(initial=0.0)) for span in spans) / max(largest, float(np.finfo(np.float64).tiny))


def compare_graphs(before: Path, after: Path) -> tuple[float, tuple[str, ...] | None]:
    """max|a - b| / max|b| of all outputs of two graphs with the same inputs, on ONNX Runtime and two sets of seeded
    random inputs; and the outputs of which that proves nothing, as `all_but_constant` names them.

    Raises:
        ExportError: other inputs or outputs, or a difference above 1e-4.
    """
    with OnnxRuntimeRunner(after, name="the graph after", external=before.name) as runner:
        # Of its inputs: the graph before may leave sizes open that this one has.
        feeds, outputs = [_random_feeds(runner.inputs, seed) for seed in (SEED, SEED + 1)], runner.outputs
        ours = [runner.infer(feed) for feed in feeds]
    with OnnxRuntimeRunner(before, name="the graph before", external=before.name) as runner:
        if [tensor.name for tensor in runner.outputs] != [tensor.name for tensor in outputs]:
            raise ExportError("the rewritten graph has other outputs", found=str(outputs), expected=str(runner.outputs))
        theirs = [runner.infer(feed) for feed in feeds]
    worst = float(np.max([worst_difference(*answers) for answers in zip(ours, theirs, strict=True)]))
    if not worst <= TOLERANCE:
        raise ExportError(
            "the rewritten graph is not the same function as the graph before",
            found=f"max|a-b| / max|b| = {worst:.2e}",
            expected=f"at most {TOLERANCE:.0e}",
            fix="leave out the rewrite that does it (--without), and report it please",
        )
    return worst, all_but_constant(theirs)


def _random_feeds(inputs: Sequence[TensorSpec], seed: int) -> dict[str, np.ndarray]:
    """Arrays for any inputs; an axis of one name has one size everywhere. Token numbers are 0 and 1, which all have."""
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
    """max|a - b| / max|b|, the worst of all outputs; NaN where any has one.

    What a detector finds is a set: a rounding error swaps two objects whose scores differ by less, whether the graph
    ranks them ("labels", "boxes" and "scores") or chooses its queries ("logits" and "boxes"). So each object is
    compared with the nearest of the other side, whatever its rank.
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
    """Each object against the nearest one of its label. One that the other side has not counts by how far its score
    lies above the lowest score there: of objects with nearly that score any may be the last."""
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
    """Each query against the one with the nearest logits and box.

    A rounding error also swaps the last cell that becomes a query with the first that does not; or two cells, where
    each rank has learned a query of its own (RF-DETR). Then one or two queries are others, and all others see keys
    that are others: such an image is left out where the batch has one without.
    """
    scales = {name: max(float(np.abs(b).max()), float(np.finfo(np.float32).tiny)) for name, b in reference.items()}
    images = [_of_queries(ours, reference, scales, index) for index in range(len(reference["logits"]))]
    comparable = [worst for worst, most in images if not (worst > TOLERANCE and most <= _OTHER_KEYS)]
    return float(np.max(comparable or [worst for worst, _ in images]))


def _of_queries(
    ours: Mapping[str, np.ndarray], reference: Mapping[str, np.ndarray], scales: Mapping[str, float], index: int
) -> tuple[float, float]:
    """The largest difference of a query of one image, and that of all but two; of few queries the largest twice."""
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
    """max|a_i - b_j| over the last axis, [n, n]."""
    columns = zip(np.moveaxis(a, -1, 0), np.moveaxis(b, -1, 0), strict=True)
    found = np.zeros((len(a), len(b)))
    for mine, theirs in columns:
        np.maximum(found, np.abs(mine[:, None].astype(np.float64) - theirs[None]), out=found)
    return found


def relative_difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """max|a - b| / max|b|, in float64; NaN where either has one. Of what is no float, the share of elements that are
    not equal: an index has no distance, and one that rounding moves is not far off."""
    if reference.dtype.kind not in "fc":
        return float((ours != reference).mean())
    difference = np.abs(ours.astype(np.float64) - reference.astype(np.float64)).max()
    return float(difference / max(np.abs(reference.astype(np.float64)).max(), np.finfo(np.float64).tiny))


def _baked(batch: int, found: str) -> ExportError:
    return ExportError(
        f"the exported graph does not run at batch {batch}: a batch is baked into a constant of the graph",
        found=found,
        expected="every batch size",
        fix=FREE_BATCH,
    )
