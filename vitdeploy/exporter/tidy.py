"""Names that a person can read, and no trace of the machine: what the dynamo exporter leaves behind, put in order.

The exporter writes the module path of every node, together with stack traces and absolute source paths, into metadata.
The path becomes the node's name ("blocks.7.mlp.fc2/MatMul"), and all metadata goes.
"""

from __future__ import annotations

import ast

import onnx_ir as ir
from onnx_ir.passes.common import ClearMetadataAndDocStringPass

from vitdeploy.graph.edit import free_name

SCOPES = "pkg.torch.onnx.name_scopes"


def tidy(model: ir.Model, prefix: str) -> None:
    """Rename nodes and tensors after their modules (below the attribute `prefix`) and strip all metadata. In place."""
    _adopt_constants(model)
    taken: set[str] = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
    initializers = {str(value.name): value for value in model.graph.initializers.values()}
    for i, value in enumerate(initializers.values()):
        value.name = f"initializer {i}"  # out of the way: one may be given the name that another still has
    for name, value in initializers.items():
        _rename(value, name.removeprefix(f"{prefix}."), taken)
    for node in model.graph:
        scope = _module_path(node, prefix)
        _name_weight(node, scope, taken)
        node.name = free_name(f"{scope}/{node.op_type}" if scope else node.op_type, taken)
        for i, output in enumerate(node.outputs):
            if not output.is_graph_output():
                output.name = node.name if len(node.outputs) == 1 else free_name(f"{node.name}.{i}", taken)
    strip(model)


def _adopt_constants(model: ir.Model) -> None:
    """Constants that nodes read and no graph has become initializers: onnxscript's fusion of two Clips forgets it."""
    known = set(model.graph.initializers.values())
    taken = {str(value.name) for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    for node in model.graph:
        for value in node.inputs:
            stray = value is not None and value.producer() is None and value not in known
            if value is not None and stray and value.const_value is not None and not value.is_graph_input():
                value.name = free_name(f"{value.name}_of_{node.name}", taken)
                value.const_value.name = value.name
                model.graph.register_initializer(value)
                known.add(value)


def strip(model: ir.Model) -> None:
    """Remove every doc string and all metadata of the model, its graph, its nodes and its tensors. In place."""
    ClearMetadataAndDocStringPass()(model)
    for value in (
        *model.graph.inputs,
        *model.graph.initializers.values(),
        *(v for node in model.graph for v in node.outputs),
    ):
        value.metadata_props.clear()
        value.doc_string = None
        if value.const_value is not None:
            value.const_value.metadata_props.clear()
            value.const_value.doc_string = None
    model.producer_name, model.producer_version = "vitdeploy", None
    model.domain = model.doc_string = model.graph.doc_string = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()


def _module_path(node: ir.Node, prefix: str) -> str:
    """The path of the innermost module, without the wrapper: the last entry of the scopes is the operation itself."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    path = str(scopes[-2]) if len(scopes) > 1 else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else ""


def _name_weight(node: ir.Node, scope: str, taken: set[str]) -> None:
    """A linear's weight, transposed by constant folding, lost its name: give it back as `<module>.weight_t`."""
    weight = node.inputs[1] if node.op_type == "MatMul" and len(node.inputs) == 2 else None
    if weight is not None and weight.is_initializer() and str(weight.name).startswith("val_") and scope:
        _rename(weight, f"{scope}.weight_t", taken)


def _rename(value: ir.Value, name: str, taken: set[str]) -> None:
    value.name = free_name(name, taken)
    if value.const_value is not None:
        value.const_value.name = value.name
