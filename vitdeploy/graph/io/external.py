"""An ONNX file as a model of one of our tasks: one image in, outputs by our names.

A file that vitdeploy wrote says itself what it is for, how its images are prepared, and what its classes are called. It
may take pixels, for the cheap half of its preprocessing can be part of it. What somebody else exported says little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.io.bound import bound_notes
from vitdeploy.graph.io.files import BATCH, METADATA_KEY, GraphMetadata, get_metadata
from vitdeploy.graph.io.inputs import (
    bind_input,
    bind_values,
    drop_overridable,
    of_another_size,
    put_channels_first,
    set_image_size,
)
from vitdeploy.graph.io.outputs import task_of
from vitdeploy.graph.io.widen import widened
from vitdeploy.spec import (
    INVERSE_ASSUMED,
    MASKS_ASSUMED,
    PAIRS_ASSUMED,
    QUERIES_ASSUMED,
    InstanceSpec,
    Postprocess,
    PostprocessSpec,
    SegmentationSpec,
    Task,
)

IMAGE, SIZES = "image", "orig_target_sizes"
_BIND = (
    "vitdeploy export FILE --bind NAME=VALUE for each of the others, a number or a .npy file (in a recipe source.bind: "
    "{NAME: VALUE}); or export it with one image input"
)


@dataclass(frozen=True)
class ForeignGraph:
    """The graph with an input "image" and the task's outputs. `notes` list the decisions, one per line.

    The image is float32 NCHW; or uint8 NHWC if `metadata` has the mean and the standard deviation that are part of the
    graph. `metadata` come from files that vitdeploy wrote, and are None for all others.
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
    """Read a file of unknown origin and say what it is for. Its function is that of the file.

    `image_size` is (height, width), for a file that leaves it open. `batch` fixes a batch that is open. `task`: what
    its outputs are to be taken for. `bind`: "NAME=VALUE" of inputs that become constants.

    Raises:
        InputError: a value of `bind` cannot be read.
        UnsafeGraphError, GraphError, MissingFileError: the file is refused; or its inputs and outputs are of no task,
            or of another than `task`.
    """
    model = admit(path, image_size)
    metadata = get_metadata(model, str(path)) if METADATA_KEY in model.metadata_props else None
    notes = []
    drop_overridable(model)
    bind_values(model, bind)
    notes += bound_notes(bind or (metadata.bound if metadata is not None else ()))
    if metadata is None:
        notes += widened(model)
        if put_channels_first(model):
            notes.append("the image has its channels last: the graph takes [batch, channels, height, width] instead")
    if any(value.name == SIZES for value in model.graph.inputs):
        # Boxes then come out relative to the image: what the size would scale them to, post-processing does.
        bind_input(model, SIZES, np.ones(2, np.int64))
        notes.append(f"the input {SIZES} is bound to 1: boxes are relative to the image")
    if metadata is None or not _takes_pixels(model, metadata):
        _rename_input(model, path)
        set_image_size(model, image_size)
    elif image_size not in (None, metadata.images.crop):
        raise of_another_size(metadata.images.crop, image_size)
    if metadata is None:
        outputs = task_of(model, path, task)
        found, postprocess = outputs.task, outputs.postprocess
        notes += outputs.notes
        if isinstance(postprocess, PostprocessSpec) and postprocess.scores == "sigmoid":
            notes.append("scores are independent (sigmoid), as of all detectors that choose their queries by score")
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
            f"{path} gives no answers of the task that is asked for",
            found=found,
            wanted=str(task),
            fix="leave the task out, or export the model with outputs of that task",
        )
    _batch(model, batch)
    drop_unused(model)
    size = sum(value.const_value.size for value in model.graph.initializers.values() if value.const_value is not None)
    notes.append(f"imported from {path.name}: {found}, opset {model.opset_imports.get('')}")
    return ForeignGraph(model, found, postprocess, int(size), tuple(notes), metadata)


def _takes_pixels(model: ir.Model, metadata: GraphMetadata) -> bool:
    """Whether the graph's input is uint8 [batch, height, width, channels], with preprocessing inside the graph."""
    inputs, spec = model.graph.inputs, metadata.preprocess
    if len(inputs) != 1 or inputs[0].dtype != ir.DataType.UINT8 or inputs[0].shape is None or spec is None:
        return False
    return list(inputs[0].shape[1:]) == [*spec.crop, spec.channels]


def _rename_input(model: ir.Model, path: Path) -> None:
    inputs = model.graph.inputs
    if len(inputs) != 1 or not _is_image(inputs[0]):
        raise GraphError(
            f"{path} does not take one image",
            found="; ".join(f"{v.name}: {v.dtype}{list(v.shape) if v.shape is not None else ''}" for v in inputs),
            wanted="one input, float32 [batch, channels, height, width]",
            fix=_BIND if any(map(_is_image, inputs)) else "export it with one image input",
        )
    inputs[0].name = IMAGE


def _is_image(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4 and value.dtype == ir.DataType.FLOAT


def _batch(model: ir.Model, batch: int | None) -> None:
    """Call the leading axis by our name where it is dynamic, or fix it to `batch`."""
    image = model.graph.inputs[0]
    assert image.shape is not None
    if not isinstance(image.shape[0], int):
        for value in (image, *model.graph.outputs):
            if value.shape is not None and len(value.shape) and not isinstance(value.shape[0], int):
                value.shape = ir.Shape([batch or BATCH, *value.shape[1:]])
