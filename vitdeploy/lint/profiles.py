"""Rules on dynamic axes and the optimisation profiles that cover them (TRT5xx)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vitdeploy.lint.support import Support
from vitdeploy.lint.view import GraphView, Hit, rule, shape_text
from vitdeploy.runtime.profiles import Range


def _free(value: ir.Value) -> list[int]:
    """The axes of an input whose size the graph leaves open."""
    return [axis for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]


@rule(
    "TRT501",
    "warning",
    "no dynamic axis but the leading one",
    "export a graph for each image size: kernels for a range of sizes are slower, and attention in int8 needs a known "
    "length",
)
def _inner_axes(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.inputs:
        inner = [axis for axis in _free(value) if axis]
        if inner:
            yield Hit(str(value.name), f"{shape_text(value)}: dynamic along axis {', '.join(map(str, inner))}")


@rule(
    "TRT502", "error", "a profile entry for each input with a dynamic axis", "give its smallest, best and largest shape"
)
def _without_profile(view: GraphView, support: Support) -> Iterator[Hit]:
    if view.profiles is None:
        return
    for value in view.model.graph.inputs:
        if not _free(value):
            continue
        missing = [str(index) for index, profile in enumerate(view.profiles) if value.name not in profile]
        if missing:
            yield Hit(str(value.name), f"profile {', '.join(missing)} does not have it")
        elif not view.profiles:
            yield Hit(str(value.name), f"{shape_text(value)}, and no profile")


@rule("TRT503", "error", "1 <= smallest <= best <= largest along each axis", "put the three shapes in order")
def _out_of_order(view: GraphView, support: Support) -> Iterator[Hit]:
    for where, _, found in _entries(view):
        for axis, sizes in enumerate(zip(found.smallest, found.best, found.largest, strict=False)):
            if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                yield Hit(where, f"{' <= '.join(map(str, sizes))} along axis {axis}")


@rule(
    "TRT504", "error", "profiles of the graph's inputs that keep their fixed sizes", "give the graph's own size there"
)
def _contradictions(view: GraphView, support: Support) -> Iterator[Hit]:
    inputs = {str(value.name): value for value in view.model.graph.inputs}
    for where, name, found in _entries(view):
        value = inputs.get(name)
        if value is None:
            yield Hit(where, "the graph has no such input", f"one of {', '.join(inputs)}")
            continue
        if value.shape is None:
            continue
        sizes = list(value.shape)
        for shape in (found.smallest, found.best, found.largest):
            fits = len(shape) == len(sizes) and all(
                own == size for own, size in zip(sizes, shape, strict=True) if isinstance(own, int)
            )
            if not fits:
                yield Hit(where, f"{list(shape)} for {shape_text(value)}")
                break


def _entries(view: GraphView) -> Iterator[tuple[str, str, Range]]:
    """(how to call it, input, shapes) of each entry of each profile."""
    for index, profile in enumerate(view.profiles or ()):
        for name, found in profile.items():
            yield f"{name} of profile {index}", name, found


RULES = (_inner_axes, _without_profile, _out_of_order, _contradictions)
