"""Find the source of an engine's error and a fix; and the first layer where a runtime deviates from its graph."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import create_value_mapping

from vitdeploy.backends import TARGETS
from vitdeploy.errors import HostError
from vitdeploy.graph.analysis.prunable import changed_tensors, part, single_cuts
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import save_graph
from vitdeploy.lint.view import label
from vitdeploy.lint.view import prepare as prepare_view
from vitdeploy.quantization import observers, placement_reader, ranges
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.runtime import backend, golden, ort, values
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.search.frame import answers_of
from vitdeploy.search.graphs import OutlierFacts, Splice
from vitdeploy.spec import EngineSpec, Precision, WeightBits

# --- Locate the source of an engine's error ---------------------------------------------------------------------------
# The first step goes along the tensors that each separate input from outputs (in a ViT those of the residual stream):
# the engine runs up to such a tensor, the float graph after it, and the distance of the answers is the error so far.
# Bisection finds the part in which it rises most. The second step runs that part alone, between two parts of the float
# graph, to find the quantized input, the layer's weights or, in an unquantized part, the node.


# Answers closer than this, in nats or as a share of power, count as equal: float32 rounding is about 1e-10.
SAME_DISTANCE = 1e-7
# A source needs at least this share of the distance. A layer is distinguished from the others of its part if it has
# half of the part's error.
STANDS_OUT, HALF = 0.25, 0.5
# If the answers are this many times farther away than those of the whole engine, the tensor differs between the graphs.
ABSURD = 2.0


@dataclass(frozen=True)
class GraphPart:
    """The graph between two tensors, and its share of the whole distance: 1 if the rest is negligible."""

    start: str
    end: str
    share: float


@dataclass(frozen=True)
class Culprit:
    """The source of the error within a part.

    `kind`: the quantized "input" or "output" of `layers`, which are `tensors`; the "weight" of `layers`; or the "node"
    that produces one of `tensors`. Several if they cannot be distinguished. `share`: its share of the part's error;
    `facts`: the facts of the tensor, if it is a single one.
    """

    kind: Literal["input", "output", "weight", "node"]
    layers: tuple[str, ...]
    tensors: tuple[str, ...]
    share: float
    facts: OutlierFacts | None


@dataclass(frozen=True)
class Bisection:
    """`distance` of the engine's answers, the number of `cuts` (tensors to cut at), and the `parts` between tried cuts,
    the largest share first; `culprit` in the first part, None if no part stands out or the answers are the same."""

    distance: float
    cuts: int
    parts: tuple[GraphPart, ...]
    culprit: Culprit | None

    @property
    def same(self) -> bool:
        return self.distance <= SAME_DISTANCE

    @property
    def located(self) -> Culprit | None:
        """The culprit, if it has a significant share of the whole distance."""
        stands_out = self.culprit is not None and self.parts[0].share * self.culprit.share >= STANDS_OUT
        return self.culprit if stands_out else None


def bisect(splice: Splice) -> Bisection:
    """Find the source of an engine's error in about log2(cuts) + log2(nodes of a part) + 3 runs.

    The share of the reported part is measured at both of its ends. No other part has a larger share if the distance
    never falls along the graph; errors that cancel out may stay hidden.
    """
    total = splice.distance()
    if total <= SAME_DISTANCE:
        return Bisection(total, 0, (), None)
    cuts = _common_cuts(splice)

    def measure(position: int) -> float | None:
        return _sensible(splice.distance(expected=[cuts[position - 1]]), total)

    last = len(cuts) + 1
    rises = largest_increases(measure, last, first=0.0, total=total, share=STANDS_OUT)
    [image, *_] = splice.graph.graph.inputs
    names = [str(image.name), *cuts, ", ".join(splice.outputs)]
    parts = tuple(GraphPart(names[rise.low], names[rise.high], _share(rise.gain, total)) for rise in rises)
    if parts[0].share < STANDS_OUT:
        return Bisection(total, len(cuts), parts, None)
    given = cuts[rises[0].low - 1 : rises[0].low] if rises[0].low else []
    return Bisection(total, len(cuts), parts, _inside(splice, given, cuts[rises[0].high - 1 : rises[0].high]))


def _common_cuts(splice: Splice) -> list[str]:
    """Tensors that cut both graphs and are the same function in both; in a quantized graph, only those with quantized
    tensors between them."""
    theirs = set(single_cuts(splice.placement))
    cuts = [name for name in single_cuts(splice.graph) if name in theirs]
    tensors = {quantized.tensor for quantized in placement_reader.find_quantized(splice.placement)}
    if not tensors:
        return cuts
    changed = changed_tensors(splice.placement, splice.graph)  # only folds of quantization change tensors on purpose
    kept, new = [], False
    for node in splice.placement.graph:
        new |= any(value is not None and value.name in tensors for value in node.inputs)
        names = [str(value.name) for value in node.outputs]
        if new and names[0] in cuts and names[0] not in changed:
            kept.append(names[0])
            new = False
    return kept


def _inside(splice: Splice, given: Sequence[str], expected: Sequence[str]) -> Culprit:
    """The source of a part's error."""
    full = splice.distance(given, expected)
    within = part(splice.placement, given, expected or splice.outputs, splice.reference_outputs.batch)
    quantized = placement_reader.find_quantized(within)
    if not quantized:
        return _first_node(splice, given, expected, full)
    tensors = [each.tensor for each in quantized]
    weights = splice.distance(given, expected, tensors)
    if gain(weights, full) < weights:
        return _weights(splice, given, quantized, weights)
    rise = _steepest(lambda k: splice.distance(given, expected, tensors[k:]), len(tensors), weights, full)
    chosen = quantized[rise.low : rise.high]
    found = tuple(each.tensor for each in chosen)
    facts = splice.facts(found[0], given, placed=True) if len(found) == 1 else None
    kind: Literal["input", "output"] = "output" if all(each.output for each in chosen) else "input"
    return Culprit(kind, _layers(chosen), found, _share(rise.gain, full), facts)


def _weights(
    splice: Splice, given: Sequence[str], quantized: Sequence[placement_reader.Quantized], total: float
) -> Culprit:
    """The layer whose weights cause the error, with all inputs in float: the placement computes the outputs of the
    first layers, the float graph computes the rest."""
    tensors = [each.tensor for each in quantized]
    quantized = [each for each in quantized if not each.output]
    layers, ours, theirs = _layers(quantized), create_value_mapping(splice.graph.graph), _values(splice)
    changed = changed_tensors(splice.placement, splice.graph)
    outputs = {linear.name: str(linear.output.name) for linear in find_linears(splice.graph)}
    steps: list[tuple[list[str], str]] = []
    together: list[str] = []
    for layer in layers:
        together.append(layer)
        name = outputs.get(layer, "")
        # Channels were split into copies: the sizes differ, so the outputs are not interchangeable.
        if name and name not in changed and ours[name].shape == theirs[name].shape:
            steps.append((together, name))
            together = []
    if together:
        steps.append((together, ""))

    def measure(position: int) -> float | None:
        return _sensible(splice.distance(given, [name for _, name in steps[:position]], tensors), total)

    rise = _steepest(measure, len(steps), 0.0, total)
    named = tuple(layer for group, _ in steps[rise.low : rise.high] for layer in group)
    return Culprit("weight", named, (), _share(rise.gain, total), None)


def _first_node(splice: Splice, given: Sequence[str], expected: Sequence[str], total: float) -> Culprit:
    """The node that causes the error in an unquantized part: the engine computes everything up to it."""
    within = part(splice.graph, given, expected or splice.outputs, splice.reference_outputs.batch)
    theirs = _values(splice)
    names = [
        str(value.name)
        for node in within.graph
        for value in node.outputs
        if value.dtype == ir.DataType.FLOAT and value.shape is not None and value.name in theirs
    ]

    def measure(position: int) -> float | None:
        return _sensible(splice.distance(given, names[:position]), total)

    rise = _steepest(measure, max(len(names), 1), 0.0, total)
    found = tuple(names[rise.low : rise.high])
    facts = splice.facts(found[0], given, placed=False) if len(found) == 1 else None
    return Culprit("node", (), found, _share(rise.gain, total), facts)


def _steepest(measure: Callable[[int], float | None], last: int, first: float, total: float) -> Rise:
    """The piece with at least half of the increase; the whole line if no piece has."""
    rise = largest_increases(measure, last, first=first, total=total, share=HALF)[0]
    whole = Rise(0, last, gain(first, total))
    return rise if rise.gain >= HALF * whole.gain else whole


def _sensible(found: float, total: float) -> float | None:
    return None if math.isfinite(total) and found > ABSURD * total else found


def _share(part: float, total: float) -> float:
    """The ratio of two finite numbers; 1 if the answers become non-finite."""
    if math.isinf(total):
        return 1.0 if math.isinf(part) else 0.0
    return part / total


def _layers(quantized: Sequence[placement_reader.Quantized]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(layer for each in quantized for layer in each.layers))


def _values(splice: Splice) -> dict[str, ir.Value]:
    return dict(create_value_mapping(splice.placement.graph))


# --- Find a fix for an error that bisection located, tested on the same images before it is proposed ------------------


# A fix removes at least this share of the error.
REQUIRED_GAIN = 0.5


@dataclass(frozen=True)
class Fix:
    """`kind`: "quantize" the float graph again with this version, with `ignore` kept in float; or "compile" it in FP32.
    `after`: the distance with the fix; `enough`: whether it fixes the located part."""

    kind: Literal["quantize", "compile"]
    ignore: tuple[str, ...]
    before: float
    after: float
    enough: bool


def find_fix(bisection: Bisection, splice: Splice) -> Fix | None:
    """The sufficient fix that costs least speed, else the one that helps most; None without a culprit. Each attempt is
    one more run.

    For an INT8 engine, the float graph is first quantized again, on the images of the reference outputs; then the
    culprit's layers are kept in float too. Any other engine is compiled in FP32.
    """
    culprit = bisection.located
    if culprit is None:
        return None
    if culprit.kind == "node":
        return _judged("compile", (), _distance_on_target(splice, splice.graph), bisection)
    statistics = _observed(splice)
    again = _judged("quantize", (), _distance_on_target(splice, _quantized(splice, statistics, ())), bisection)
    if again.enough:
        return again
    if culprit.tensors:
        after = splice.distance(floats=culprit.tensors)
    else:
        after = _distance_on_target(splice, _quantized(splice, statistics, culprit.layers))
    return min(again, _judged("quantize", culprit.layers, after, bisection), key=lambda fix: fix.after)


def fixed_bits(engine: EngineSpec) -> WeightBits:
    """The weight bits of a fix: those of the engine, or fewer if they saturate on this machine."""
    return min(values.bits_of(engine) or 8, values.bits_for(describe_host()["isa"]))


def _judged(kind: Literal["quantize", "compile"], ignore: Sequence[str], after: float, bisection: Bisection) -> Fix:
    enough = gain(after, bisection.distance) >= REQUIRED_GAIN * bisection.parts[0].share * bisection.distance
    return Fix(kind, tuple(ignore), bisection.distance, after, enough)


def _distance_on_target(splice: Splice, model: ir.Model) -> float:
    """The distance of a whole graph on the target; infinite if the target cannot run it."""
    precision: Precision = "int8" if count_int8(model) else "fp32"
    splice.count()
    try:
        answers = answers_of(model, splice.engine.target, precision, splice.reference_outputs)
    except HostError:  # the located culprit stays valid
        return math.inf
    return splice.mean_distance(answers)


def _observed(splice: Splice) -> dict[str, ranges.Statistics]:
    pixels, batch = splice.reference_outputs.pixels, splice.reference_outputs.batch
    batches = (pixels[np.arange(i, i + batch) % len(pixels)] for i in range(0, len(pixels), batch))
    model = splice.graph.clone()
    ranges.separate_scores(model)  # as calibration does
    return observers.observe(model, batches, splice.reference_outputs.preprocess)


def _quantized(splice: Splice, statistics: dict[str, ranges.Statistics], ignore: Sequence[str]) -> ir.Model:
    """The result of `vitdeploy quantize` for the float graph."""
    model, target = splice.graph.clone(), splice.engine.target
    shape(model, target, ignore)
    chosen = choose(model, target, ignore)
    prepared = prepare(model, statistics, chosen, fixed_bits(splice.engine))
    place(model, prepared.ranges, target, ignore, prepared.weights)
    drop_unused(model)
    return model


# --- Find where a quantity rises along a line with few measurements, each in the middle of the steepest piece ---------


@dataclass(frozen=True)
class Rise:
    """The increase from one position to another."""

    low: int
    high: int
    gain: float


def largest_increases(
    measure: Callable[[int], float | None], last: int, *, first: float, total: float, share: float
) -> list[Rise]:
    """Split the line from 0 to `last` into pieces, the one with the largest increase first.

    The piece with the largest increase is halved until it is one step long, or its increase is less than `share` of the
    total. If the quantity never falls, the first piece is then the steepest step, or no step reaches `share`: each of
    the at most 1 / share pieces that do is halved log2(last) times. If it falls in places, the increase of the first
    piece is still measured, but a rise and a fall inside another piece may have cancelled out.

    Args:
        measure: the quantity at a position, which may be infinite; None if it is undefined, which skips the position.
        first, total: the quantity at 0 and at `last`.
    """
    known, left_out, least = {0: first, last: total}, set[int](), share * max(gain(first, total), 0.0)

    def inside(rise: Rise) -> list[int]:
        return [i for i in range(rise.low + 1, rise.high) if i not in left_out]

    while True:
        places = sorted(known)
        rises = [Rise(a, b, gain(known[a], known[b])) for a, b in itertools.pairwise(places)]
        rises.sort(key=lambda rise: -rise.gain)
        choice = inside(rises[0]) if rises else []
        if not choice or rises[0].gain < least:
            return rises
        middle = choice[len(choice) // 2]
        found = measure(middle)
        if found is None:
            left_out.add(middle)
        else:
            known[middle] = found


def gain(before: float, after: float) -> float:
    """after - before; both may be infinite."""
    return 0.0 if math.isinf(before) and math.isinf(after) else after - before


# --- The first layer where a runtime deviates from the graph, for an engine that was refused --------------------------
# As above, but between two ways of computing one graph: the engine's runtime, and ONNX Runtime without optimisation.
# Parts that begin at the input, or at a tensor of the evaluation, run on the engine's runtime and are compared at their
# ends. A runtime fuses within such a part as it does in the whole graph.


# The time limit for starting to examine another part of a wrong engine.
SECONDS = 30.0


def first_layer(
    model: ir.Model, engine: EngineSpec, feeds: Sequence[Array], tolerance: float, seconds: float
) -> str | None:
    """A sentence on where the answers of an engine deviate from those of its graph; None if it cannot be determined.

    Args:
        model: the engine's graph, with one input.
        feeds: inputs of one image each, [1, ...]; the first whose answers differ is examined.
        tolerance: the limit of max|a - b| / max|b|.
        seconds: the time after which no further part is examined; the sentence has the result so far.

    Raises:
        VitdeployError: the runtime, or ONNX Runtime, refuses a part.
    """
    if engine.parts or engine.batch != 1 or TARGETS[engine.target].typed or backend.engine_is_code(engine):
        return None
    search = _FirstLayer(prepare_view(model).model, engine, tolerance, time.monotonic() + seconds)
    outputs = [str(value.name) for value in model.graph.outputs]
    for feed in feeds:
        search.feed = feed
        if search.differs((), outputs):
            return _located(search, outputs)
    return "the runtime computes the engine's graph correctly: the expected answers come from another graph"


@dataclass
class _FirstLayer:
    """`feed`: the image that is examined."""

    model: ir.Model
    engine: EngineSpec
    tolerance: float
    deadline: float
    feed: Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def differs(self, given: Sequence[str], expected: Sequence[str]) -> bool:
        """Whether the runtime's values of `expected`, from the evaluation's values of `given`, differ."""
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            known = self._run(folder, (), [*given, *expected], {}, plain=True)
            found = self._run(folder, given, expected, known, plain=False)
        return not golden.largest_difference(found, known, expected) <= self.tolerance

    def _run(
        self, folder: str, given: Sequence[str], expected: Sequence[str], known: Mapping[str, Array], *, plain: bool
    ) -> dict[str, Array]:
        model = part(self.model, given, expected, self.engine.batch)
        file = Path(folder) / f"{'plain' if plain else 'engine'}.onnx"
        save_graph(model, file)
        runner: Runner = (
            ort.OnnxRuntimeRunner(file, name="evaluation", batch=self.engine.batch, plain=True)
            if plain
            else make_runner(Path(folder), dataclasses.replace(self.engine, files=(file.name,)))
        )
        names = [str(value.name) for value in model.graph.inputs]
        with runner:
            feeds = {t.name: known.get(name, self.feed) for t, name in zip(runner.inputs, names, strict=True)}
            return dict(zip(expected, runner.infer(feeds).values(), strict=True))


def _located(search: _FirstLayer, outputs: Sequence[str]) -> str:
    """Where the answers of an engine differ: the part of the graph first, then the node in it."""
    cuts = single_cuts(search.model)
    low, high = 0, len(cuts) + 1  # the runtime is right at cuts[low - 1] and wrong at cuts[high - 1]
    while high - low > 1 and not search.over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.differs((), [cuts[middle - 1]]) else (middle, high)
    start, end = cuts[low - 1] if low else "the input", cuts[high - 1] if high <= len(cuts) else "the output"
    between = f"the answers differ first between {start} and {end}"
    given, expected = cuts[low - 1 : low] if low else [], cuts[high - 1 : high] or list(outputs)
    if high - low > 1 or search.over:
        return f"{between}; the time limit ended a closer search"
    inside = part(search.model, given, expected, search.engine.batch)
    nodes = [node for node in inside.graph if any(value.dtype == ir.DataType.FLOAT for value in node.outputs)]
    names = [str(node.outputs[0].name) for node in nodes]
    if not search.differs(given, names):
        return f"{between}, in a kernel for several layers: the runtime is right when it returns each one's output"
    low, high = 0, len(names)
    while high - low > 1 and not search.over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.differs(given, names[:middle]) else (middle, high)
    return f"the first layer that differs is {label(nodes[high - 1])}" if high - low == 1 else between
