"""Optimisation profiles of TensorRT engines: the shape ranges that an engine is built for, and the choice of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitdeploy.errors import TargetError, TensorError
from vitdeploy.spec import TensorSpec

Shape = tuple[int, ...]
Batches = tuple[int, int, int]


@dataclass(frozen=True)
class Range:
    """The minimum, optimum and maximum shape of one input."""

    smallest: Shape
    best: Shape
    largest: Shape

    def holds(self, expected: Sequence[int | None]) -> bool:
        """Return whether every requested size (None: any) is in the range."""
        return len(expected) == len(self.best) and all(
            size is None or low <= size <= high
            for low, size, high in zip(self.smallest, expected, self.largest, strict=True)
        )

    def fill(self, expected: Sequence[int | None]) -> Shape:
        return tuple(best if size is None else size for best, size in zip(self.best, expected, strict=True))

    def spread(self) -> int:
        return sum(high - low for low, high in zip(self.smallest, self.largest, strict=True))

    def __str__(self) -> str:
        axes = zip(self.smallest, self.largest, strict=True)
        return "[" + ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in axes) + "]"


Profile = Mapping[str, Range]


def plan_profiles(
    inputs: Sequence[TensorSpec], batches: Sequence[Batches], sizes: Sequence[tuple[int, int]] = ()
) -> list[dict[str, Range]]:
    """Return a profile for every (smallest, best, largest) batch at every image size (height, width).

    A graph without dynamic axes needs no profile. A string in a TensorSpec's shape is a dynamic axis: the leading one
    is the batch, two others of an image input are its height and width.

    Raises:
        TargetError: another dynamic axis, a missing image size, or a size that the graph does not have.
    """
    for tensor in inputs:
        for size in sizes:
            _refuse_other_size(tensor, size)
    if all(isinstance(size, int) for tensor in inputs for size in tensor.shape):
        return []
    chosen: Sequence[tuple[int, int] | None] = sizes or [None]
    return [{tensor.name: _range(tensor, batch, size) for tensor in inputs} for size in chosen for batch in batches]


def _refuse_other_size(tensor: TensorSpec, size: tuple[int, int]) -> None:
    if len(tensor.shape) == 4 and [resolve(tensor, 1, size)[axis] for axis in _image_axes(tensor.shape)] != [*size]:
        raise TargetError(
            f"{tensor.name!r} has a fixed image size",
            found=str(tensor),
            expected=f"{size[0]}x{size[1]}, or dynamic axes",
            fix="export a graph for each size: image_sizes in a recipe, or `vitdeploy export --image-size`",
        )


def _range(tensor: TensorSpec, batch: Batches, size: tuple[int, int] | None) -> Range:
    shapes = [tuple(resolve(tensor, count, size)) for count in batch]
    if any(length is None for shape in shapes for length in shape):
        raise TargetError(
            f"TensorRT needs a range for every dynamic axis of {tensor.name!r}",
            found=str(tensor),
            expected="a dynamic batch only, or given image sizes",
            fix="export with fixed sizes",
        )
    smallest, best, largest = (tuple(length or 0 for length in shape) for shape in shapes)
    return Range(smallest, best, largest)


def resolve(tensor: TensorSpec, batch: int, size: tuple[int, int] | None) -> list[int | None]:
    """Return the shape with its dynamic axes replaced: the leading one by `batch`, those of an image by `size`; None if
    unknown."""
    shape: list[int | None] = [length if isinstance(length, int) else None for length in tensor.shape]
    if shape and shape[0] is None:
        shape[0] = batch
    if size is not None and len(shape) == 4:
        for axis, length in zip(_image_axes(shape), size, strict=True):
            shape[axis] = length if shape[axis] is None else shape[axis]
    return shape


def _image_axes(shape: Sequence[int | str | None]) -> tuple[int, int]:
    """Height and width in [batch, height, width, channels] or [batch, channels, height, width]."""
    return (1, 2) if shape[3] in (1, 3) else (2, 3)


def choose_profile(
    profiles: Sequence[Profile], inputs: Sequence[TensorSpec], batch: int, size: tuple[int, int] | None, name: str
) -> tuple[int, dict[str, Shape]]:
    """Return the index of the tightest profile that covers the batch (and image size), and every input's shape in it.

    Raises:
        TensorError: no profile covers them; the error lists the ranges.
    """
    expected = {tensor.name: resolve(tensor, batch, size) for tensor in inputs}
    fitting = [
        (sum(profile[key].spread() for key in expected), index)
        for index, profile in enumerate(profiles)
        if all(profile[key].holds(shape) for key, shape in expected.items())
    ]
    if not fitting:
        ranges = " or ".join(", ".join(f"{key} {profile[key]}" for key in expected) for profile in profiles)
        at = f"batch {batch}" + (f" and the image size {size[0]}x{size[1]}" if size else "")
        raise TensorError(
            f"{name} was not built for {at}",
            found=", ".join(f"{key} [{', '.join(str(s or '?') for s in shape)}]" for key, shape in expected.items()),
            expected=ranges,
            fix="vitdeploy compile engines/tensorrt/graph.onnx --target tensorrt --batch N -o DIR",
        )
    _, index = min(fitting)
    return index, {key: profiles[index][key].fill(shape) for key, shape in expected.items()}
