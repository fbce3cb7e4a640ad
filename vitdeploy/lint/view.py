"""Prepare a graph for rules (a copy with constants as initializers and with inferred types and shapes), and define
rules and findings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from vitdeploy.graph.analysis.rows import MOVES, climb
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.values import is_constant
from vitdeploy.lint.support import Support
from vitdeploy.runtime.profiles import Profile

QDQ = frozenset({"QuantizeLinear", "DequantizeLinear"})
# Operators whose second input holds the weights, where it is constant.
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class GraphView:
    """A prepared graph. `declared`: the output types in the file; in `model` outputs have their computed types.

    `profiles`: None skips the rules on profiles.
    """

    model: ir.Model
    declared: Mapping[str, ir.DataType | None]
    profiles: Sequence[Profile] | None = None

    @property
    def opset(self) -> int:
        return int(self.model.graph.opset_imports.get("", 0))

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of ONNX's own domain in the main graph."""
        return tuple(node for node in self.model.graph if not node.domain)

    def of(self, *operators: str) -> Iterator[ir.Node]:
        return (node for node in self.nodes if node.op_type in operators)

    @cached_property
    def values(self) -> tuple[ir.Value, ...]:
        """All tensors of the main graph: inputs, initializers, and what nodes compute."""
        graph = self.model.graph
        computed = [value for node in graph for value in node.outputs]
        return tuple(dict.fromkeys((*graph.inputs, *graph.initializers.values(), *computed)))

    def typed_inputs(self, node: ir.Node) -> Iterator[tuple[ir.Value, Any]]:
        """Return the inputs of known type, each with its parameter in ONNX's schema."""
        try:
            parameters = onnx.defs.get_schema(node.op_type, self.opset, "").inputs
        except onnx.defs.SchemaError:
            return
        for index, value in enumerate(node.inputs if parameters else ()):
            parameter = parameters[min(index, len(parameters) - 1)]  # the last one may stand for many
            if value is not None and value.dtype is not None and (parameter.is_homogeneous or index < len(parameters)):
                yield value, parameter


def prepare(model: ir.Model, profiles: Sequence[Profile] | None = None) -> GraphView:
    """Return a view of a copy of `model`. Weights are shared, and stay on disk until a rule reads them."""
    copy = model.clone()
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    declared = {str(value.name): value.dtype for value in copy.graph.outputs}
    for value in copy.graph.outputs:
        if value.producer() is not None:
            value.type = None
    Inference(copy)
    return GraphView(copy, declared, profiles)


def label(node: ir.Node) -> str:
    return str(node.name or f"the {node.op_type} of {node.outputs[0].name}")


def type_name(dtype: ir.DataType | None) -> str:
    """Return ONNX's name of a type: "float", "float16", "int8" ..."""
    return dtype.name.lower() if dtype is not None else "unknown"


def listed(dtypes: Sequence[ir.DataType] | frozenset[ir.DataType]) -> str:
    return ", ".join(type_name(dtype) for dtype in sorted(dtypes))


def shape_text(value: ir.Value) -> str:
    if value.shape is None:
        return "[?]"
    return "[" + ", ".join(str(size) if isinstance(size, int) else str(size.value or "?") for size in value.shape) + "]"


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value depends on constants only, also if quantized, dequantized, cast or moved."""
    if value is None:
        return False
    end, way = climb(value, MOVES | QDQ | {"Cast"})
    others = [other for node in way for other in node.inputs[1:] if other is not None]
    return is_constant(end) and all(is_constant(other) for other in others)


def quantized_type(node: ir.Node) -> ir.DataType | None:
    """Return the type that a QuantizeLinear writes by ONNX's rules, or that a DequantizeLinear reads."""
    if node.op_type == "DequantizeLinear":
        return node.inputs[0].dtype if node.inputs[0] is not None else None
    zero, named = zero_point(node), node.attributes.get_int("output_dtype", 0)
    if zero is not None:
        return zero.dtype
    return ir.DataType(named) if named else ir.DataType.UINT8


def zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


# --- Rules, which are pure functions over a prepared graph, and their findings, one per node (or tensor) and rule -----


# error: TensorRT would reject the graph or compute it wrongly; warning: slower or unfused; note: information.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class LintFinding:
    """A finding. `rule`: the stable code; `node`: a node or tensor; `versions`: the releases that it applies to."""

    rule: str
    severity: Severity
    node: str
    found: str
    expected: str
    fix: str
    versions: tuple[str, ...]


class Hit(NamedTuple):
    """A rule's finding at one node or tensor. `expected` and `fix` override those of the rule."""

    node: str
    found: str
    expected: str = ""
    fix: str = ""


Check = Callable[[GraphView, Support], Iterable[Hit]]


@dataclass(frozen=True)
class Rule:
    """A rule that `check` applies to a graph. `expected` and `fix` are the defaults of its findings.

    `by_release`: whether the result depends on the release; if not, `check` is called once for all releases.
    """

    code: str
    severity: Severity
    expected: str
    fix: str
    check: Check
    by_release: bool = False


def rule(
    code: str, severity: Severity, expected: str, fix: str, *, by_release: bool = False
) -> Callable[[Check], Rule]:
    """Turn the decorated check into a rule."""
    return lambda check: Rule(code, severity, expected, fix, check, by_release)
