"""Read and write graphs as ONNX files, with external tensors."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.bundle.read import check_preprocess
from vitdeploy.errors import GraphError, quoted
from vitdeploy.graph import edit, values
from vitdeploy.graph.io.admit import admit, admit_graph, drop_shapes, invalid, no_file, note_written
from vitdeploy.graph.io.bound import asked_inputs, bound_notes, constants, further_note
from vitdeploy.graph.io.inputs import (
    bind_input,
    bind_values,
    drop_overridable,
    keep_inputs,
    of_another_size,
    put_channels_first,
    set_image_size,
    widened,
)
from vitdeploy.graph.io.outputs import task_of
from vitdeploy.paths import is_file
from vitdeploy.runtime.flows import PARTS
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.depth import INVERSE_ASSUMED
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.instance_segmentation import PAIRS_ASSUMED, QUERIES_ASSUMED, InstanceSpec
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.runtime.tasks.segmentation import MASKS_ASSUMED, SegmentationSpec
from vitdeploy.spec import (
    DecodeError,
    GraphSpec,
    Postprocess,
    Precision,
    PreprocessSpec,
    SequenceSpec,
    Task,
    TensorSpec,
    WeightBits,
    decode,
    encode,
    postprocess_of,
)

# --- Read and write ONNX: one file, the lowest IR version that supports the opset, the same bytes for the same graph --


# protobuf allows 2 GiB - 1 for the whole file; the rest is reserved for nodes and names.
MAX_WEIGHT_BYTES = 2**31 - 2**26
METADATA_KEY = "vitdeploy"
# Weights that sessions in this process share with the model: all but small ones, in types that NumPy has.
LARGE_BYTES, SHARED = 1024, (np.float32, np.float16, np.int8, np.uint8, np.int64)
BATCH = "batch"


@dataclass(frozen=True)
class GraphMetadata:
    """The metadata stored in a graph file, so that a `model.onnx` alone says how to prepare its input.

    `target` and `precision` are set in a graph placed for a target, and None in the float graph; `weight_bits` applies
    to INT8 weights. `labels` are the class names, () if the model has none. `bound`: "NAME=VALUE" of inputs that
    became constants.
    """

    name: str
    task: Task
    preprocess: PreprocessSpec | None
    target: str | None = None
    precision: Precision | None = None
    postprocess: Postprocess | None = None
    sequence: SequenceSpec | None = None
    weight_bits: WeightBits | None = None
    labels: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()

    @property
    def images(self) -> PreprocessSpec:
        """The preprocessing from images to the input; raises GraphError if the input is not an image."""
        if self.preprocess is None:
            raise GraphError(f"{self.name} does not take images", found=f"a graph for the task {self.task}")
        return self.preprocess


def load_graph(path: Path, *, shapes: bool = True) -> ir.Model:
    """Parse a graph that vitdeploy wrote, in a folder that it verified or has just filled, without checks or limits.
    Read all other files with `admit`, `admit_graph` or `admitted_metadata`. External weights are read on first use.

    `shapes`: keep the declared shapes of inner tensors.

    Raises:
        MissingFileError: the file does not exist.
        GraphError: not an ONNX file.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
        if not shapes:
            drop_shapes(proto)
        arrays = {tensor.name: _array(tensor) for tensor in proto.graph.initializer if tensor.HasField("raw_data")}
        bare = onnx.ModelProto()
        bare.CopyFrom(proto)  # the memory of `proto` is freed as a whole
        del proto
        model = ir.from_proto(bare)
    except OSError:
        raise no_file(path) from None
    except Exception as error:  # protobuf and onnx_ir have no common base
        raise invalid(path.name, str(error)) from None
    for name, array in arrays.items():
        value = model.graph.initializers[name]
        assert value.const_value is not None
        value.const_value = ir.Tensor(array, value.const_value.dtype, shape=value.const_value.shape, name=name)
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def _array(tensor: onnx.TensorProto) -> npt.NDArray[Any]:
    """The values of a tensor of a file, which are removed from it: the model holds its weights once, as arrays."""
    array: npt.NDArray[Any] = ir.serde.TensorProtoTensor(tensor).numpy()
    tensor.ClearField("raw_data")
    return array


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the graph; the same graph gives the same bytes. Above protobuf's limit of 2 GB, the weights go to
    `<name>.onnx.data` next to it. The caller ensures atomicity (stages publish a folder as a whole).

    Raises:
        GraphError: the graph breaks a rule of the ONNX checker.
    """
    _lower_ir_version(model)
    if values.weight_bytes(model) > MAX_WEIGHT_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
        _check(str(path))
        note_written(onnx.load(path, load_external_data=False))
        return
    ir.external_data.load_to_model(model)  # weights that are external to another file
    proto = ir.to_proto(model)
    data = proto.SerializeToString(deterministic=True)
    _check(data)
    path.write_bytes(data)
    note_written(proto)


def serialised(model: ir.Model) -> bytes:
    """The graph as the bytes of one file, with all weights.

    Raises:
        GraphError: the graph is too large for one file.
    """
    size = values.weight_bytes(model)
    if size > MAX_WEIGHT_BYTES:
        raise GraphError(
            "the weights are too large to serialise into one ONNX file",
            found=f"{size:,} bytes",
            expected=f"at most {MAX_WEIGHT_BYTES:,} bytes",
        )
    _lower_ir_version(model)
    ir.external_data.load_to_model(model)
    data: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return data


def runner_of(model: ir.Model, name: str, outputs: Sequence[str] = (), **options: Any) -> OnnxRuntimeRunner:
    """A runner of a graph in memory, which uses the arrays of its weights where they are.

    Args:
        outputs: tensors to return in addition.
        options: those of `OnnxRuntimeRunner`.
    """
    copy, weights = model.clone(), dict[str, npt.NDArray[Any]]()
    for key, value in list(copy.graph.initializers.items()):
        if not (value.uses() or value.is_graph_output()):  # ONNX Runtime would not find it again
            del copy.graph.initializers[key]
            continue
        tensor = value.const_value
        if tensor is None or (tensor.nbytes < LARGE_BYTES and not isinstance(tensor, ir.ExternalTensor)):
            continue
        array = tensor.numpy()
        if array.dtype in SHARED:
            weights[key] = np.ascontiguousarray(array)
            value.const_value = ir.ExternalTensor(
                key, 0, tensor.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=key
            )
        else:
            value.const_value = ir.Tensor(array, tensor.dtype, name=key)
    proto = ir.to_proto(copy)
    own = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs if name not in own)
    return OnnxRuntimeRunner(proto.SerializeToString(), name=name, weights=weights, **options)


def _lower_ir_version(model: ir.Model) -> None:
    """Set the lowest IR version that supports the opset, so that old runtimes can read the file."""
    standard = {domain: version for domain, version in model.opset_imports.items() if domain in ("", "ai.onnx.ml")}
    model.ir_version = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid(domain, version) for domain, version in standard.items()]
    )


def _check(model: str | bytes) -> None:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError as error:
        raise GraphError("the graph fails the ONNX checker", found=str(error).splitlines()[0][:200]) from None


def set_metadata(model: ir.Model, metadata: GraphMetadata) -> None:
    model.metadata_props[METADATA_KEY] = json.dumps(encode(metadata), sort_keys=True)


def get_metadata(model: ir.Model, source: str) -> GraphMetadata:
    """The metadata that `vitdeploy export` wrote.

    Raises:
        GraphError: the file has no metadata, or they cannot be decoded.
    """
    text = model.metadata_props.get(METADATA_KEY)
    if text is None:
        raise GraphError(
            f"the preprocessing of {source} is unknown",
            found="no vitdeploy metadata in the file",
            expected="a graph written by `vitdeploy export`",
            fix=f"vitdeploy export {quoted(source)} -o DIR imports an ONNX file that takes images",
        )
    try:
        metadata = decode(GraphMetadata, json.loads(text))
    except (ValueError, RecursionError, DecodeError) as error:
        raise GraphError(f"the vitdeploy metadata of {source} cannot be read", found=str(error)[:200]) from None
    if metadata.preprocess is not None:
        check_preprocess(source, metadata.preprocess, GraphError)
    # A recipe may still set how objects are scored.
    optional = metadata.task in ("detection", "panoptic") and metadata.postprocess is None
    expected = None if optional else postprocess_of(metadata.task)
    if (metadata.preprocess is None and metadata.task != "sequence") or (
        expected is not None and not isinstance(metadata.postprocess, expected)
    ):
        raise GraphError(
            f"the metadata of {source} do not fit the task {metadata.task}",
            found=", ".join(key for key, value in encode(metadata).items() if value),
            expected="preprocess, and the postprocess of the task except for classification, features and sequence",
            fix="export the model again",
        )
    return metadata


def admitted_metadata(file: Path) -> GraphMetadata:
    """The metadata of a graph file named by the user, after `admit_graph` checked it; for a model of several graphs,
    also after it checked the other files that may be parts of the model. Raises as `admit_graph` and `get_metadata`."""
    metadata = get_metadata(admit_graph(file), str(file))
    if flow_of(metadata.task):
        for name in sorted({"model", *itertools.chain(*PARTS)} - {file.stem}):
            if is_file(part := file.with_name(f"{name}.onnx")):
                admit_graph(part)
    return metadata


def graph_spec(model: ir.Model, file: str) -> GraphSpec:
    """Names, dtypes and shapes of a graph's inputs and outputs."""
    return GraphSpec(
        file, tuple(_tensor_spec(v) for v in model.graph.inputs), tuple(_tensor_spec(v) for v in model.graph.outputs)
    )


def _tensor_spec(value: ir.Value) -> TensorSpec:
    if value.shape is None or value.dtype is None:
        raise GraphError(f"the tensor {value.name} has no declared type and shape")
    shape = tuple(size if isinstance(size, int) else str(size.value or "dynamic") for size in value.shape)
    return TensorSpec(str(value.name), str(value.dtype.numpy()), shape)


def fixed_batch(spec: GraphSpec) -> int | None:
    """The batch that a graph is fixed to, or None if it is dynamic."""
    size = spec.inputs[0].shape[0]
    return size if isinstance(size, int) else None


# --- Import an ONNX file as a model of one of our tasks: one image in, outputs under our names ------------------------
# The metadata of a file that vitdeploy wrote give its task, preprocessing and class names. Such a file may take pixels,
# since the cheap half of the preprocessing can be part of it. A third-party file has little of this.


IMAGE, SIZES = "image", "orig_target_sizes"
_BIND = (
    "vitdeploy export FILE --bind NAME=VALUE for each other input, with a number or a .npy file, or --bind NAME=input "
    "if each image brings its own value (in a recipe source.bind: {NAME: VALUE}); or export it with one image input"
)


@dataclass(frozen=True)
class ForeignGraph:
    """A graph with the input "image" and the task's outputs. `notes` list the decisions, one per line.

    The image is float32 NCHW; or uint8 NHWC if the graph applies the mean and standard deviation, which `metadata` then
    has. `metadata` come from files that vitdeploy wrote; None for all others.
    """

    model: ir.Model
    task: Task
    postprocess: Postprocess | None
    parameters: int
    notes: tuple[str, ...]
    metadata: GraphMetadata | None = None

    @property
    def takes_pixels(self) -> bool:
        return self.model.graph.inputs[0].dtype == ir.DataType.UINT8


def import_graph(
    path: Path,
    image_size: tuple[int, int] | None = None,
    batch: int | None = None,
    task: Task | None = None,
    bind: Sequence[str] = (),
) -> ForeignGraph:
    """Read a file of unknown origin and determine its task. The graph still computes the same function.

    `image_size` is (height, width), for a file that leaves it open. `batch` fixes an open batch size. `task`: the task
    of the outputs. `bind`: "NAME=VALUE" for inputs that become constants, and "NAME=input" for inputs that each image
    brings, which follow the image; the metadata of a file that vitdeploy wrote list the latter.

    Raises:
        InputError: a value of `bind` cannot be read.
        UnsafeGraphError, GraphError, MissingFileError: the file is refused, or its inputs and outputs fit no task, or
            not `task`.
    """
    model = admit(path, image_size)
    metadata = get_metadata(model, str(path)) if METADATA_KEY in model.metadata_props else None
    notes = []
    drop_overridable(model)
    values_of = constants(bind)
    bind_values(model, values_of)
    notes += bound_notes(values_of or (metadata.bound if metadata is not None else ()))
    further = asked_inputs(bind)
    if metadata is not None and flow_of(metadata.task) is None:
        further = {**{str(value.name): None for value in model.graph.inputs[1:]}, **further}
    if metadata is None:
        notes += widened(model)
    if further:
        keep_inputs(model, further, path)
        notes += further_note(graph_spec(model, path.name).inputs[1:])
    if metadata is None and put_channels_first(model, len(further)):
        notes.append("the image has its channels last: the input is changed to [batch, channels, height, width]")
    if SIZES not in further and any(value.name == SIZES for value in model.graph.inputs):
        # Boxes are then relative to the image; post-processing scales them.
        bind_input(model, SIZES, np.ones(2, np.int64))
        notes.append(f"the input {SIZES} is bound to 1: boxes are relative to the image")
    if metadata is None or not _takes_pixels(model, metadata):
        _rename_input(model, path, len(further))
        set_image_size(model, image_size, len(further))
    elif image_size not in (None, metadata.images.crop):
        raise of_another_size(metadata.images.crop, image_size)
    if metadata is None:
        found, postprocess, assumed = task_of(model, path, task)
        notes += assumed
        if isinstance(postprocess, PostprocessSpec) and postprocess.scores == "sigmoid":
            notes.append("scores are independent (sigmoid): the detector chooses its queries by score")
        notes += [INVERSE_ASSUMED] if found == "depth" else []
        queries = isinstance(postprocess, SegmentationSpec) and postprocess.maps == "queries"
        notes += [MASKS_ASSUMED] if queries else []
        notes += [QUERIES_ASSUMED] if queries and task is None else []
        pairs = isinstance(postprocess, InstanceSpec) and postprocess.class_scores == "softmax"
        notes += [PAIRS_ASSUMED] if pairs else []
    else:
        found, postprocess = metadata.task, metadata.postprocess
    if task not in (None, found):
        raise GraphError(
            f"{path} cannot be used for the task {task}",
            found=f"outputs of the task {found}",
            expected=f"outputs of the task {task}",
            fix="omit the task, or export the model with outputs of that task",
        )
    _batch(model, batch)
    edit.drop_unused(model)
    size = sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None)
    notes.append(f"imported from {path.name}: {found}, opset {model.opset_imports.get('')}")
    return ForeignGraph(model, found, postprocess, int(size), tuple(notes), metadata)


def _takes_pixels(model: ir.Model, metadata: GraphMetadata) -> bool:
    """Whether the graph's input is uint8 [batch, height, width, channels], with preprocessing inside the graph."""
    inputs, spec = model.graph.inputs, metadata.preprocess
    if not inputs or inputs[0].dtype != ir.DataType.UINT8 or inputs[0].shape is None or spec is None:
        return False
    return list(inputs[0].shape[1:]) == [*spec.crop, spec.channels]


def _rename_input(model: ir.Model, path: Path, further: int) -> None:
    """Rename the image input to our name; `further` is the number of other inputs after it."""
    inputs = model.graph.inputs
    if len(inputs) != 1 + further or not _is_image(inputs[0]):
        raise GraphError(
            f"{path} does not take one image",
            found="; ".join(f"{v.name}: {v.dtype}{list(v.shape) if v.shape is not None else ''}" for v in inputs),
            expected="one input, float32 [batch, channels, height, width]",
            fix=_BIND if any(map(_is_image, inputs)) else "export the model with one image input",
        )
    edit.rename(model, inputs[0], IMAGE)


def _is_image(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4 and value.dtype == ir.DataType.FLOAT


def _batch(model: ir.Model, batch: int | None) -> None:
    """Rename the leading axis to our name if it is dynamic, or fix it to `batch`."""
    image, *further = model.graph.inputs
    assert image.shape is not None
    if not isinstance(image.shape[0], int):
        for value in (image, *further, *model.graph.outputs):
            if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
                value.shape = ir.Shape([batch or BATCH, *value.shape[1:]])
