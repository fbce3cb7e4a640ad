"""Export the float graph of a module in the form that a placement was made from."""

import functools
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from torch import nn

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io import admit, files
from vitdeploy.graph.passes.optimize import OptimizeOptions, optimize
from vitdeploy.graph.values import stem
from vitdeploy.models.external.adapted import Adapted
from vitdeploy.qat.layers import INSERTED, read_placed, weighted
from vitdeploy.quantization.placement import shape
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.runtime.tasks.registry import flow_of

# Operators that a placement fuses (with a bias, or into attention), and operators that it adds.
_FUSED = ("MatMul", "Add", "Softmax", "Transpose", "Reshape", "Split", "Squeeze", "Gather", "Mul", "Div")
_ADDED = ("QuantizeLinear", "DequantizeLinear", "MatMulIntegerToFloat", "MultiHeadAttention", "Expand", "Split")
# Nodes that no placement adds or removes. Together with the layers they show which rewrites ran.
_STAYING = ("LayerNormalization", "TopK")


class PlacedGraph:
    """A placed graph with its metadata and layers. It is kept as serialised bytes, so that it can be pickled together
    with the module that was prepared for it."""

    def __init__(self, model: ir.Model, metadata: files.GraphMetadata) -> None:
        self.data = files.serialised(model)
        self.metadata = metadata
        self.layers = read_placed(model)

    @functools.cached_property
    def model(self) -> ir.Model:
        model: ir.Model = ir.from_proto(onnx.ModelProto.FromString(self.data))
        return model

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "model"}

    @property
    def target(self) -> str:
        assert self.metadata.target is not None
        return self.metadata.target

    @property
    def left(self) -> tuple[str, ...]:
        """The layers in float."""
        return tuple(name for name, layer in self.layers.items() if layer.codes is None)


def read_placement(file: Path) -> PlacedGraph:
    """Read the placed graph of one target.

    Raises:
        GraphError: the graph is not in INT8. CapabilityError: its form or its task does not support training.
    """
    model = admit.admit_graph(file)
    metadata = files.get_metadata(model, str(file))
    if metadata.precision not in ("int8", "mixed") or metadata.target is None:
        raise GraphError(
            f"{file} is not an INT8 graph",
            found=f"precision {metadata.precision or 'float32'}",
            expected="a graph of vitdeploy quantize, or a bundle with an INT8 engine",
            fix="vitdeploy quantize GRAPH --data IMAGES --target TARGET -o DIR",
        )
    if TARGETS[metadata.target].typed:
        raise CapabilityError(
            f"quantization-aware training does not support {metadata.target}",
            found="a graph that mixes INT8 and half precision types",
            expected="openvino-cpu or onnxruntime-cpu",
        )
    if flow_of(metadata.task) or metadata.preprocess is None:
        raise CapabilityError(
            "quantization-aware training does not support models of several graphs", found=f"the task {metadata.task}"
        )
    further = further_inputs(metadata.task, files.graph_spec(model, file.name).inputs)
    require_image_alone(metadata.name, further, "quantization-aware training")
    return PlacedGraph(model, metadata)


def whole(module: nn.Module, placement: PlacedGraph) -> nn.Module:
    """Return the module as it is exported: outputs in the graph's order, layers under the graph's names.

    In the graph of a built-in model, layers are named by their paths; for other modules, "model." precedes the path.
    """
    paths = weighted(module)
    if any(name == path or name.startswith(f"{path}.") for name in placement.layers for path in paths):
        return module
    return Adapted(module, task=placement.metadata.task)


def export_like(module: nn.Module, placement: PlacedGraph, file: Path) -> None:
    """Export a module (as returned by `whole`) with the settings of the placed graph's export. Raises ExportError."""
    spec, metadata = files.graph_spec(placement.model, "the placed graph"), placement.metadata
    graph = export_graph(
        module,
        name=metadata.name,
        preprocess=metadata.images,
        image_size=metadata.images.crop,
        opset=placement.model.opset_imports[""],
        batch=files.fixed_batch(spec),
        in_graph=spec.inputs[0].dtype == "uint8",
        task=metadata.task,
        outputs=[tensor.name for tensor in spec.outputs],
        postprocess=metadata.postprocess,
    )
    files.save_graph(graph, file)


def float_graph(file: Path, placement: PlacedGraph, options: OptimizeOptions | None) -> ir.Model:
    """Read an exported file, rewrite it by `options` (None: no rewrites) and shape it for the target.

    Raises:
        GraphError: the rewrites cannot be applied.
    """
    model = files.load_graph(file, shapes=options is None)
    if options is not None:
        normalise(model)
        optimize(model, options)
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            rewritten = Path(folder) / "model.onnx"
            files.save_graph(model, rewritten)
            model = files.load_graph(rewritten)
            ir.external_data.load_to_model(model)
    names = {linear.name for linear in find_linears(model)}
    shape(model, placement.target, [name for name in placement.left if name in names])
    return model


def find_options(file: Path, placement: PlacedGraph) -> tuple[OptimizeOptions | None, ir.Model]:
    """Find the rewrites that turn an exported file into the placed graph's layers; return them and the rewritten graph.

    Raises:
        GraphError: no combination of rewrites does. The error names the layers that differ for the default rewrites.
    """
    expected, missing, near = _landmarks(placement.model, placement.layers), "", None
    for options in _candidates():
        try:
            model = float_graph(file, placement, options)
        except GraphError:
            continue
        found = _landmarks(model, [linear.name for linear in find_linears(model)])
        if found == expected and _alike(model, placement.model):
            return options, model
        if found == expected:
            near = near or (options, model)
        missing = missing or _different(found, expected)
    if near is not None:
        return near
    raise GraphError(
        "the module's graph differs from the graph that was quantized",
        found=missing,
        expected="the module that the graph was exported from, with default rewrites or exact ones",
        fix="export, optimize and quantize this module, without token merging or rotation",
    )


def _candidates() -> Iterator[OptimizeOptions | None]:
    usual = OptimizeOptions()
    yield usual
    yield None
    yield replace(usual, qkv="merged")
    yield replace(usual, qkv="separate")
    for field in fields(usual):
        if getattr(usual, field.name) is True:
            switch: dict[str, Any] = {field.name: False}
            yield replace(usual, **switch)


def _landmarks(model: ir.Model, layers: Mapping[str, object] | list[str]) -> set[str]:
    names = {str(node.name) for node in model.graph if node.op_type in _STAYING}
    return {f"{name} (layer)" for name in layers} | names


def _alike(model: ir.Model, placed: ir.Model) -> bool:
    """Whether two graphs differ only in operators that a placement adds or fuses."""
    before, after = ({str(node.name): node for node in graph.graph} for graph in (model, placed))
    gone = (node for name, node in before.items() if name not in after)
    new = (node for name, node in after.items() if name not in before)
    return all(node.op_type in _FUSED for node in gone) and all(_is_added(node) for node in new)


def _is_added(node: ir.Node) -> bool:
    return node.op_type in _ADDED or stem(node).endswith(INSERTED) or str(node.name).endswith(("/unit", "/keys"))


def _different(found: set[str], expected: set[str]) -> str:
    more, less = sorted(found - expected), sorted(expected - found)
    words = [
        f"{', '.join(names[:3])} only in {where}"
        for names, where in ((less, "the graph"), (more, "the module"))
        if names
    ]
    return "; ".join(words)
