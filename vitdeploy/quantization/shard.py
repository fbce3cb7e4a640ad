"""What a shard of the calibration images says: all that an observation needs of any images but the first.

Bounds, and the checks of the images, merge to the same bytes in any order. Moments are sums of floats, which do not;
but those of most tensors are of the first images alone. Of the others, which have few rows an image, such as a class
token's, the rows themselves are kept, so that they can be added in the order of the images.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vitdeploy.quantization.observer import BOUNDS, Arrays, by_channel
from vitdeploy.quantization.prepare import ImageChecks
from vitdeploy.quantization.probe import Probe
from vitdeploy.quantization.ranges import Bounds
from vitdeploy.spec import PreprocessSpec

T = TypeVar("T")
R = TypeVar("R")
Ints = npt.NDArray[np.int64]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    """`bounds`: by tensor. `kept`: by the number of the batch in the shard, what is kept of it: float32
    [..., channels, ...] with three axes, by tensor."""

    bounds: Mapping[str, Bounds]
    kept: Mapping[int, Arrays]
    checks: ImageChecks

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
        checks = ImageChecks(preprocess)
        checks.restore(parts["checks"][""])
        bounds = {name: Bounds(*(each[field] for field in BOUNDS)) for name, each in parts["bounds"].items()}
        return cls(bounds, kept, checks)


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
    checks = ImageChecks(probe.preprocess)

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
