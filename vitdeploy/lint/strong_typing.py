"""Rules of strongly typed networks: TensorRT 11 has no others, and TensorRT 10 is set to it (TRT2xx).

Nothing is cast for the user there: the types of the graph are those that run. ONNX's schemas name which inputs of an
operator share a type; TensorRT demands it of some more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from vitdeploy.lint.support import Support
from vitdeploy.lint.view import QDQ, GraphView, Hit, label, rule, type_name

_NORMS = frozenset(
    {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"}
)


@rule(
    "TRT201",
    "error",
    "operands of one type",
    "write constants in the type of the other operand, or Cast at the border of the FP32 island",
)
def _operands(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.nodes:
        if node.op_type in _NORMS | QDQ:  # which have rules of their own
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
    "write scale and bias in the input's type, or Cast the input to float and the result back",
    by_release=True,
)
def _norms(view: GraphView, support: Support) -> Iterator[Hit]:
    """BatchNormalization of several types came with 10.7."""
    for node in view.of(*sorted(_NORMS - {"BatchNormalization"} if support.release >= (10, 7) else _NORMS)):
        values = [value for value in node.inputs if value is not None and value.dtype is not None]
        if len({value.dtype for value in values}) > 1:
            yield Hit(label(node), f"{node.op_type} of {_types(values)}")


@rule("TRT203", "error", "base and exponent of one type", "write the exponent in the base's type", by_release=True)
def _powers(view: GraphView, support: Support) -> Iterator[Hit]:
    """Exponents of another type: integer ones came with 10.8."""
    for node in view.of("Pow"):
        base, exponent = (value.dtype if value is not None else None for value in node.inputs)
        if base is None or exponent is None or base == exponent:
            continue
        if exponent.is_floating_point() or support.release < (10, 8):
            yield Hit(label(node), f"{type_name(base)} to the power of {type_name(exponent)}")


@rule(
    "TRT204",
    "error",
    "outputs of the type that the graph declares",
    "Cast in front of the output, or declare the type that is computed",
)
def _outputs(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.outputs:
        declared = view.declared[str(value.name)]
        if value.dtype is not None and declared is not None and value.dtype != declared:
            found = f"{type_name(value.dtype)}, declared as {type_name(declared)}"
            yield Hit(str(value.name), found, f"{type_name(declared)}, as declared")


def _types(values: Sequence[ir.Value]) -> str:
    return ", ".join(f"{type_name(value.dtype)} {value.name}" for value in values)


RULES = (_operands, _norms, _powers, _outputs)
