"""Structured pruning with compensation: how many structures to remove from each part of a graph, and which.

Saliencies (below) give the structures to remove from a part, and their order, but do not compare errors of different
parts. So each part alone is tried at a few widths, by the distance of the whole graph's answers. Distances are assumed
to add up, as sensitivities do; the cheapest loss per MAC goes first, in any part (greedy on the lower convex hulls,
which is optimal for such sums up to one step: Everett 1963, Operations Research 11).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis import prunable, work
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.io.files import load_graph
from vitdeploy.graph.passes.tokens import prune
from vitdeploy.progress import Progress
from vitdeploy.quantization.ranges import Numbers, Statistics
from vitdeploy.search.frame import Expected, Reached, ReferenceOutputs, counted

# Shares of a part's structures to try, until one changes the answers by more than WORST.
SHARES, WORST = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8), 0.2
# Widths are multiples of the channels that integer kernels process at once; coarser ones for many channels.
TILE, FEW, FEW_TILE = 32, 256, 16
# Shares of all MACs that a search tries to remove.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
# The rows of its input per channel that a part needs: with fewer, least squares depends on chance.
ROWS_PER_CHANNEL = 3

Widths = Mapping[str, int]


@dataclass(frozen=True)
class PrunedPart:
    """The structures before the linear `name`: their number, the MACs of each, the order of removal, and the distance
    of the graph's answers with `widths` of them and all other parts whole."""

    name: str
    kind: str
    count: int
    macs: int
    order: tuple[int, ...]
    widths: tuple[int, ...]
    distances: tuple[float, ...]

    def kept(self, width: int) -> list[int]:
        """The structures to keep, ascending."""
        return sorted(set(range(self.count)) - set(self.order[: self.count - width]))


@dataclass(frozen=True)
class Parts:
    """The parts of a graph that can be pruned, and its `macs` at batch 1."""

    macs: int
    parts: tuple[PrunedPart, ...]


@dataclass(frozen=True)
class Pruning:
    """`asked`: the minimum share of all MACs to remove; `share`: the removed share. `widths`: the remaining structures
    of each pruned part. `distance`: from the float graph's answers, mean over the images; `expected`: for a classifier,
    else None."""

    asked: float
    share: float
    widths: dict[str, int]
    distance: float
    expected: Expected | None


def prunable_parts(model: ir.Model) -> dict[str, tuple[prunable.Prunable, int]]:
    """The parts that can be pruned, by name, with the MACs of each structure. Infers missing shapes, in place.

    Raises:
        GraphError: nothing can be pruned, or the work of the graph cannot be counted.
    """
    whole_macs(model)  # infers missing shapes
    found = [(each, each.macs(model)) for each in prunable.find_prunable(model)]
    parts = {each.name: (each, macs) for each, macs in found if macs}
    if not parts:
        raise GraphError(
            "nothing in this graph can be pruned",
            found="no removable hidden channels between two linears, and no removable heads",
            expected="MLPs with elementwise activations, or attention whose operands come from linears",
            fix="omit optimize.prune",
        )
    return parts


def whole_macs(model: ir.Model) -> int:
    """All MACs of a graph at batch 1."""
    return sum(work.count_work(model, 1).flops.values()) // 2


def widths_to_try(part: prunable.Prunable) -> list[int]:
    """Widths below the full one, in descending order, aligned for kernels."""
    tile = 1 if part.kind == "heads" else TILE if part.count >= FEW else FEW_TILE
    widths = {-(-int(np.ceil(share * part.count)) // tile) * tile for share in SHARES}
    return sorted((width for width in widths if 0 < width < part.count), reverse=True)


def measure_parts(
    graph: Path, moments: Mapping[str, Statistics], reference_outputs: ReferenceOutputs, progress: Progress
) -> Parts:
    """Order the structures of every part, and try each part alone.

    Args:
        moments: statistics of the input of each reader, by the name of the part.
        reference_outputs: reference outputs of this graph, on images not used for the moments if enough are available.
    """
    model, made = load_graph(graph), list[PrunedPart]()
    found = prunable_parts(model)
    for name, (part, macs) in counted(list(found.items()), "try to prune each part", progress):
        if moments[name].rows < ROWS_PER_CHANNEL * len(part.reader.weight):
            continue
        order = removal_order(moments[name], part.reader.weight, part.inputs)
        bare = PrunedPart(name, part.kind, part.count, macs, tuple(order), (), ())
        tried = dict(_tried(graph, bare, widths_to_try(part), moments, reference_outputs))
        made.append(PrunedPart(name, part.kind, part.count, macs, tuple(order), tuple(tried), tuple(tried.values())))
    if not made:
        rows = max(moment.rows for moment in moments.values())
        raise GraphError(
            "too few calibration images to prune this graph",
            found=f"{rows} rows of activations",
            expected=f"{ROWS_PER_CHANNEL} rows per input channel of at least one linear",
            fix="use more images: data.calibration.images",
        )
    return Parts(whole_macs(model), tuple(made))


def _tried(
    graph: Path,
    part: PrunedPart,
    widths: Sequence[int],
    moments: Mapping[str, Statistics],
    reference_outputs: ReferenceOutputs,
) -> Iterator[tuple[int, float]]:
    for width in widths:
        distance = _trial(graph, [part], {part.name: width}, moments, reference_outputs).distance
        if not np.isfinite(distance):
            return
        yield width, distance
        if distance > WORST:
            return


def try_prunings(
    graph: Path,
    parts: Parts,
    moments: Mapping[str, Statistics],
    reference_outputs: ReferenceOutputs,
    progress: Progress,
    steps: Sequence[float] = STEPS,
) -> list[Pruning]:
    """Prune the graph by each share of its MACs in `steps`, the smallest first, and measure the answers; stop if a
    share cannot be removed, or changed the answers by more than WORST."""
    prunings: list[Pruning] = []
    for done, step in enumerate(steps):
        progress("try to prune the graph", done, len(steps))
        widths = allocate(parts, step)
        if widths is None:
            break
        if prunings and prunings[-1].widths == widths:
            continue
        reached = _trial(graph, parts.parts, widths, moments, reference_outputs)
        distance = reached.distance
        if not np.isfinite(distance):
            break
        prunings.append(Pruning(step, saved(parts, widths), widths, distance, reached.expected))
        if distance > WORST:
            break
    progress("try to prune the graph", len(steps), len(steps))
    return prunings


def allocate(parts: Parts, share: float) -> dict[str, int] | None:
    """The width of each part to prune so that at least `share` of all MACs is removed; None if that is impossible."""
    widths: dict[str, int] = {}
    steps = sorted((step for part in parts.parts for step in _hull(part)), key=lambda step: step[0])
    for _, name, width in steps:
        if saved(parts, widths) >= share:
            break
        widths[name] = width
    return widths if saved(parts, widths) >= share else None


def saved(parts: Parts, widths: Widths) -> float:
    """The share of all MACs that is removed."""
    gone = sum(part.macs * (part.count - widths[part.name]) for part in parts.parts if part.name in widths)
    return gone / parts.macs


def _hull(part: PrunedPart) -> Iterator[tuple[float, str, int]]:
    """(distance per MAC, name, width) of each step down the lower convex hull of a part, in ascending order."""
    points = [(0.0, 0.0, part.count)]
    for width, distance in zip(part.widths, part.distances, strict=True):
        points.append((float(part.macs * (part.count - width)), distance, width))
    at = 0
    while at < len(points) - 1:
        slopes = [(later[1] - points[at][1]) / (later[0] - points[at][0]) for later in points[at + 1 :]]
        # The last of equal slopes, so that the next slope is larger.
        best = len(slopes) - 1 - int(np.argmin(slopes[::-1]))
        at += 1 + best
        yield slopes[best], part.name, points[at][2]


def select(prunings: Sequence[Pruning], acceptable: Callable[[Pruning], bool], near: float) -> list[Pruning]:
    """Among acceptable prunings, the largest with at most the distance `near`, and the largest."""
    found = sorted((pruning for pruning in prunings if acceptable(pruning)), key=lambda each: each.share)
    chosen = [each for each in found if each.distance <= near][-1:] + found[-1:]
    return chosen[:1] if chosen[1:] == chosen[:1] else chosen


def prune_graph(
    model: ir.Model, parts: Sequence[PrunedPart], widths: Widths, moments: Mapping[str, Statistics]
) -> None:
    """Prune a graph in place; the remaining channels compensate for the removed ones."""
    editor, known = Editor(model), {each.name: each for each in prunable.find_prunable(model)}
    for part in parts:
        if part.name not in widths:
            continue
        found, kept = known[part.name], part.kept(widths[part.name])
        channels = np.sort(found.inputs[kept].ravel())
        weight, bias = compensated(moments[part.name], found.reader.weight, found.reader.bias, channels)
        prune(editor, found, kept, weight, bias)
    drop_unused(model)


def _trial(
    graph: Path,
    parts: Sequence[PrunedPart],
    widths: Widths,
    moments: Mapping[str, Statistics],
    reference_outputs: ReferenceOutputs,
) -> Reached:
    model = load_graph(graph)
    prune_graph(model, parts, widths, moments)
    return reference_outputs.reached(reference_outputs.of_float(model))


# --- The input channels of a linear to remove, and the compensation by the others -------------------------------------
# Second-order saliency and least squares.
#
# For y = x W + b with the covariance C of x, the best y from the channels K alone has the weight and bias
#
#     V = (C_KK)^-1 C_K: W        b + m W - m_K V        m: the mean of x
#
# and the remaining mean squared error is, for the removed channels S, tr(W_S^T ((C^-1)_SS)^-1 W_S): the saliency of the
# Optimal Brain Surgeon (Hassibi and Stork 1993, equation 5) for a whole structure (Optimal BERT Surgeon, arXiv
# 2203.07259, equation 3; SlimGPT, arXiv 2412.18110; ZipLM, arXiv 2302.04089). Structures are removed one by one, the
# cheapest first, and C^-1 and W are updated for the remaining ones.


Weight = npt.NDArray[np.floating]

# A share of the mean variance that is added to each variance, so that redundant channels do not get unbounded weights.
DAMPING = 0.01
# The number of removed channels after which the whole inverse is updated.
BLOCK = 64
TINY = float(np.finfo(np.float64).tiny)


def damped(moments: Statistics) -> Numbers:
    """The damped covariance of the input of a linear, [in, in]."""
    covariance = moments.covariance.astype(np.float64)
    power = float(np.diag(covariance).mean())
    return np.asarray(covariance + DAMPING * max(power, TINY) * np.eye(len(moments.mean)))


def removal_order(moments: Statistics, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    """The indices of the structures in the order of removal, all except the last one.

    Args:
        weight: [in, out].
        structures: the input channels of each, [structures, channels of each].
    """
    inverse = np.asarray(np.linalg.inv(damped(moments)), np.float64)
    single = structures.shape[1] == 1
    return _channels(inverse, weight, structures[:, 0]) if single else _blocks(inverse, weight, structures)


def compensated(
    moments: Statistics, weight: Weight, bias: Weight | None, kept: npt.NDArray[np.int64]
) -> tuple[Numbers, Numbers]:
    """(weight [kept, out], bias [out]) of the linear with the smallest error that reads only the channels `kept`.

    The damping pulls towards the original weights: if it dominates, only the bias changes.
    """
    covariance, old = damped(moments), weight.astype(np.float64)
    new = np.asarray(np.linalg.solve(covariance[np.ix_(kept, kept)], covariance[kept] @ old), np.float64)
    moved = moments.mean @ old - moments.mean[kept] @ new
    return new, moved if bias is None else bias + moved


def _blocks(inverse: Numbers, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    weight, left, order = weight.astype(np.float64), list(range(len(structures))), list[int]()
    while len(left) > 1:
        costs = []
        for each in left:
            own = structures[each]
            costs.append(float(np.sum(weight[own] * np.linalg.solve(inverse[np.ix_(own, own)], weight[own]))))
        gone = left.pop(int(np.argmin(costs)))
        order.append(gone)
        own = structures[gone]
        spread = np.linalg.solve(inverse[np.ix_(own, own)], inverse[own]).T
        weight = weight - spread @ weight[own]
        inverse = inverse - spread @ inverse[own]
    return order


def _channels(inverse: Numbers, weight: Weight, channels: npt.NDArray[np.int64]) -> list[int]:
    """The order of removal for structures of a single channel, at the cost of one matrix product per BLOCK of them.

    Within a block of removals C^-1 and W stay unchanged; `spread` and `taken` hold the pending updates:
    C^-1 - spread spread^T and W - spread taken.
    """
    inverse, weight = inverse[np.ix_(channels, channels)], weight[channels].astype(np.float64)
    left, order = np.arange(len(channels)), list[int]()
    while len(left) > 1:
        block = min(BLOCK, len(left) - 1)
        spread, taken = np.zeros((len(left), block)), np.zeros((block, weight.shape[1]))
        diagonal, squares = np.diag(inverse).copy(), np.einsum("ij,ij->i", weight, weight)
        alive = np.ones(len(left), bool)
        for i in range(block):
            gone = int(np.where(alive, squares / np.where(alive, diagonal, 1), np.inf).argmin())
            column = inverse[:, gone] - spread[:, :i] @ spread[gone, :i]
            row = weight[gone] - spread[gone, :i] @ taken[:i]
            root = np.sqrt(column[gone])
            spread[:, i], taken[i] = column / root, row / root
            share = column / column[gone]
            product = weight @ row - spread[:, :i] @ (taken[:i] @ row)
            squares = np.maximum(squares - 2 * share * product + share**2 * (row @ row), 0)
            diagonal = diagonal - spread[:, i] ** 2
            alive[gone] = False
            order.append(int(left[gone]))
        stays = np.flatnonzero(alive)
        inverse = inverse[np.ix_(stays, stays)] - spread[stays] @ spread[stays].T
        weight, left = weight[stays] - spread[stays] @ taken, left[stays]
    return order
