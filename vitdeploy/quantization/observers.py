"""Observe the tensors of a graph on images: ranges and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.rows import is_layout
from vitdeploy.graph.edit import Names
from vitdeploy.graph.half.half import HALVES
from vitdeploy.graph.io.files import runner_of
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.quantization import prepare, ranges
from vitdeploy.quantization.observer import (
    BOUNDS,
    FEW_ROWS,
    Arrays,
    Bounds,
    Observer,
    by_channel,
    covariance_pays,
    spread_of,
)
from vitdeploy.quantization.probe import Feeds, ImageProbe, Probe, find_nonfinite
from vitdeploy.spec import PreprocessSpec

# --- One streaming pass over the calibration images, or other inputs, on the ONNX graph itself ------------------------
# The tensors to observe become outputs of the graph; each batch updates statistics of fixed size and is discarded.


# One image per batch: larger batches are not faster for slow models, and need more memory.
BATCH = 1
# An image is an outlier if it makes this share of all ranges this much wider than all other images. None of 8 to 64
# photographs reaches a share of 0.05, on ViT-Tiny and DETR; noise has 0.42 on DETR (0.04 on a ViT, due to its norms).
STRETCH, SHARE = 1.25, 0.25
CHECKS = "|checks"

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    """The observation of a shard of the calibration images, for all images except the first.

    Bounds and image checks merge to the same bytes in any order. Moments are sums of floats, which do not, but most
    tensors take them from the first images only. For tensors with few rows per image, such as a class token's, the rows
    themselves are kept, so that they can be added in image order.

    `bounds`: by tensor. `kept`: by the number of the batch in the shard, the kept rows by tensor, float32
    [..., channels, ...] with three axes."""

    bounds: Mapping[str, Bounds]
    kept: Mapping[int, Arrays]
    checks: prepare.ImageChecks

    def to_arrays(self) -> Arrays:
        """The shard as arrays, for `from_arrays`."""
        arrays = {f"checks|{name}": array for name, array in self.checks.state().items()}
        for name, each in self.bounds.items():
            arrays |= {f"bounds|{name}|{field}": getattr(each, field) for field in BOUNDS}
        for name in sorted({name for values in self.kept.values() for name in values}):
            held = {batch: values[name] for batch, values in sorted(self.kept.items()) if name in values}
            arrays[f"kept|{name}|batches"] = np.array(list(held), np.int64)
            arrays[f"kept|{name}|shapes"] = np.array([each.shape for each in held.values()], np.int64)
            arrays[f"kept|{name}|values"] = np.concatenate([each.ravel() for each in held.values()])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]], preprocess: PreprocessSpec) -> Shard:
        """The shard from the arrays of `to_arrays`. Raises KeyError, ValueError or IndexError for other arrays."""
        parts: dict[str, dict[str, Arrays]] = {"bounds": {}, "kept": {}, "checks": {}}
        for key, array in arrays.items():
            kind, _, rest = key.partition("|")
            name, _, field = rest.rpartition("|")
            parts[kind].setdefault(name, {})[field] = array
        kept: dict[int, Arrays] = {}
        for name, held in parts["kept"].items():
            ends = np.cumsum(held["shapes"].prod(axis=1))[:-1]
            each = zip(held["batches"], held["shapes"], np.split(held["values"], ends), strict=True)
            for batch, shape, values in each:
                kept.setdefault(int(batch), {})[name] = values.reshape(shape)
        checks = prepare.ImageChecks(preprocess)
        checks.restore(parts["checks"][""])
        bounds = {name: Bounds(*(each[field] for field in BOUNDS)) for name, each in parts["bounds"].items()}
        return cls(bounds, kept, checks)


class Observation(Probe):
    """Collects the statistics of all observed tensors of a graph while it runs on images or other feeds.

    Args:
        total: the number of images, if known; without it, more may be kept than is used.
        The others are those of `Probe`.
    """

    def __init__(
        self,
        model: ir.Model,
        preprocess: PreprocessSpec | None,
        total: int | None = None,
        *,
        threads: int = 0,
        at_once: int = 1,
    ) -> None:
        super().__init__(model, preprocess, threads=threads, at_once=at_once)
        self.total = total
        self.images = self.batches = 0
        self.checks = prepare.ImageChecks(preprocess) if preprocess is not None else None
        self.observers: dict[str, Observer] = {}

    def update(self, pixels: npt.NDArray[np.uint8], names: Sequence[str] = ()) -> None:
        """Run one batch, uint8 [n, height, width, channels]. `names` are the image names for errors.

        Raises:
            DataError: a tensor has a non-finite value; the error names the node that produced it, and the images.
        """
        feeds = self.feeds(pixels)
        self.take(pixels, feeds, self.run(feeds), names)

    def take(self, pixels: npt.NDArray[np.uint8], feeds: Feeds, outputs: Arrays, names: Sequence[str] = ()) -> None:
        """As `update`, with the outputs of `run` for these pixels."""
        assert self.checks is not None
        first, last = self.images + 1, f" to {self.images + len(pixels)}" * (len(pixels) > 1)
        self._add(feeds, outputs, ", ".join(names) or f"image {first}{last}", "images")
        self.checks.update(pixels)

    def show(self, feeds: Feeds, shown: str, noun: str = "images") -> Arrays:
        """Run the graph once and return its outputs. `shown` names the samples and `noun` their kind for errors, which
        are those of `update`."""
        outputs = self.run(feeds)
        self._add(feeds, outputs, shown, noun)
        return outputs

    def _add(self, feeds: Feeds, outputs: Arrays, shown: str, noun: str) -> None:
        count = len(next(iter(feeds.values())))
        for name, role in self.observed.items():
            values = outputs[name]
            if name not in self.observers:
                channels = values.shape[role.axis]
                rows = values.size // channels // count or 1
                pays = role.rounds and covariance_pays(rows, channels, self.total)
                self.observers[name] = Observer(role.axis, covariance=pays, spread=spread_of(rows, self.total))
            observer = self.observers[name]
            observer.update(values, self.batches, moments=self.images < observer.moment_images)
            if not observer.finite:
                raise self.not_finite(name, feeds, shown, noun)
        self.images += count
        self.batches += 1

    def keeps_until(self, batches: int) -> dict[str, int]:
        """For each tensor with too few rows for its moments so far: the number of the batch, of `batches` in all, at
        which it has enough."""
        shapes = {str(value.name): value.shape for node in self.model.graph for value in node.outputs}
        shapes |= {str(value.name): value.shape for value in self.model.graph.inputs}
        batch = self.model.graph.inputs[0].shape
        found = {}
        for name, observer in self.observers.items():
            if observer.rows < FEW_ROWS:
                # A batch has at least one row, and as many as earlier batches if no other size is open.
                rows = observer.rows // self.batches if _sized(shapes.get(name), batch) else 1
                found[name] = min(self.batches + math.ceil((FEW_ROWS - observer.rows) / rows), batches)
        return found

    def images_for(self, rows: int) -> int:
        """The number of images until a tensor with `rows` rows per image has enough rows for its moments."""
        known = [each.rows for each in self.observers.values() if rows * self.images <= each.rows < FEW_ROWS]
        return math.ceil(FEW_ROWS * self.images / min(known)) if known else 0

    def join(self, shards: Iterable[tuple[Shard, Ints]], size: int) -> None:
        """Merge the shards of all batches, in any order, each with the numbers of its batches, of `size` images each;
        the moments of batches observed here are known. The result equals an observation of all batches in order, bit
        for bit."""
        assert self.preprocess is not None
        kept: dict[int, Arrays] = {}
        first, self.batches, self.images = self.batches, 0, 0
        self.checks = prepare.ImageChecks(self.preprocess)
        for observer in self.observers.values():
            observer.bounds = None
        for shard, batches in shards:
            for name, bounds in shard.bounds.items():
                self.observers[name].join(bounds.renumbered(batches))
            self.checks.join(shard.checks, (batches[:, None] * size + np.arange(size)).ravel())
            kept |= {int(batches[index]): values for index, values in shard.kept.items()}
            self.batches += len(batches)
            self.images += len(batches) * size
        for batch, arrays in sorted(kept.items()):
            for name, values in arrays.items():
                if batch >= first and self.observers[name].rows < FEW_ROWS:
                    self.observers[name].add_moments(values, batch)

    def statistics(self) -> dict[str, ranges.Statistics]:
        """Statistics by tensor name; for outputs of linears by the name from `ranges.output_of`."""
        found = {name: observer.statistics() for name, observer in sorted(self.observers.items())}
        return {label: each for name, each in found.items() for label in self.observed[name].labels}

    def standing_out(self) -> dict[int, float]:
        """The outlier batches by number, with the median factor by which each widens the ranges that it widens."""
        found = {}
        for batch in {int(number) for observer in self.observers.values() for number in observer.known.holder} - {-1}:
            stretches = [observer.known.stretch(batch) for observer in self.observers.values()]
            stretched = [stretch for stretch in stretches if stretch >= STRETCH]
            if len(stretched) >= SHARE * len(stretches):
                found[batch] = float(np.median(stretched))
        return found

    def state(self) -> Arrays:
        """The state, for `restore`."""
        parts = {name: observer.state() for name, observer in self.observers.items()}
        parts[""] = {"images": np.array(self.images), "batches": np.array(self.batches)}
        if self.checks is not None:
            parts[CHECKS] = self.checks.state()
        return {f"{name}|{key}": array for name, part in parts.items() for key, array in part.items()}

    def restore(self, arrays: Arrays) -> None:
        """Continue an observation of the same graph and images from its state."""
        states: dict[str, Arrays] = {}
        for key, array in arrays.items():
            name, _, field = key.rpartition("|")
            states.setdefault(name, {})[field] = array
        counts = states.pop("")
        if self.checks is not None:
            self.checks.restore(states.pop(CHECKS))
        self.images, self.batches = int(counts["images"]), int(counts["batches"])
        self.observers = {name: Observer.restore(self.observed[name].axis, state) for name, state in states.items()}


def observe(
    model: ir.Model,
    batches: Iterable[npt.NDArray[np.uint8]],
    preprocess: PreprocessSpec,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, ranges.Statistics]:
    """Statistics of the inputs of all linears and convolutions, and of queries and keys with a linear each, over all
    batches; by tensor name, for outputs of linears by `ranges.output_of`.

    Args:
        model: the float graph. It is not changed.
        batches: uint8 [n, height, width, channels] each.
        progress: called with the number of images of each batch.

    Raises:
        DataError: a tensor has a non-finite value.
    """
    with Observation(model, preprocess) as observation:
        for pixels in batches:
            observation.update(pixels)
            progress(len(pixels))
        return observation.statistics()


def observe_shard(
    probe: Probe, pixels: Sequence[Callable[[], Pixels]], names: Sequence[str], kept: Sequence[Collection[str]]
) -> Shard:
    """Observe the batches of a shard, several in parallel if the probe allows it; the result does not depend on that.

    Args:
        pixels: functions that return the batches, uint8 [n, height, width, channels].
        names: the name of each batch for errors.
        kept: for each batch, the tensors whose values are kept.

    Raises:
        DataError: a tensor has a non-finite value. Errors of `pixels` propagate.
    """
    assert probe.preprocess is not None
    checks = prepare.ImageChecks(probe.preprocess)

    def run(batch: int) -> tuple[Pixels, dict[str, Bounds], Arrays]:
        images = pixels[batch]()
        feeds = probe.feeds(images)
        outputs = probe.run(feeds)
        values = {name: by_channel(outputs[name], role.axis) for name, role in probe.observed.items()}
        bounds = {name: Bounds.of(each, batch) for name, each in values.items()}
        for name, each in bounds.items():
            if not each.finite:
                raise probe.not_finite(name, feeds, names[batch])
        return images, bounds, {name: values[name] for name in kept[batch]}

    bounds: dict[str, Bounds] = {}
    held: dict[int, Arrays] = {}
    for batch, (images, found, values) in enumerate(in_order(run, range(len(pixels)), probe.at_once)):
        checks.update(images)
        bounds = {name: each.merged(bounds[name]) if bounds else each for name, each in found.items()}
        if values:
            held[batch] = values
    return Shard(bounds, held, checks)


def in_order(function: Callable[[T], R], items: Sequence[T], at_once: int) -> Iterator[R]:
    """The result for each item, in order, computed in `at_once` threads; at most that number of results is held."""
    if at_once == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(function, item) for item in items[:at_once]]
        try:
            for following in range(at_once, at_once + len(items)):
                yield waiting.pop(0).result()
                if following < len(items):
                    waiting.append(pool.submit(function, items[following]))
        finally:
            for each in waiting:
                each.cancel()


def _sized(shape: ir.Shape | None, batch: ir.Shape | None) -> bool:
    """Whether all sizes of a tensor are fixed, except for the batch."""
    if shape is None or batch is None or not len(shape):
        return False
    return all(isinstance(size, int) for size in list(shape)[1:]) and (
        isinstance(shape[0], int) or str(shape[0]) == str(batch[0])
    )


# --- Measure the magnitudes of every tensor, and the share of values that rounding makes zero, in one pass ------------


LARGEST, LOST = "extremes/largest", "extremes/lost"


class Extremes(ImageProbe):
    """Measures the largest magnitude of every computed float32 tensor on images; in a graph that emulates half
    precision, also the share of each tensor's values that underflow.

    Enter it before `update`. The graph is not changed. Memory does not depend on the number of images.

    Args:
        precision, fix: the precision of the graph and the fix, for errors.
    """

    def __init__(
        self,
        model: ir.Model,
        preprocess: PreprocessSpec,
        precision: str = "float32",
        fix: str = "check the checkpoint and the preprocessing",
    ) -> None:
        self.precision, self.fix, self.images = precision, fix, 0
        probe, self._measured, self._rounded = with_extremes(model)
        self._largest, self._lost = np.zeros(len(self._measured)), np.zeros(len(self._rounded))
        super().__init__(model, preprocess, runner_of(probe, "range pass", as_written=True))

    def update(self, pixels: npt.NDArray[np.uint8], further: Feeds | None = None) -> None:
        """Run one batch, uint8 [n, height, width, channels], with the further inputs of its images, [n, ...] by name.

        Raises:
            DataError: a tensor has a non-finite value; the error names the node that produced it.
        """
        feed = self.feeds(pixels, further)
        outputs = self.run(feed)
        largest = outputs[LARGEST].astype(np.float64)
        broken = [name for name, size in zip(self._measured, largest, strict=True) if not np.isfinite(size)]
        broken += [name for name, array in outputs.items() if array.dtype.kind == "f" and np.isnan(array).any()]
        if broken:
            raise DataError(
                f"the activations are not finite in {self.precision}",
                found=f"{find_nonfinite(self.model, broken[0], feed)}, on image {self.images + 1} or a later one",
                expected="finite activations",
                fix=self.fix,
            )
        self._largest = np.maximum(self._largest, largest)
        if self._rounded:
            self._lost += outputs[LOST].astype(np.float64) * len(pixels)
        self.images += len(pixels)

    def largest(self) -> dict[str, float]:
        """The largest magnitude of each tensor over all images, by name. A tensor that only a rounding reads is
        measured after it."""
        return dict(zip(self._measured, self._largest.tolist(), strict=True))

    def lost(self) -> dict[str, float]:
        """The share of values that rounding made zero, by the name of the tensor before rounding."""
        return dict(zip(self._rounded, (self._lost / max(self.images, 1)).tolist(), strict=True))


def with_extremes(model: ir.Model) -> tuple[ir.Model, list[str], list[str]]:
    """Return a copy of a float graph with one or two more outputs, and the names of the tensors in them: the largest
    magnitude of each tensor, and the share of values that became zero in each tensor rounded to half and back.

    Outputs of layout operations are omitted: they hold the numbers of their inputs.
    """
    probe = model.clone()
    Inference(probe)
    names = Names(probe)
    zero = names.constant(np.array(0, np.float32), "extremes/zero")
    one = names.constant(np.array([1], np.int64), "extremes/one")
    largest, lost = dict[str, ir.Value](), dict[str, ir.Value]()
    for node in [node for node in probe.graph if not (is_layout(node) or _is_fixed(node))]:
        for value in node.outputs:
            if value.dtype != ir.DataType.FLOAT or not value.name or _is_only_rounded(value):
                continue
            behind = _Behind(node, names, value.name)  # right after the node, so that no tensor lives longer
            size = behind.append("ReduceMax", behind.append("Abs", value), keepdims=0)
            largest[str(value.name)] = behind.append("Reshape", size, one)
            before = _before_rounding(value)
            if before is not None:
                was_number = behind.append("Not", behind.append("Equal", before, zero))
                is_lost = behind.append("And", was_number, behind.append("Equal", value, zero))
                ones = behind.append("Cast", is_lost, to=int(ir.DataType.FLOAT))
                lost[str(before.name)] = behind.append("Reshape", behind.append("ReduceMean", ones, keepdims=0), one)
    for name, numbers in ((LARGEST, largest), (LOST, lost)):
        if numbers:
            together = _Behind(probe.graph[-1], names, name).append("Concat", *numbers.values(), axis=0)
            together.name, together.shape = name, ir.Shape([len(numbers)])
            together.type = ir.TensorType(ir.DataType.FLOAT)
            probe.graph.outputs.append(together)
    return probe, list(largest), list(lost)


class _Behind:
    """Inserts nodes after `node`, in order; their names contain `name`."""

    def __init__(self, node: ir.Node, names: Names, name: str) -> None:
        self._last, self._names, self._name, self._count = node, names, f"extremes/{name}", 0

    def append(self, operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = self._names.node(operator, inputs, f"{self._name}/{self._count}", attributes)
        self._last.append(node)
        self._last, self._count = node, self._count + 1
        return node.outputs[0]


def _is_fixed(node: ir.Node) -> bool:
    """Whether a node computes a constant, such as weights in another type."""
    return all(value is None or value.is_initializer() for value in node.inputs)


def _is_only_rounded(value: ir.Value) -> bool:
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(node.op_type == "Cast" and node.outputs[0].dtype in HALVES for node in readers)


def _before_rounding(value: ir.Value) -> ir.Value | None:
    """The float32 tensor that `value` is rounded from; None if it is not a rounded tensor."""
    up = value.producer()
    down = up.inputs[0].producer() if up is not None and up.op_type == "Cast" and up.inputs[0] is not None else None
    if down is None or down.op_type != "Cast" or down.outputs[0].dtype not in HALVES:
        return None
    return down.inputs[0]
