"""Observers: what tensors hold, as ranges and statistics."""

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
from vitdeploy.graph.io.files import weights_folder
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
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.spec import PreprocessSpec

# --- One streaming pass over the calibration images, or whatever else a graph takes, on the ONNX graph itself ---------
# The tensors to observe become outputs of the graph; each batch updates fixed-size statistics and is forgotten.


# One image at a time: larger batches are no faster for models that take long, and need more memory.
BATCH = 1
# An image stands out where it makes this share of all ranges this much wider than all others do. Of 8 to 64 photographs
# none reaches a share of 0.05, on ViT-Tiny and DETR; noise has 0.42 on DETR (normalisations keep it at 0.04 on a ViT).
STRETCH, SHARE = 1.25, 0.25
CHECKS = "|checks"

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    """What a shard of the calibration images says: all that an observation needs of any images but the first.

    Bounds, and the checks of the images, merge to the same bytes in any order. Moments are sums of floats, which do
    not; but those of most tensors are of the first images alone. Of the others, which have few rows an image, such as a
    class token's, the rows themselves are kept, so that they can be added in the order of the images.

    `bounds`: by tensor. `kept`: by the number of the batch in the shard, what is kept of it: float32
    [..., channels, ...] with three axes, by tensor."""

    bounds: Mapping[str, Bounds]
    kept: Mapping[int, Arrays]
    checks: prepare.ImageChecks

    def to_arrays(self) -> Arrays:
        """All of it, as `from_arrays` takes it."""
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
        """What `to_arrays` gave. KeyError, ValueError or IndexError of any others."""
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
    """The statistics of all observed tensors of a graph, while images are shown to it, or feeds of any kind.

    Args:
        total: how many images will be shown, where that is known: without, more may be kept than can be used.
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
        """Show one batch, uint8 [n, height, width, channels]. `names` are those of its images, for errors.

        Raises:
            DataError: a tensor took a value that is not finite; names the node where it arose, and the images.
        """
        feeds = self.feeds(pixels)
        self.take(pixels, feeds, self.run(feeds), names)

    def take(self, pixels: npt.NDArray[np.uint8], feeds: Feeds, outputs: Arrays, names: Sequence[str] = ()) -> None:
        """As `update`, with what `run` gave of the feeds of these pixels."""
        assert self.checks is not None
        first, last = self.images + 1, f" to {self.images + len(pixels)}" * (len(pixels) > 1)
        self._add(feeds, outputs, ", ".join(names) or f"image {first}{last}", "images")
        self.checks.update(pixels)

    def show(self, feeds: Feeds, shown: str, noun: str = "images") -> Arrays:
        """Show what the graph takes in one run, and return what it gives. `shown` names the samples, which are a kind
        of `noun`, for errors, as of `update`."""
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
        """Once all but few rows are known, of each tensor that is to have more of them the number of the batch before
        which it has enough, of `batches` in all."""
        shapes = {str(value.name): value.shape for node in self.model.graph for value in node.outputs}
        shapes |= {str(value.name): value.shape for value in self.model.graph.inputs}
        batch = self.model.graph.inputs[0].shape
        found = {}
        for name, observer in self.observers.items():
            if observer.rows < FEW_ROWS:
                # A batch has one row at least, and as many as those before where no other size is open.
                rows = observer.rows // self.batches if _sized(shapes.get(name), batch) else 1
                found[name] = min(self.batches + math.ceil((FEW_ROWS - observer.rows) / rows), batches)
        return found

    def images_for(self, rows: int) -> int:
        """How many images it takes until each tensor with so many rows an image has as many as it is to have."""
        known = [each.rows for each in self.observers.values() if rows * self.images <= each.rows < FEW_ROWS]
        return math.ceil(FEW_ROWS * self.images / min(known)) if known else 0

    def join(self, shards: Iterable[tuple[Shard, Ints]], size: int) -> None:
        """All batches: shards of them in any order, each with the numbers of its batches, of `size` images; of those
        that were shown here the moments are known. What is known then is what showing all batches in their order would
        have left, to the last bit."""
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
        """Statistics by tensor name; for outputs by the name that `scores.output_of` gives."""
        found = {name: observer.statistics() for name, observer in sorted(self.observers.items())}
        return {label: each for name, each in found.items() for label in self.observed[name].labels}

    def standing_out(self) -> dict[int, float]:
        """The batches that stand out, by number, and how many times as wide each makes these ranges, in the median."""
        found = {}
        for batch in {int(number) for observer in self.observers.values() for number in observer.known.holder} - {-1}:
            stretches = [observer.known.stretch(batch) for observer in self.observers.values()]
            stretched = [each for each in stretches if each >= STRETCH]
            if len(stretched) >= SHARE * len(stretches):
                found[batch] = float(np.median(stretched))
        return found

    def state(self) -> Arrays:
        """Everything that `restore` needs to go on."""
        parts = {name: observer.state() for name, observer in self.observers.items()}
        parts[""] = {"images": np.array(self.images), "batches": np.array(self.batches)}
        if self.checks is not None:
            parts[CHECKS] = self.checks.state()
        return {f"{name}|{key}": array for name, part in parts.items() for key, array in part.items()}

    def restore(self, arrays: Arrays) -> None:
        """Go on where the observation stood that gave this state, of the same graph and images."""
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
    """Statistics of the input of every linear and convolution, and of queries and keys that have a linear each, over
    all batches; by tensor name, and for outputs as `scores.output_of` says.

    Args:
        model: the float graph. It is not changed.
        batches: uint8 [n, height, width, channels] each.
        progress: called with the number of images of each batch.

    Raises:
        DataError: a tensor took a value that is not finite.
    """
    with Observation(model, preprocess) as observation:
        for pixels in batches:
            observation.update(pixels)
            progress(len(pixels))
        return observation.statistics()


def observe_shard(
    probe: Probe, pixels: Sequence[Callable[[], Pixels]], names: Sequence[str], kept: Sequence[Collection[str]]
) -> Shard:
    """Show a graph the batches of a shard, several at a time where it runs so; the shard is the same then.

    Args:
        pixels: what gives each batch, uint8 [n, height, width, channels].
        names: of each, for errors.
        kept: of each, the tensors whose values are kept.

    Raises:
        DataError: a tensor took a value that is not finite. Errors of `pixels` propagate.
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
    """The result of each item, in order; so many are worked on at a time, in threads, and no more are held."""
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
    """Whether no size of a tensor is open but its first, that of the batch."""
    if shape is None or batch is None or not len(shape):
        return False
    return all(isinstance(size, int) for size in list(shape)[1:]) and (
        isinstance(shape[0], int) or str(shape[0]) == str(batch[0])
    )


# --- Measure the magnitudes of every tensor, and how many values rounding makes zero, in one pass over images ---------


LARGEST, LOST = "extremes/largest", "extremes/lost"


class Extremes(ImageProbe):
    """The largest magnitude of every float32 tensor that a node of the graph computes, and of a graph that emulates
    half precision the share of each tensor's numbers that underflow, while images are shown to it.

    To be entered before `update`. The graph is not changed. Memory does not depend on the number of images.

    Args:
        precision, fix: what errors say of the graph, and what would fix them.
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
        data = ir.to_proto(probe).SerializeToString()
        runner = OnnxRuntimeRunner(data, name="range pass", weights=weights_folder(model), as_written=True)
        super().__init__(model, preprocess, runner)

    def update(self, pixels: npt.NDArray[np.uint8], further: Feeds | None = None) -> None:
        """Show one batch, uint8 [n, height, width, channels], with what its images bring besides, [n, ...] by name.

        Raises:
            DataError: a tensor took a value that is not finite; names the node where it arose.
        """
        feed = self.feeds(pixels, further)
        outputs = self.run(feed)
        largest = outputs[LARGEST].astype(np.float64)
        broken = [name for name, size in zip(self._measured, largest, strict=True) if not np.isfinite(size)]
        broken += [name for name, array in outputs.items() if array.dtype.kind == "f" and np.isnan(array).any()]
        if broken:
            raise DataError(
                f"the activations are not finite in {self.precision}",
                found=f"{find_nonfinite(self.model, broken[0], feed)}, on image {self.images + 1} or one after it",
                expected="finite activations",
                fix=self.fix,
            )
        self._largest = np.maximum(self._largest, largest)
        if self._rounded:
            self._lost += outputs[LOST].astype(np.float64) * len(pixels)
        self.images += len(pixels)

    def largest(self) -> dict[str, float]:
        """The largest magnitude of each tensor over all images, by name. What only a rounding reads is measured behind
        it."""
        return dict(zip(self._measured, self._largest.tolist(), strict=True))

    def lost(self) -> dict[str, float]:
        """The share of the numbers of each rounded tensor that the rounding made zero, by the name of the tensor as it
        was before."""
        return dict(zip(self._rounded, (self._lost / max(self.images, 1)).tolist(), strict=True))


def with_extremes(model: ir.Model) -> tuple[ir.Model, list[str], list[str]]:
    """A copy of a float graph with one or two outputs more: the largest magnitude of each tensor, and of each tensor
    that is rounded to half precision and back the share of its numbers that became zero. Then the names of both.

    Tensors that layout operations make hold no other numbers than those they are made of, and are left out.
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
            behind = _Behind(node, names, value.name)  # so that no tensor is kept for longer than it was
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
    """Puts nodes behind `node`, in their order; their names have `name` in them."""

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
    """The float32 tensor that `value` is the rounded one of, if it is."""
    up = value.producer()
    down = up.inputs[0].producer() if up is not None and up.op_type == "Cast" and up.inputs[0] is not None else None
    if down is None or down.op_type != "Cast" or down.outputs[0].dtype not in HALVES:
        return None
    return down.inputs[0]
