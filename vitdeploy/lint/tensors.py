"""Rules on tensors: operand types in strongly typed networks (TRT2xx), dynamic axes and the optimisation profiles that
cover them (TRT5xx), constants with infinity or NaN (TRT6xx).

TensorRT 11 has only strongly typed networks, and vitdeploy sets TensorRT 10 to them. They run in the types of the
graph, without implicit casts. ONNX's schemas define which inputs of an operator share a type; TensorRT requires it of
more.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES
from vitdeploy.graph.values import array_of
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, label, rule, shape_text, type_name
from vitdeploy.runtime.profiles import Range

_NORMS = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)


@rule(
    "TRT201",
    "error",
    "operands of one type",
    "store constants in the type of the other operand, or Cast at the border of the FP32 region",
)
def _operands(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        if node.op_type in _NORMS | QDQ:  # they have their own rules
            continue
        shared: dict[str, list[ir.Value]] = {}
        for value, parameter in view.typed_inputs(node):
            shared.setdefault(parameter.type_str, []).append(value)
        for values in shared.values():
            if len({value.dtype for value in values}) > 1:
                yield Hit(label(node), f"{node.op_type} of {_types(values)}")


@rule(
    "TRT202",
    "error",
    "input, scale and bias of a normalisation in one type",
    "store scale and bias in the input's type, or Cast the input to float and the result back",
    by_release=True,
)
def _norms(view: GraphView, support: Support) -> Iterator[Hit]:
    """TensorRT 10.7 added BatchNormalization with mixed types."""
    for node in view.of(*sorted(_NORMS - {"BatchNormalization"} if support.release >= (10, 7) else _NORMS)):
        values = [value for value in node.inputs if value is not None and value.dtype is not None]
        if len({value.dtype for value in values}) > 1:
            yield Hit(label(node), f"{node.op_type} of {_types(values)}")


@rule("TRT203", "error", "base and exponent of one type", "store the exponent in the base's type", by_release=True)
def _powers(view: GraphView, support: Support) -> Iterator[Hit]:
    """TensorRT 10.8 added integer exponents whose type differs from the base's."""
    for node in view.of("Pow"):
        base, exponent = (value.dtype if value is not None else None for value in node.inputs)
        if base is None or exponent is None or base == exponent:
            continue
        if exponent.is_floating_point() or support.release < (10, 8):
            yield Hit(label(node), f"{type_name(base)} to the power of {type_name(exponent)}")


@rule(
    "TRT204",
    "error",
    "outputs in the type that the graph declares",
    "Cast before the output, or declare the computed type",
)
def _outputs(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.outputs:
        declared = view.declared[str(value.name)]
        if value.dtype is not None and declared is not None and value.dtype != declared:
            found = f"{type_name(value.dtype)}, declared as {type_name(declared)}"
            yield Hit(str(value.name), found, f"{type_name(declared)}, as declared")


def _types(values: Sequence[ir.Value]) -> str:
    return ", ".join(f"{type_name(value.dtype)} {value.name}" for value in values)


# --- Dynamic axes, and the profiles that cover them -------------------------------------------------------------------


def _free(value: ir.Value) -> list[int]:
    """Return the dynamic axes of an input."""
    return [axis for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]


@rule(
    "TRT501",
    "warning",
    "no dynamic axis except the leading one",
    "export one graph per image size: kernels for a range of sizes are slower, and attention in int8 needs a known "
    "length",
)
def _inner_axes(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.inputs:
        inner = [axis for axis in _free(value) if axis]
        if inner:
            yield Hit(str(value.name), f"{shape_text(value)}: dynamic along axis {', '.join(map(str, inner))}")


@rule(
    "TRT502", "error", "a profile entry for each input with a dynamic axis", "set its smallest, best and largest shape"
)
def _without_profile(view: GraphView, support: Support) -> Iterator[Hit]:
    if view.profiles is None:
        return
    for value in view.model.graph.inputs:
        if not _free(value):
            continue
        missing = [str(index) for index, profile in enumerate(view.profiles) if value.name not in profile]
        if missing:
            yield Hit(str(value.name), f"missing from profile {', '.join(missing)}")
        elif not view.profiles:
            yield Hit(str(value.name), f"{shape_text(value)} without a profile")


@rule("TRT503", "error", "1 <= smallest <= best <= largest along each axis", "put the three shapes in order")
def _out_of_order(view: GraphView, support: Support) -> Iterator[Hit]:
    for where, _, found in _entries(view):
        for axis, sizes in enumerate(zip(found.smallest, found.best, found.largest, strict=False)):
            if not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                yield Hit(where, f"{' <= '.join(map(str, sizes))} along axis {axis}")


@rule("TRT504", "error", "profiles that name the graph's inputs and keep fixed sizes", "use the size from the graph")
def _contradictions(view: GraphView, support: Support) -> Iterator[Hit]:
    inputs = {str(value.name): value for value in view.model.graph.inputs}
    for where, name, found in _entries(view):
        value = inputs.get(name)
        if value is None:
            yield Hit(where, "no input of this name", f"one of {', '.join(inputs)}")
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
    """Return (label, input name, shapes) of each entry of each profile."""
    for index, profile in enumerate(view.profiles or ()):
        for name, found in profile.items():
            yield f"{name} of profile {index}", name, found


# --- Constants: infinity from a cast to half precision, and NaN -------------------------------------------------------


_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLOATS = _HALF | {ir.DataType.FLOAT}
# Bounds that may be infinite.
_BOUNDS = frozenset({"Clip", "Max", "Min", "Pad"})


@rule(
    "TRT601",
    "error",
    "constants within the range of their type (float16: 65,504)",
    "keep the operator that reads it in float, or scale the residual stream by a power of two",
)
def _overflowed(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.initializers.values():
        array = _floats(value, _HALF)
        if array is None:
            continue
        infinite = array[np.isinf(array)]
        if infinite.size and not _may_be_infinite(value, bool((infinite < 0).all())):
            found = f"{infinite.size} of {array.size} numbers are infinite in {type_name(value.dtype)}"
            yield Hit(str(value.name), found)


def _may_be_infinite(value: ir.Value, negative: bool) -> bool:
    """Bounds may be infinite, and masks may hold minus infinity: they reach the softmax through additions only."""
    return all(use.node.op_type in _BOUNDS or (negative and _masks(use.node)) for use in value.uses())


def _masks(node: ir.Node) -> bool:
    stack, seen = [node], set[ir.Node]()
    while stack:
        current = stack.pop()
        if current.op_type == "Softmax":
            return True
        if current not in seen and current.op_type in MOVES | {"Add", "Cast", "Concat", "Where"}:
            seen.add(current)
            stack += [use.node for output in current.outputs for use in output.uses()]
    return False


@rule("TRT602", "error", "constants without NaN", "find the step that produced it: the checkpoint, a fold or a cast")
def _not_numbers(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.initializers.values():
        array = _floats(value, _FLOATS)
        count = int(np.isnan(array).sum()) if array is not None else 0
        if array is not None and count:
            yield Hit(str(value.name), f"{count} of {array.size} numbers are NaN")


def _floats(value: ir.Value, types: frozenset[ir.DataType]) -> npt.NDArray[np.float32] | None:
    """Return a constant of one of these types as float32; others are not read from disk."""
    array = array_of(value, overridable=True) if value.dtype in types else None
    return array.astype(np.float32, copy=False) if array is not None else None
