"""Export a PyTorch module to an ONNX graph with its preprocessing and without traces of the build machine."""

import ast
import contextlib
import functools
import io
import logging
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch._export.utils as _export_utils
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript.rewriter._basics import MatchResult
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import Tensor, nn
from torch.onnx._internal._lazy_import import onnxscript_apis  # type: ignore[attr-defined]
from torch.onnx._internal.exporter import _schemas
from torch.utils._python_dispatch import TorchDispatchMode

from vitdeploy.errors import ExportError
from vitdeploy.exporter import batches, patches
from vitdeploy.graph import edit, values
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import BATCH, GraphMetadata, set_metadata
from vitdeploy.runtime.inputs import random_inputs
from vitdeploy.spec import Postprocess, PreprocessSpec, Task, TensorSpec

# --- Readable names, and no traces of the build machine ---------------------------------------------------------------
# Clean up the output of the dynamo exporter.
#
# The exporter writes the module path of every node, together with stack traces and absolute source paths, into
# metadata. The path becomes the node's name ("blocks.7.mlp.fc2/MatMul"), and all metadata is removed.


SCOPES = "pkg.torch.onnx.name_scopes"


def tidy(model: ir.Model, prefix: str) -> None:
    """Rename nodes and tensors after their modules (below the attribute `prefix`) and strip all metadata. In place."""
    _adopt_constants(model)
    taken: set[str] = {str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)}
    initializers = {str(value.name): value for value in model.graph.initializers.values()}
    for i, value in enumerate(initializers.values()):
        value.name = f"initializer {i}"  # temporary: the new name of one may be the old name of another
    for name, value in initializers.items():
        _rename(value, name.removeprefix(f"{prefix}."), taken)
    for node in model.graph:
        scope = _module_path(node, prefix)
        _name_weight(node, scope, taken)
        node.name = edit.free_name(f"{scope}/{node.op_type}" if scope else node.op_type, taken)
        for i, output in enumerate(node.outputs):
            if not output.is_graph_output():
                output.name = node.name if len(node.outputs) == 1 else edit.free_name(f"{node.name}.{i}", taken)
    strip(model)


def _adopt_constants(model: ir.Model) -> None:
    """Turn constants that are missing from the graph into initializers: onnxscript's fusion of two Clips forgets it."""
    known = set(model.graph.initializers.values())
    taken = {str(value.name) for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    for node in model.graph:
        for value in node.inputs:
            stray = value is not None and value.producer() is None and value not in known
            if value is not None and stray and value.const_value is not None and not value.is_graph_input():
                value.name = edit.free_name(f"{value.name}_of_{node.name}", taken)
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
    """Return the path of the innermost module, without the wrapper; the last scope is the operation itself."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    path = str(scopes[-2]) if len(scopes) > 1 else ""
    return path.removeprefix(prefix).removeprefix(".") if path.startswith(prefix) else ""


def _name_weight(node: ir.Node, scope: str, taken: set[str]) -> None:
    """Name a linear weight `<module>.weight_t`: constant folding transposed it and dropped its name."""
    weight = node.inputs[1] if node.op_type == "MatMul" and len(node.inputs) == 2 else None
    if weight is not None and weight.is_initializer() and str(weight.name).startswith("val_") and scope:
        _rename(weight, f"{scope}.weight_t", taken)


def _rename(value: ir.Value, name: str, taken: set[str]) -> None:
    value.name = edit.free_name(name, taken)
    if value.const_value is not None:
        value.const_value.name = value.name


# --- Export a PyTorch module to an ONNX graph with its preprocessing --------------------------------------------------


INPUT = "image"
# Batch of the example for a dynamic batch: torch.export treats sizes 0 and 1 as constants.
EXAMPLE_BATCH = 2
LOGGERS = ("torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")


class PixelsIn(nn.Module):
    """A model with normalisation in front: uint8 NHWC pixels -> float32 NCHW, (x / 255 - mean) / std, with the channels
    in the model's order.

    Written as one multiplication and one addition per pixel: x * 1 / (255 std) - mean / std.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: nn.Module, preprocess: PreprocessSpec) -> None:
        super().__init__()
        self.model = model
        self.bgr = preprocess.channel_order == "bgr"
        mean = torch.tensor(preprocess.mean, dtype=torch.float64).reshape(1, -1, 1, 1)
        std = torch.tensor(preprocess.std, dtype=torch.float64).reshape(1, -1, 1, 1)
        self.register_buffer("scale", (1 / (255 * std)).float())
        self.register_buffer("shift", (-mean / std).float())

    def forward(self, image: Tensor, *further: Tensor) -> Tensor | tuple[Tensor, ...]:
        pixels = image.permute(0, 3, 1, 2).float()
        if self.bgr:
            pixels = pixels[:, [2, 1, 0]]
        return self.model(pixels * self.scale + self.shift, *further)


class ModelIn(nn.Module):
    """The model alone, with any inputs, under the same attribute name, so that all exports have the same node names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor | tuple[Tensor, ...]:
        result: Tensor | tuple[Tensor, ...] = self.model(*inputs)
        return result


def export_graph(
    model: nn.Module,
    *,
    name: str,
    preprocess: PreprocessSpec,
    image_size: tuple[int, int],
    opset: int,
    batch: int | None,
    in_graph: bool,
    task: Task = "classification",
    outputs: Sequence[str] = ("logits",),
    postprocess: Postprocess | None = None,
    further: Sequence[TensorSpec] = (),
) -> ir.Model:
    """Return the ONNX graph of `model` (float32 [batch, channels, height, width] -> the tensors named by `outputs`).

    Args:
        further: the model's further inputs after the image, in order, each [batch, ...].
        batch: a fixed batch, or None for a dynamic axis named "batch".
        in_graph: True takes "image" as uint8 [batch, height, width, channels]; False as normalised float32 NCHW.

    Raises:
        ExportError: the model cannot be exported.
    """
    (height, width), channels, images = image_size, preprocess.channels, batch or EXAMPLE_BATCH
    opened = {0: torch.export.Dim(BATCH)}
    more = _examples(further, images)
    if in_graph:
        wrapped: nn.Module = PixelsIn(model, preprocess)
        example = torch.zeros(images, height, width, channels, dtype=torch.uint8)
        shapes: dict[str, Any] = {"image": opened, **({"further": (opened,) * len(more)} if more else {})}
    else:
        wrapped, shapes = ModelIn(model), {"inputs": (opened,) * (1 + len(more))}
        example = torch.zeros(images, channels, height, width)
    inputs = [INPUT, *(tensor.name for tensor in further)]
    graph = exported(wrapped, (example, *more), shapes if batch is None else None, opset, inputs, outputs, name)
    _require_inputs(graph, inputs, name)
    set_metadata(graph, GraphMetadata(name, task, preprocess, postprocess=postprocess))
    return graph


def _examples(further: Sequence[TensorSpec], batch: int) -> list[Tensor]:
    return [torch.from_numpy(array) for array in random_inputs(further, batch).values()]


def _require_inputs(graph: ir.Model, names: Sequence[str], what: str) -> None:
    found = [str(value.name) for value in graph.graph.inputs]
    if found != list(names):
        raise ExportError(
            f"the inputs of the exported graph of {what} differ from the model's",
            found=", ".join(found),
            expected=", ".join(names),
            fix="bind an input that the model does not use to a constant",
        )


def expected_seconds(
    model: nn.Module,
    channels: int,
    image_size: tuple[int, int],
    batch: int | None,
    further: Sequence[TensorSpec] = (),
) -> float:
    """Estimate the seconds for export and comparison of an image model on this machine when idle, from one run at the
    export batch: about 10 ms of tracing per operator, plus about 28 times the run time of an image (three batch sizes
    in two runtimes). Five models of 67 to 2,776 operators took 0.8 to 1.3 times the estimate."""

    class Count(TorchDispatchMode):
        operators = 0

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.operators += 1
            return operator(*args, **(kwargs or {}))

    count, images, started = Count(), batch or EXAMPLE_BATCH, time.perf_counter()
    with torch.no_grad(), count:
        model.eval()(torch.zeros(images, channels, *image_size), *_examples(further, images))
    return 1 + count.operators / 100 + 28 * (time.perf_counter() - started) / images


def export_tensors_graph(
    model: nn.Module, *, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[str], opset: int
) -> ir.Model:
    """Return the ONNX graph of a part of a model, from `inputs`, in the order of its arguments and each with the same
    dynamic batch axis first, to the tensors named by `outputs`.

    Raises:
        ExportError: the model cannot be exported.
    """
    shapes = [tuple(size for size in tensor.shape[1:] if isinstance(size, int)) for tensor in inputs]
    kinds = [getattr(torch, tensor.dtype) for tensor in inputs]
    example = tuple(torch.zeros(EXAMPLE_BATCH, *shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True))
    named = [tensor.name for tensor in inputs]
    opened = {"inputs": tuple({0: torch.export.Dim(BATCH)} for _ in inputs)}
    return exported(ModelIn(model), example, opened, opset, named, outputs, name)


def export_text_graph(model: nn.Module, *, name: str, length: int, opset: int) -> ir.Model:
    """Return the ONNX graph of a text encoder: "text", int64 [batch, length], to "features", with a dynamic batch.

    Raises:
        ExportError: the model cannot be exported.
    """
    text = TensorSpec("text", "int64", ("batch", length))
    return export_tensors_graph(model, name=name, inputs=[text], outputs=["features"], opset=opset)


@contextlib.contextmanager
def _no_work_twice() -> Iterator[None]:
    """Cache repeated work of PyTorch's exporter and onnxscript, which takes a third of the time for a large graph and
    half for a small one. The resulting graphs are byte-identical.

    The exporter reads the source and the signatures of its 500 translations at every export, and lists all operators
    a dozen times. onnxscript tries each of its rules at every node, and walks the whole graph each time for rules with
    two outputs; here a rule is tried only at nodes of its operator, as it cannot match others.
    """
    match = SimplePatternMatcher.match

    def match_where_it_can(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> MatchResult:
        rule = matcher.pattern.output_nodes[0].op_identifier()
        if rule is not None and rule[1] != node.op_type:
            return MatchResult().fail("another operator", node)
        return match(matcher, model, graph, node, **options)

    with contextlib.ExitStack() as plain:
        for place, name, reader in (
            (SimplePatternMatcher, "match", match_where_it_can),
            (onnxscript_apis, "get_torchlib_ops", _translations),
            (_schemas, "op_signature_from_function", _signature),
            (_export_utils, "_materialize_cpp_cia_ops", functools.cache(_export_utils._materialize_cpp_cia_ops)),
        ):
            plain.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, reader)
        yield


_translations = functools.cache(onnxscript_apis.get_torchlib_ops)
_signature = functools.cache(_schemas.op_signature_from_function)


def exported(
    model: nn.Module,
    example: tuple[Any, ...],
    shapes: dict[str, Any] | None,
    opset: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    name: str,
    lengths: bool = False,
) -> ir.Model:
    """Return the ONNX graph, named `name`, of a model whose parts are below its attribute `model`: with clean names, in
    canonical form. `shapes`: the dynamic axes by argument of `forward`. `lengths`: axes besides the batch are dynamic.

    Raises:
        ExportError: the model cannot be exported.
    """
    try:
        # A bias computed from a parameter that requires gradients gives attention different strides in the exporter's
        # second trace than in its first, and a view recorded in the first then fails.
        with (
            _quiet(),
            patches.plain_attention(),
            patches.scripts_as_they_run(model),
            patches.lengths_as_sizes(model),
            batches.constant_tables(),
            _no_work_twice(),
            torch.no_grad(),
        ):
            program = torch.onnx.export(
                model.eval(),
                example,
                dynamo=True,
                dynamic_shapes=shapes,
                opset_version=opset,
                input_names=list(inputs),
                output_names=list(outputs),
                verbose=False,
                custom_translation_table={torch.ops.aten.scaled_dot_product_attention.default: patches.attention},
            )
    except Exception as error:
        cause = _root(error)
        lines = [line for line in str(cause).splitlines() if line.strip()]
        raise ExportError(
            f"{name} cannot be exported to ONNX",
            found=(lines[0] if lines else repr(cause))[:300] + _model_line(error),
            expected="operations that ONNX has, and no Python branch or loop that depends on tensor values",
            fix="change that line (torch.where for a branch), or use an ONNX file that was exported another way",
        ) from error
    assert program is not None
    graph = program.model
    tidy(graph, prefix="model")
    if lengths:
        copy_sizes(graph)
    declared = [value.shape for value in graph.graph.outputs]
    with _quiet():
        normalise(graph)
    for value, shape in zip(graph.graph.outputs, declared if lengths else (), strict=lengths):
        value.shape = shape  # with the names of the axes, which passes may lose
    graph.graph.name = name
    return graph


def copy_sizes(model: ir.Model) -> None:
    """Give every Reshape a constant shape if its declared shapes allow: 0 keeps a size, one -1 is inferred.

    The exporter reads dynamic sizes from the input with Shape and Concat. `[batch, length, width]` to
    `[batch, length, heads, head_width]` does not need them: the shape is `[0, 0, heads, head_width]`. In place.
    """
    names = edit.Names(model)
    for node in model.graph:
        if node.op_type != "Reshape" or node.inputs[1] is None or values.is_constant(node.inputs[1], overridable=True):
            continue
        before, after = node.inputs[0], node.outputs[0]
        if before is None or before.shape is None or after.shape is None:
            continue
        sizes = [
            size if isinstance(size, int) else 0 if i < len(before.shape) and before.shape[i] == size else -1
            for i, size in enumerate(after.shape)
        ]
        if sizes.count(-1) > 1 or 0 in after.shape.dims:
            continue
        node.replace_input_with(1, names.constant(np.array(sizes, np.int64), f"{node.name}.shape"))
        node.attributes.pop("allowzero", None)  # the exporter sets it; then 0 means size 0
    edit.drop_unused(model)


def _root(error: BaseException) -> BaseException:
    """Return the root cause of an exporter error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _model_line(error: BaseException | None) -> str:
    """Return the last line of the model's own code in the traceback, else ""."""
    found = ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if not _is_machinery(frame.filename):
                found = f" ({Path(frame.filename).name}, line {frame.lineno}: {frame.line})"
        error = error.__cause__
    return found


def _is_machinery(file: str) -> bool:
    """Whether a file belongs to PyTorch, the exporter, Python itself or vitdeploy, and not to the model."""
    if file.startswith("<") or "/site-packages/onnx" in file:
        return True
    if any(Path(file).is_relative_to(folder) for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])):
        return True
    return Path(file).is_relative_to(sysconfig.get_path("stdlib")) and "-packages" not in file


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's logs, warnings and standard error: its progress, the absence of torchvision, and graphs
    that it could not trace do not concern the user."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
