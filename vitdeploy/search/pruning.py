"""Structured pruning with compensation: how much each part of a graph can lose, and who loses how much.

What a part loses, and in which order, its saliencies say (`saliency.py`); they do not say what an error of one part is
worth beside that of another. So each part alone is tried at a few widths, by the distance of the whole graph's answers.
Distances are taken as adding up, as sensitivities do; the cheapest loss per MAC goes first, whatever part it is in
(greedy on the lower convex hulls, which is optimal for such sums up to one step: Everett 1963, Operations Research 11).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.prunable import Prunable, find_prunable
from vitdeploy.graph.analysis.work import count_work
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.tokens import prune
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.expected import Expected
from vitdeploy.search.graphs import ReferenceOutputs
from vitdeploy.search.mixed import Moments, compensated, removal_order

# Shares of a part's structures that are tried, until one changes answers by more than WORST.
SHARES, WORST = (7 / 8, 3 / 4, 1 / 2, 1 / 4, 1 / 8), 0.2
# Widths are multiples of what integer kernels take at a time, a coarser one of many channels.
TILE, FEW, FEW_TILE = 32, 256, 16
# Shares of all MACs that a search has go.
STEPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
# Rows of its input per channel that a part needs: fewer leave least squares to chance.
ROWS_PER_CHANNEL = 3

Widths = Mapping[str, int]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Part:
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
    parts: tuple[Part, ...]


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


def prunable_parts(model: ir.Model) -> dict[str, tuple[Prunable, int]]:
    """What can be pruned, by name, with the MACs of each structure. Shapes that the graph lacks are inferred, in place.

    Raises:
        GraphError: there is nothing, or the work of the graph cannot be counted.
    """
    whole_macs(model)  # infers what shapes it lacks
    found = [(each, each.macs(model)) for each in find_prunable(model)]
    parts = {each.name: (each, macs) for each, macs in found if macs}
    if not parts:
        raise GraphError(
            "nothing in this graph can be pruned",
            found="no hidden channels between two linears, and no heads, that nothing else reads",
            wanted="MLPs whose activations work on each channel alone, or attention with a linear for its operands",
            fix="leave optimize.prune out",
        )
    return parts


def whole_macs(model: ir.Model) -> int:
    """All MACs of a graph at batch 1."""
    return sum(count_work(model, 1).flops.values()) // 2


def widths_to_try(part: Prunable) -> list[int]:
    """Widths below the whole one, in descending order, aligned for kernels."""
    tile = 1 if part.kind == "heads" else TILE if part.count >= FEW else FEW_TILE
    widths = {-(-int(np.ceil(share * part.count)) // tile) * tile for share in SHARES}
    return sorted((width for width in widths if 0 < width < part.count), reverse=True)


def measure_parts(
    graph: Path, moments: Mapping[str, Moments], reference_outputs: ReferenceOutputs, progress: Progress
) -> Parts:
    """Order the structures of every part, and try each part alone.

    Args:
        moments: of the input of each reader, by the name of the part.
        reference_outputs: of this graph, on other images than the moments where there are enough.
    """
    model, made = load_graph(graph), list[Part]()
    found = prunable_parts(model)
    for done, (name, (part, macs)) in enumerate(found.items()):
        progress("prune each part alone", done, len(found))
        if moments[name].rows < ROWS_PER_CHANNEL * len(part.reader.weight):
            continue
        order = removal_order(moments[name], part.reader.weight, part.inputs)
        bare = Part(name, part.kind, part.count, macs, tuple(order), (), ())
        tried = dict(_tried(graph, bare, widths_to_try(part), moments, reference_outputs))
        made.append(Part(name, part.kind, part.count, macs, tuple(order), tuple(tried), tuple(tried.values())))
    progress("prune each part alone", len(found), len(found))
    if not made:
        rows = max(each.rows for each in moments.values())
        raise GraphError(
            "there are too few calibration images to prune this graph",
            found=f"{rows} rows of activations",
            wanted=f"{ROWS_PER_CHANNEL} for each of the channels of at least one linear",
            fix="more images: data.calibration.images",
        )
    return Parts(whole_macs(model), tuple(made))


def _tried(
    graph: Path, part: Part, widths: Sequence[int], moments: Mapping[str, Moments], reference_outputs: ReferenceOutputs
) -> Iterator[tuple[int, float]]:
    for width in widths:
        answers = _answers(graph, [part], {part.name: width}, moments, reference_outputs)
        distance = float(reference_outputs.distance(answers).mean())
        if not np.isfinite(distance):
            return
        yield width, distance
        if distance > WORST:
            return


def try_prunings(
    graph: Path,
    parts: Parts,
    moments: Mapping[str, Moments],
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
        answers = _answers(graph, parts.parts, widths, moments, reference_outputs)
        distance = float(reference_outputs.distance(answers).mean())
        if not np.isfinite(distance):
            break
        found.append(Pruning(step, saved(parts, widths), widths, distance, reference_outputs.expected(answers)))
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


def _hull(part: Part) -> Iterator[tuple[float, str, int]]:
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


def prune_graph(model: ir.Model, parts: Sequence[Part], widths: Widths, moments: Mapping[str, Moments]) -> None:
    """Prune a graph in place, and let what stays make up for what goes."""
    editor, known = Editor(model), {each.name: each for each in find_prunable(model)}
    for part in parts:
        if part.name not in widths:
            continue
        found, kept = known[part.name], part.kept(widths[part.name])
        channels = np.sort(found.inputs[kept].ravel())
        weight, bias = compensated(moments[part.name], found.reader.weight, found.reader.bias, channels)
        prune(editor, found, kept, weight, bias)
    drop_unused(model)


def _answers(
    graph: Path,
    parts: Sequence[Part],
    widths: Widths,
    moments: Mapping[str, Moments],
    reference_outputs: ReferenceOutputs,
) -> dict[str, np.ndarray]:
    model = load_graph(graph)
    prune_graph(model, parts, widths, moments)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file = Path(folder) / "pruned.onnx"
        save_graph(model, file)
        with OnnxRuntimeRunner(file, name="pruned", batch=reference_outputs.batch) as runner:
            return reference_outputs.ask(runner)
