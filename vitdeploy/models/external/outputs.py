"""Recognise the outputs of an external module by their names and shapes."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as endings_field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitdeploy.graph.io.meanings import OUTPUTS, Ending, evidence_of
from vitdeploy.models.model_folder.folder import reading_rule, sides
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.image_to_image import RECONSTRUCTION, ImageSpec
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec
from vitdeploy.runtime.tasks.keypoints import HEATMAPS, KeypointSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import (
    DEVICE_ROWS,
    OutputSpec,
    Postprocess,
    Task,
    TensorSpec,
    postprocess_of,
    recognising_classes,
)

# --- The row of a task in the recogniser, and helpers shared by rows --------------------------------------------------


Output = tuple[str, Tensor]


@dataclass(frozen=True)
class TaskOutputs:
    """How to find a task's outputs in a module's result.

    find: takes the result, and whether the user requested this task or the module declares it; returns the outputs by
        the names in `family.Signature`, [] if the task does not match. Tasks whose output is a bare tensor that other
        tasks also have must be requested.
    expected: the outputs in words.
    postprocess: what the outputs mean, from the module and their shapes.
    """

    task: Task
    find: Callable[[Any, bool], list[Output]]
    expected: str
    postprocess: Callable[[nn.Module, Sequence[TensorSpec]], Postprocess | None] = lambda model, outputs: None


def tensors_of(result: Any, *lengths: int) -> Sequence[Tensor]:
    """Return the tensors of a tuple or list of tensors with one of these lengths; () for anything else."""
    several = isinstance(result, tuple | list) and not isinstance(result, Mapping) and len(result) in lengths
    return result if several and all(isinstance(each, Tensor) for each in result) else ()


def field(result: Any, *names: str) -> Tensor | None:
    """Return the first of these fields of a mapping, such as transformers' outputs, that is a tensor."""
    fields: Mapping[str, Any] = result if isinstance(result, Mapping) else {}
    return next((fields[name] for name in names if isinstance(fields.get(name), Tensor)), None)


# --- The tensors of any result, for the fallback task -----------------------------------------------------------------


# Types that every runtime and numpy support.
DTYPES = (torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
INPUT = "image"


def _tensors(result: Any, requested: bool) -> list[Output]:
    """Return every tensor, also in nested tuples and mappings; [] if one has an unsupported type."""
    found = [(name or "output", tensor) for name, tensor in _named(result, "")]
    if not found or any(tensor.dtype not in DTYPES or not tensor.ndim or not tensor.numel() for _, tensor in found):
        return []
    taken: dict[str, Tensor] = {}
    for name, tensor in found:
        free = re.sub(r"\W", "_", name)
        while free in taken or free == INPUT:
            free += "_"
        taken[free] = tensor
    return list(taken.items())


def _named(result: Any, name: str) -> Iterator[Output]:
    if isinstance(result, Tensor):
        yield name, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _named(value, f"{name}_{key}" if name else str(key))
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        yield from _named(vars(result), name)
    elif isinstance(result, tuple | list):
        names = getattr(result, "_fields", None)
        if names is not None:
            yield from _named(dict(zip(names, result, strict=True)), name)
        else:
            for index, value in enumerate(result):
                yield from _named(value, f"{name or 'output'}_{index}")


def evidence(task: Task, result: Any, outputs: Sequence[Output], watch: "OutputWatch") -> OutputSpec | None:
    """Return the meaning of these outputs if the task's class infers it from more than their range
    (`OutputSpec.by_evidence`)."""
    kind = postprocess_of(task)
    if kind is None or "by_evidence" not in vars(kind) or not outputs:
        return None
    found = {}
    for name, tensor in outputs:
        width, layer = tensor.shape[1] if tensor.ndim == 2 else 1, watch.layers.get(tensor.data_ptr(), "")
        found[name] = evidence_of(name_of(result, tensor), width, watch.ending(tensor), layer)
    return kind.by_evidence(found)


def proposals(result: Any, watch: "OutputWatch") -> Iterator[str]:
    """Yield how a user can declare the outputs, for each class that accepts them when declared."""
    for task, kind in recognising_classes(None).items():
        spec = evidence(task, result, _by_class(task, kind, result).find(result, True), watch)
        if spec is not None and spec.proposal:
            yield spec.proposal


def name_of(result: Any, tensor: Tensor) -> str:
    """Return the name of a tensor in a module's result; "" for a bare tensor."""
    return next((name for name, each in _named(result, "") if each is tensor), "")


def names_beside(result: Any, outputs: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the names of the other tensors in a module's result, without those that `outputs` are views of."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in outputs}
    return tuple(name for name, each in _named(result, "") if each.untyped_storage().data_ptr() not in kept)


def _exact(model: nn.Module, outputs: Sequence[TensorSpec]) -> TensorsSpec:
    return TensorsSpec(tuple(tensor.name for tensor in outputs if not tensor.dtype.startswith("float")))


ROW = TaskOutputs("tensors", _tensors, "any tensors [batch, ...] (--task tensors)", _exact)


# --- Modules with a value for every pixel: classes, or depth ----------------------------------------------------------


# transformers' own post-processing first enlarges the masks to this size, whatever the input size.
MASK2FORMER_MASKS = (384, 384)
# transformers classes with depth in metres; all others declare it in their config, or are relative.
METRIC = ("ZoeDepthFor", "GLPNFor", "DepthProFor", "PromptDepthAnythingFor")


def _class_maps(result: Any, requested: bool) -> list[Output]:
    """Logits [b, c, h, w] by name, or a bare tensor if the task is requested; or queries with masks."""
    if isinstance(result, Mapping):
        classes, masks = field(result, "class_queries_logits"), field(result, "masks_queries_logits")
        if classes is not None and masks is not None:
            return [("class_logits", classes), ("masks", masks)]
        logits = field(result, "logits", *(["out"] if requested else []))  # torchvision's
    elif requested:
        logits = result if isinstance(result, Tensor) else None
    else:
        return []
    return [("logits", logits)] if logits is not None and logits.ndim == 4 and logits.shape[1] > 1 else []


def _segmentation(model: nn.Module, outputs: Sequence[TensorSpec]) -> SegmentationSpec:
    return SegmentationSpec() if outputs[0].name == "logits" else SegmentationSpec("queries", mask_size(model))


def mask_size(model: nn.Module) -> tuple[int, int] | None:
    """Return the (height, width) to which transformers' processor first enlarges this class's masks; None if none."""
    name = type(model).__name__
    if name.startswith("Mask2Former"):
        return MASK2FORMER_MASKS
    return sides(getattr(getattr(model, "config", None), "image_size", None)) if name.startswith("Eomt") else None


def _depth_maps(result: Any, requested: bool) -> list[Output]:
    """Depth [b, h, w] by name; a bare tensor, also [b, 1, h, w], if the task is requested."""
    depth = field(result, "predicted_depth")
    if depth is None and requested:
        depth = result if isinstance(result, Tensor) else field(result, "depth")
    if depth is None or not (depth.ndim == 3 or (depth.ndim == 4 and depth.shape[1] == 1)):
        return []
    return [("depth", depth)]


def _depth(model: nn.Module, outputs: Sequence[TensorSpec]) -> DepthSpec:
    config = getattr(model, "config", None)
    metric = getattr(config, "depth_estimation_type", None) == "metric" or type(model).__name__.startswith(METRIC)
    limit = getattr(config, "max_depth", None) if metric else None
    return DepthSpec("metric" if metric else "inverse", max_depth=float(limit) if limit else None)


def sizes_of_patches(model: nn.Module, image_size: tuple[int, int]) -> str | None:
    """Describe the next smaller and larger image sizes that the model's patches divide; None if they divide this one,
    or the model does not declare its patch size."""
    config = getattr(model, "config", None)
    parts = (config, getattr(config, "backbone_config", None))
    patch = next((side for part in parts if isinstance(side := getattr(part, "patch_size", None), int)), None)
    if not patch or not any(side % patch for side in image_size):
        return None
    down, up = (
        [max(1, side // patch + more) * patch if side % patch else side for side in image_size] for more in (0, 1)
    )
    return f"{down[0]}x{down[1]} or {up[0]}x{up[1]}, which patches of {patch} pixels divide"


SEGMENTATION = TaskOutputs(
    "segmentation",
    _class_maps,
    "logits [batch, classes, height, width]; class_queries_logits and masks_queries_logits",
    _segmentation,
)
DEPTH = TaskOutputs("depth", _depth_maps, "predicted_depth [batch, height, width]", _depth)


# --- Recognise the picture of an image-to-image model -----------------------------------------------------------------


def _picture(result: Any, requested: bool) -> list[Output]:
    """[b, c, h, w] with 1 or 3 channels: by transformers' name, or a bare tensor if the task is requested."""
    found = result if isinstance(result, Tensor) and requested else field(result, RECONSTRUCTION)
    return [(RECONSTRUCTION, found)] if found is not None and found.ndim == 4 and found.shape[1] in (1, 3) else []


IMAGE_ROW = TaskOutputs(
    "image-to-image", _picture, "reconstruction [batch, 1 or 3, height, width]", lambda model, outputs: ImageSpec()
)


# --- Recognise the queries with masks of an instance segmentation model -----------------------------------------------


# Score threshold of transformers' EoMT processor.
EOMT_THRESHOLD = 0.8
# The transformers class whose queries with boxes and masks are instances; those of all others are panoptic.
RF_DETR = "RfDetrForInstanceSegmentation"


def _queries(result: Any, requested: bool) -> list[Output]:
    """Only if the task is requested: semantic models have the same outputs."""
    if not requested or not isinstance(result, Mapping) or field(result, "pred_boxes") is not None:
        return []
    classes = field(result, "class_queries_logits", "pred_logits")
    return _pair(classes, field(result, "masks_queries_logits", "pred_masks"))


def _with_boxes(result: Any, requested: bool) -> list[Output]:
    """Only if the task is requested: panoptic models have the same outputs. The boxes are dropped."""
    if not requested or not isinstance(result, Mapping) or field(result, "pred_boxes") is None:
        return []
    return _pair(field(result, "logits", "pred_logits"), field(result, "pred_masks"))


def _pair(classes: Tensor | None, masks: Tensor | None) -> list[Output]:
    if classes is None or masks is None or (classes.ndim, masks.ndim) != (3, 4):
        return []
    return [("class_logits", classes), ("masks", masks)]


def _spec(model: nn.Module, outputs: Sequence[TensorSpec]) -> InstanceSpec:
    """Return the decoding of the class's transformers processor; Mask2Former's for classes outside transformers."""
    if type(model).__name__.startswith("Eomt"):
        return InstanceSpec("softmax", "queries", mask_size(model), "bilinear", EOMT_THRESHOLD)
    return InstanceSpec(mask_size=mask_size(model))


QUERIES = TaskOutputs(
    "instance-segmentation", _queries, "class_queries_logits and masks_queries_logits, with --task", _spec
)
DETECTOR = TaskOutputs(
    "instance-segmentation",
    _with_boxes,
    "logits, pred_boxes and pred_masks of independent scores (RF-DETR), with --task",
    lambda model, outputs: InstanceSpec("sigmoid", enlarge="bilinear"),
)


# --- Recognise the heat maps of a keypoint model ----------------------------------------------------------------------


def _heatmaps(result: Any, requested: bool) -> list[Output]:
    """[b, k, h, w] by the name in transformers and mmpose, or a bare tensor if the task is requested."""
    maps = result if isinstance(result, Tensor) and requested else field(result, "heatmaps")
    return [(HEATMAPS, maps)] if maps is not None and maps.ndim == 4 else []


def _points(model: nn.Module, outputs: Sequence[TensorSpec]) -> KeypointSpec:
    """Return the keypoint spec with the skeleton's lines from a transformers config."""
    edges = getattr(getattr(model, "config", None), "edges", None)
    count = KeypointSpec().number_of_classes(outputs) or 0
    pairs = [tuple(edge) for edge in edges] if isinstance(edges, list | tuple) else []
    fits = all(len(pair) == 2 and all(type(end) is int and 0 <= end < count for end in pair) for pair in pairs)
    return KeypointSpec(skeleton=tuple((a, b) for a, b in pairs) if fits else ())


KEYPOINT_ROW = TaskOutputs("keypoints", _heatmaps, "heatmaps [batch, points, height, width]", _points)


# --- The recogniser: one row per task ---------------------------------------------------------------------------------


# Names of an embedding in a mapping.
VECTORS = ("image_embeds", "pooler_output", "features", "embedding", "embeddings")
# A map with fewer channels, or with fewer image pixels per map pixel on a side, is a value for every pixel.
_MANY_CHANNELS, _FINE = 64, 8
_FEW_CHANNELS = 3  # a mask or a picture, not a vector


def recognised(result: Any, task: Task | None) -> tuple[TaskOutputs, list[Output]] | None:
    """Return the first row that finds its outputs, trying that of `task` first; None if no row does. Outputs that are
    not float match only the fallback task."""
    if isinstance(result, tuple | list) and len(result) == 1:
        return recognised(result[0], task)
    rows = (*_declared(result, task), *ROWS)
    for row in (*_added(task), *sorted(rows, key=lambda row: row.task != task)):
        outputs = row.find(result, row.task == task)
        if outputs and (row is ROW or all(tensor.is_floating_point() for _, tensor in outputs)):
            return row, outputs
    return None


def other_tasks(result: Any, task: Task) -> tuple[Task, ...]:
    """Return the other tasks, best first, that match if requested, without the fallback task."""
    known = [*ROWS, *_declared(result, None), *(row for each in DEVICE_ROWS for row in _added(each))]
    rows = [row for row in known if row.task != task and row is not ROW and row.find(result, True)]
    return tuple(dict.fromkeys(row.task for row in rows))


def _objects(result: Any, requested: bool) -> list[Output]:
    """A detector's [b, q, c] and [b, q, 4], by the names in transformers and in the papers' code, or in this order."""
    if isinstance(result, Mapping):
        logits, boxes = field(result, "logits", "pred_logits"), field(result, "pred_boxes")
    else:
        logits, boxes, *_ = tensors_of(result, 2, 3) or (None, None)
    if logits is None or boxes is None or (logits.ndim, boxes.ndim, boxes.shape[-1]) != (3, 3, 4):
        return []
    return [("logits", logits), ("boxes", boxes)]


def _segments(result: Any, requested: bool) -> list[Output]:
    """A detector's outputs, and masks [b, q, h, w] of its queries."""
    masks = field(result, "pred_masks") if isinstance(result, Mapping) else next(iter(tensors_of(result, 3)[2:]), None)
    objects = _objects(result, requested)
    return [*objects, ("masks", masks)] if objects and masks is not None else []


def _classes(result: Any, requested: bool) -> list[Output]:
    """[b, k]; or [b] as a bare tensor."""
    logits = result if isinstance(result, Tensor) else field(result, "logits")
    fits = logits is not None and (logits.ndim == 2 or (logits is result and logits.ndim == 1))
    return [("logits", logits)] if logits is not None and fits else []


def _features(result: Any, requested: bool) -> list[Output]:
    """[b, d], as a bare tensor if the task is requested; tokens; pooled and token tensors; transformers' fields."""
    if isinstance(result, Tensor):
        return [("features", result)] if result.ndim == 2 and requested else _tokens(result)
    if isinstance(result, Mapping):
        pooled, hidden = field(result, *VECTORS), field(result, "last_hidden_state")
        outputs: list[Output] = [] if pooled is None else [("features", pooled.flatten(1))]
        tokens = [] if hidden is None else _tokens(hidden)
        return [*outputs, *(tokens[1:] if outputs else tokens)]
    pooled, tokens_of, *_ = tensors_of(result, 2, 3) or (None, None)
    if pooled is None or tokens_of is None or (pooled.ndim, tokens_of.ndim) != (2, 3):
        return []
    return [("features", pooled), ("patch_features", tokens_of)]


def map_of(result: Any, image_size: tuple[int, int]) -> tuple[Task, str]:
    """Decide whether a bare tensor is features, with a note, or a value for every pixel (the task "tensors").

    A backbone's map is coarse and has many channels."""
    sides, channels = result.shape[-2:], result.shape[1] if result.ndim == 4 else 1
    strides = {size // side if size % side == 0 else 0 for size, side in zip(image_size, sides, strict=True)}
    if result.ndim == 3:
        return ("tensors", "") if len(strides) == 1 and 0 not in strides and max(strides) <= _FINE else ("features", "")
    if channels < _MANY_CHANNELS or max(strides) < _FINE:
        return "tensors", ""
    return (
        "features",
        f"{OUTPUTS}{list(result.shape[1:])} per image is treated as a feature map: features are its mean",
    )


def _tokens(result: Tensor) -> list[Output]:
    """Return pooled features and patches: the first token and the others of [b, n, d], or the mean of [b, d, h, w]."""
    if result.ndim == 3:
        return [("features", result[:, 0]), ("patch_features", result[:, 1:])]
    if result.ndim == 4 and result.shape[1] > _FEW_CHANNELS:
        return [("features", result.mean(dim=(2, 3))), ("patch_features", result.flatten(2).transpose(1, 2))]
    return []


def _object_scores(model: nn.Module, outputs: Sequence[TensorSpec]) -> PostprocessSpec | None:
    """Return how objects are decoded from a detector's outputs: as in transformers; by sigmoid for other models."""
    config = getattr(model, "config", None)
    own = {key: getattr(config, key, None) for key in ("model_type", "use_focal_loss")}
    return reading_rule(own) if own["model_type"] else PostprocessSpec(scores="sigmoid")


OBJECTS = "logits [batch, queries, classes] and boxes [batch, queries, 4]"
# The first matching row applies; messages list the tasks in reverse order.
ROWS = (
    TaskOutputs("panoptic", _segments, f"{OBJECTS}, and masks [batch, queries, height, width]", _object_scores),
    TaskOutputs("detection", _objects, OBJECTS, _object_scores),
    SEGMENTATION,
    QUERIES,
    DETECTOR,
    DEPTH,
    TaskOutputs("classification", _classes, "logits [batch, classes]"),
    KEYPOINT_ROW,
    IMAGE_ROW,
    TaskOutputs("features", _features, "features [batch, width]"),
    ROW,
)


def _added(task: Task | None) -> Iterator[TaskOutputs]:
    """Yield the row of a requested task whose class names its tensors: by name, or as many tensors in order, or the
    only tensor of a mapping."""
    if task is None or (kind := postprocess_of(task)) is None or not kind.tensors or kind.reads:
        return

    def find(result: Any, requested: bool) -> list[Output]:
        values: Sequence[Any] = [*result.values()] if isinstance(result, Mapping) else [result]
        if isinstance(result, Mapping) and len(values) != 1:
            tensors: Sequence[Tensor | None] = [field(result, name) for name in kind.tensors]
        else:
            tensors = values if isinstance(values[0], Tensor) else tensors_of(values[0], len(kind.tensors))
        pairs = zip(kind.tensors, tensors, strict=False)
        outputs = [(name, each) for name, each in pairs if each is not None and each.ndim in kind.axes(name)]
        return outputs if len(outputs) == len(kind.tensors) else []

    yield TaskOutputs(task, find, kind.in_words(), lambda model, outputs: kind())


def _declared(result: Any, task: Task | None) -> Iterator[TaskOutputs]:
    """Yield the rows of tasks whose class recognises its own outputs."""
    for name, kind in recognising_classes(task).items():
        yield _by_class(name, kind, result)


def _by_class(task: Task, kind: type[OutputSpec], result: Any) -> TaskOutputs:
    def find(result: Any, requested: bool) -> list[Output]:
        floats = {name or "output": each for name, each in _named(result, "") if each.is_floating_point() and each.ndim}
        chosen = kind.among({name: tuple(each.shape[1:]) for name, each in floats.items()}, requested)
        return [(name, floats[own]) for name, own in chosen.items()]

    def meaning(model: nn.Module, outputs: Sequence[TensorSpec]) -> OutputSpec:
        return kind.by_range(all(bool(((each >= 0) & (each <= 1)).all()) for _, each in find(result, True)))

    return TaskOutputs(task, find, kind.in_words(), meaning)


# --- The last operator and layer that produced an output, observed in one run -----------------------------------------


# ATen operators that keep or average rows, and so do not characterise the output.
_KEEPS = ("mean", "clone", "_to_copy", "index", "gather", "index_select", "select", "cat")
_ENDINGS: dict[str, Ending] = {
    **dict.fromkeys(("sigmoid", "sigmoid_", "hardsigmoid"), "sigmoid"),
    **dict.fromkeys(("mm", "bmm", "native_layer_norm", "native_group_norm", "tanh", "_fused_rms_norm"), "vector"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), "vector"),
}
_TOLERANCE = 1e-4


@dataclass
class OutputWatch(TorchDispatchMode):
    """The last operator and the last layer that wrote to each address; views share it."""

    operators: dict[int, Ending] = endings_field(default_factory=dict)
    layers: dict[int, str] = endings_field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor):
            sources = [each.data_ptr() for each in args if isinstance(each, Tensor)]
            name = func.overloadpacket.__name__
            before = self.operators.get(sources[0], "") if sources else ""
            percent = before == "sigmoid" and len(sources) == 1 and name in ("mul", "div")
            if (name in _KEEPS and sources) or percent:
                self.operators[first.data_ptr()] = "scaled" if percent else before
            elif first.data_ptr() not in sources:  # not a view
                self.operators[first.data_ptr()] = _ENDINGS.get(name, "")
        return result

    def layer(self, name: str) -> Callable[..., None]:
        """Return a forward hook for the layer."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self.layers[output.data_ptr()] = name

        return hook

    def ending(self, output: Tensor) -> Ending:
        """Return the ending of an output [batch, width] or [batch]: from its values if conclusive, else by operator."""
        rows = output.detach().double().reshape(len(output), -1)
        if rows.shape[1] > 1 and bool(rows.isfinite().all()):
            if bool((rows >= 0).all()) and (_all_one(rows.sum(1)) or _all_one(rows.sum(1) / 100)):
                return "softmax"
            if bool((rows <= 0).all()) and _all_one(rows.exp().sum(1)):
                return "log"
            if _all_one(rows.norm(dim=1)):
                return "vector"
        return self.operators.get(output.data_ptr(), "")


def _all_one(numbers: Tensor) -> bool:
    return bool(((numbers - 1).abs() < _TOLERANCE).all())


def watched(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, OutputWatch]:
    """Return the result of `run` and its watch. A module that cannot be watched is run without it."""
    watch = OutputWatch()
    with contextlib.ExitStack() as hooks:
        for name, layer in model.named_modules():
            if next(layer.children(), None) is None:
                with contextlib.suppress(Exception):  # TorchScript layers do not accept hooks
                    hooks.callback(layer.register_forward_hook(watch.layer(name)).remove)
        try:
            with watch:
                return run(), watch
        except Exception:
            watch = OutputWatch()
    return run(), watch
