"""Structured pruning with compensation: how much each part of a graph can lose, and who loses how much.

What a part loses, and in which order, its saliencies say (below); they do not say what an error of one part is
worth beside that of another. So each part alone is tried at a few widths, by the distance of the whole graph's answers.
Distances are taken as adding up, as sensitivities do; the cheapest loss per MAC goes first, whatever part it is in
(greedy on the lower convex hulls, which is optimal for such sums up to one step: Everett 1963, Operations Research 11).
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

# Shares of a part's structures that are tried, until one changes answers by more than WORST.
SHARES, WORST = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8), 0.2
# Widths are multiples of what integer kernels take at a time, a coarser one of many channels.
TILE, FEW, FEW_TILE = 32, 256, 16
# Shares of all MACs that a search has go.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
# Rows of its input per channel that a part needs: fewer leave least squares to chance.
ROWS_PER_CHANNEL = 3

Widths = Mapping[str, int]


@dataclass(frozen=True)
class PrunedPart:
    """The structures in front of the linear `name`: how many there are, the MACs of each, the order in which they go,
    and the distance of the graph's answers with `widths` of them and all other parts whole."""

    name: str
    kind: str
    count: int
    macs: int
    order: tuple[int, ...]
    widths: tuple[int, ...]
    distances: tuple[float, ...]

    def kept(self, width: int) -> list[int]:
        """The structures that stay, ascending."""
        return sorted(set(range(self.count)) - set(self.order[: self.count - width]))


@dataclass(frozen=True)
class Parts:
    """What can be pruned of a graph of `macs`, at batch 1."""

    macs: int
    parts: tuple[PrunedPart, ...]


@dataclass(frozen=True)
class Pruning:
    """`asked`: the share of all MACs that was to go at least; `share`: that goes. `widths`: the structures that stay of
    each part that loses some. `distance`: from the float graph's answers, mean over the images; `expected`: for a
    classifier, else None."""

    asked: float
    share: float
    widths: dict[str, int]
    distance: float
    expected: Expected | None


def prunable_parts(model: ir.Model) -> dict[str, tuple[prunable.Prunable, int]]:
    """What can be pruned, by name, with the MACs of each structure. Shapes that the graph lacks are inferred, in place.

    Raises:
        GraphError: there is nothing, or the work of the graph cannot be counted.
    """
    whole_macs(model)  # infers what shapes it lacks
    found = [(each, each.macs(model)) for each in prunable.find_prunable(model)]
    parts = {each.name: (each, macs) for each, macs in found if macs}
    if not parts:
        raise GraphError(
            "nothing in this graph can be pruned",
            found="no hidden channels between two linears, and no heads, that nothing else reads",
            expected="MLPs whose activations work on each channel alone, or attention with a linear for its operands",
            fix="leave optimize.prune out",
        )
    return parts


def whole_macs(model: ir.Model) -> int:
    """All MACs of a graph at batch 1."""
    return sum(work.count_work(model, 1).flops.values()) // 2


def widths_to_try(part: prunable.Prunable) -> list[int]:
    """Widths below the whole one, in descending order, aligned for kernels."""
    tile = 1 if part.kind == "heads" else TILE if part.count >= FEW else FEW_TILE
    widths = {-(-int(np.ceil(share * part.count)) // tile) * tile for share in SHARES}
    return sorted((width for width in widths if 0 < width < part.count), reverse=True)


def measure_parts(
    graph: Path, moments: Mapping[str, Statistics], reference_outputs: ReferenceOutputs, progress: Progress
) -> Parts:
    """Order the structures of every part, and try each part alone.

    Args:
        moments: of the input of each reader, by the name of the part.
        reference_outputs: of this graph, on other images than the moments where there are enough.
    """
    model, made = load_graph(graph), list[PrunedPart]()
    found = prunable_parts(model)
    for name, (part, macs) in counted(list(found.items()), "prune each part alone", progress):
        if moments[name].rows < ROWS_PER_CHANNEL * len(part.reader.weight):
            continue
        order = removal_order(moments[name], part.reader.weight, part.inputs)
        bare = PrunedPart(name, part.kind, part.count, macs, tuple(order), (), ())
        tried = dict(_tried(graph, bare, widths_to_try(part), moments, reference_outputs))
        made.append(PrunedPart(name, part.kind, part.count, macs, tuple(order), tuple(tried), tuple(tried.values())))
    if not made:
        rows = max(each.rows for each in moments.values())
        raise GraphError(
            "there are too few calibration images to prune this graph",
            found=f"{rows} rows of activations",
            expected=f"{ROWS_PER_CHANNEL} for each of the channels of at least one linear",
            fix="more images: data.calibration.images",
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
    """What the graph answers with each of some shares of its MACs gone, the least first; fewer where that many cannot
    go, or a share changed answers by more than WORST."""
    found: list[Pruning] = []
    for done, step in enumerate(steps):
        progress("prune the graph", done, len(steps))
        widths = allocate(parts, step)
        if widths is None:
            break
        if found and found[-1].widths == widths:
            continue
        reached = _trial(graph, parts.parts, widths, moments, reference_outputs)
        distance = reached.distance
        if not np.isfinite(distance):
            break
        found.append(Pruning(step, saved(parts, widths), widths, distance, reached.expected))
        if distance > WORST:
            break
    progress("prune the graph", len(steps), len(steps))
    return found


def allocate(parts: Parts, share: float) -> dict[str, int] | None:
    """The width of each part that loses some, where at least `share` of all MACs go; None if not so many can."""
    widths: dict[str, int] = {}
    steps = sorted((step for part in parts.parts for step in _hull(part)), key=lambda step: step[0])
    for _, name, width in steps:
        if saved(parts, widths) >= share:
            break
        widths[name] = width
    return widths if saved(parts, widths) >= share else None


def saved(parts: Parts, widths: Widths) -> float:
    """The share of all MACs that go."""
    gone = sum(each.macs * (each.count - widths[each.name]) for each in parts.parts if each.name in widths)
    return gone / parts.macs


def _hull(part: PrunedPart) -> Iterator[tuple[float, str, int]]:
    """(distance per MAC, name, width) of each step down the lower convex hull of a part, in ascending order."""
    points = [(0.0, 0.0, part.count)]
    for width, distance in zip(part.widths, part.distances, strict=True):
        points.append((float(part.macs * (part.count - width)), distance, width))
    at = 0
    while at < len(points) - 1:
        slopes = [(later[1] - points[at][1]) / (later[0] - points[at][0]) for later in points[at + 1 :]]
        # The last of equal ones, so that the next slope is a larger one.
        best = len(slopes) - 1 - int(np.argmin(slopes[::-1]))
        at += 1 + best
        yield slopes[best], part.name, points[at][2]


def select(prunings: Sequence[Pruning], acceptable: Callable[[Pruning], bool], near: float) -> list[Pruning]:
    """The most that changes no more than `near`, and the most that is acceptable; of those that are acceptable."""
    found = sorted((each for each in prunings if acceptable(each)), key=lambda each: each.share)
    chosen = [each for each in found if each.distance <= near][-1:] + found[-1:]
    return chosen[:1] if chosen[1:] == chosen[:1] else chosen


def prune_graph(
    model: ir.Model, parts: Sequence[PrunedPart], widths: Widths, moments: Mapping[str, Statistics]
) -> None:
    """Prune a graph in place, and let what stays make up for what goes."""
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


# --- Which input channels of a linear can go, and what the others make up for -----------------------------------------
# second-order saliency and least squares.
#
# For y = x W + b with the covariance C of x, the best y from the channels K alone has the weight and bias
#
#     V = (C_KK)^-1 C_K: W        b + m W - m_K V        m: the mean of x
#
# and the mean squared error that is left is, for the channels S that go, tr(W_S^T ((C^-1)_SS)^-1 W_S): the saliency of
# the Optimal Brain Surgeon (Hassibi and Stork 1993, equation 5) for a whole structure (Optimal BERT Surgeon, arXiv
# 2203.07259, equation 3; SlimGPT, arXiv 2412.18110; ZipLM, arXiv 2302.04089). Structures go one by one, the cheapest
# first, and C^-1 and W are brought up to date for those that are left.


Weight = npt.NDArray[np.floating]

# Of the mean variance: added to each, so that channels that others determine do not take weights without bound.
DAMPING = 0.01
# Channels that go before the inverse is brought up to date as a whole.
BLOCK = 64
TINY = float(np.finfo(np.float64).tiny)


def damped(moments: Statistics) -> Numbers:
    """The covariance of the input of a linear, [in, in]."""
    covariance = moments.covariance.astype(np.float64)
    power = float(np.diag(covariance).mean())
    return np.asarray(covariance + DAMPING * max(power, TINY) * np.eye(len(moments.mean)))


def removal_order(moments: Statistics, weight: Weight, structures: npt.NDArray[np.int64]) -> list[int]:
    """The numbers of the structures in the order in which they go, all but the last one.

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
    """(weight [kept, out], bias [out]) of the linear that reads the channels `kept` alone and errs least.

    The damping pulls towards the weights as they were: where it is all, nothing changes but the bias.
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
    """The same of single channels, at the cost of one product of matrices for BLOCK of them.

    Within a block of removals C^-1 and W stay as they are; `spread` and `taken` hold what is to be taken off them:
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
