"""The values that every part shares: tensors, preprocessing, budgets, engines, the manifest.

All are frozen dataclasses of plain data. `encode` turns one into JSON values, `decode` turns JSON values back and
reports every field that does not fit. The metadata of a field may give it another name in JSON ("alias"), where that is
no name in Python, or say that it is not written where it is None (`SPARSE`). Nothing here imports more than the
standard library.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from vitdeploy.dense_spec import DepthSpec, SegmentationSpec, TensorsSpec
from vitdeploy.spec_images import ImageSpec
from vitdeploy.spec_points import KeypointSpec

MANIFEST_FORMAT = 1
# The metadata of a field that is written only where it is not None.
SPARSE = {"sparse": True}

Precision = Literal["fp32", "fp16", "bf16", "fp8", "int8", "mixed"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Fit = Literal["stretch", "cover", "topdown"]
CropRounding = Literal["even", "down"]
# What a fit does, in words before a size.
RESIZING: dict[Fit, str] = {"stretch": "resize to", "cover": "cover", "topdown": "cut out a box to"}
Scores = Literal["softmax", "sigmoid", "given"]
Boxes = Literal["cxcywh", "xyxy"]
# Of INT8 weights, whose largest is 2^(bits - 1) - 1: 127, or 63 for CPUs on which products of more bits saturate.
WeightBits = Literal[7, 8]
Task = Literal[
    "classification",
    "features",
    "detection",
    "panoptic",
    "segmentation",
    "depth",
    "keypoints",
    "image-to-image",
    "sequence",
    "tensors",
    "zero-shot",
]
# Where the labels of images come from: `data/` says what each is.
LabelKind = Literal["folders", "none", "yolo", "coco", "panoptic", "masks", "depth", "targets"]
# Whether a budget is met: proven, disproven, neither, or there is none.
GateStatus = Literal["pass", "fail", "undecided", "none"]


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of one input or output; a string in the shape is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def with_batch(self, batch: int) -> TensorSpec:
        """The same tensor with its leading axis, if dynamic, set to `batch`."""
        if self.shape and isinstance(self.shape[0], str):
            return dataclasses.replace(self, shape=(batch, *self.shape[1:]))
        return self

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class PreprocessSpec:
    """From a decoded image to the model's input.

    An integer `resize` scales the short side to that many pixels and keeps the aspect. (height, width) scales both
    sides, by `fit`: "stretch" to exactly these, whatever the aspect becomes; "cover" by the one factor that makes the
    image just cover them. All are antialiased. Then a centre crop of `crop` (height, width) pixels is taken, and pixel
    values x in 0..255 become (x / 255 - mean) / std per channel. The number of channels is the length of `mean`: 1 for
    grey, 3 for RGB.

    With `fit` "topdown" the model sees one object: a box in the image, or all of it (`runtime.topdown`).

    Half of what is cropped may be no whole pixel: the crop then begins at the even pixel next to it, as in torchvision
    and timm, or is rounded `down`, as in transformers.
    """

    resize: int | tuple[int, int]
    crop: tuple[int, int]
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    fit: Fit = "stretch"
    crop_rounding: CropRounding = "even"

    def __post_init__(self) -> None:
        if self.fit == "topdown" and self.resize != self.crop:
            raise ValueError(f"resize {self.resize}: topdown cuts out what is {self.crop[0]}x{self.crop[1]} pixels")

    @property
    def channels(self) -> int:
        return len(self.mean)


@dataclass(frozen=True)
class PostprocessSpec:
    """From the outputs of a detector to objects: what its tensors mean.

    `scores` "softmax": "logits" [queries, classes + 1], whose last column is "no object"; "sigmoid": "logits"
    [queries, classes], independent; "given": the graph itself gives "scores" and "labels" [queries].
    `boxes`: how "boxes" [queries, 4] is written, relative to the model's input: 0..1 in x and in y.
    `threshold`: the score from which an object is shown. `top_k`, of "sigmoid": how many pairs of query and class are
    candidates, the best ones; None for as many as there are queries. Panoptic: `things` are the classes with instances
    (all others are stuff), `mask_threshold` and `overlap` as in DETR's panoptic post-processing (arXiv 2005.12872,
    section 4.4).
    """

    scores: Scores = "softmax"
    boxes: Boxes = "cxcywh"
    threshold: float = 0.5
    things: tuple[int, ...] = ()
    mask_threshold: float = 0.5
    overlap: float = 0.8
    top_k: int | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number. Where the graph itself ranks what it finds, two
        objects of nearly equal scores may change places, with their labels and boxes: only the scores are."""
        return [name for name in outputs if self.scores != "given" or name == "scores"]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes "logits" are of, without "no object"; None if the outputs do not say."""
        count = last_axis(outputs, "logits")
        return count - 1 if count is not None and self.scores == "softmax" else count


@dataclass(frozen=True)
class ZeroShotSpec:
    """How texts become tokens, and how the features of images and texts are compared.

    A text is `length` tokens, padded with the token `pad` on the side `padding`; `tokenizer` is the file of the bundle
    that makes them, `lowercase` whether texts become small letters first. The logit of an image and a text is scale *
    cosine + bias; `scores` says what its probability is: "softmax" over the texts that are given (CLIP, arXiv
    2103.00020, section 2.3), or "sigmoid" of each (SigLIP, arXiv 2303.15343, section 3.2).
    """

    length: int
    pad: int
    scale: float
    bias: float = 0.0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All outputs can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """The texts are given when an image is: there is no number of classes."""
        return None


# What the outputs of a task mean, for tasks that have something to say of that: one class of data a task, or several.
Postprocess: TypeAlias = (
    PostprocessSpec | KeypointSpec | SegmentationSpec | DepthSpec | ImageSpec | TensorsSpec | ZeroShotSpec
)
# The class of each task's; a task that is not here has none.
POSTPROCESS: dict[Task, type[Postprocess]] = {
    "detection": PostprocessSpec,
    "panoptic": PostprocessSpec,
    "segmentation": SegmentationSpec,
    "depth": DepthSpec,
    "zero-shot": ZeroShotSpec,
    "tensors": TensorsSpec,
    "keypoints": KeypointSpec,
    "image-to-image": ImageSpec,
}


def last_axis(outputs: Iterable[TensorSpec], name: str) -> int | None:
    """The size of the last axis of the output `name`; None if there is no such output, or the size is open."""
    size = next((tensor.shape[-1] for tensor in outputs if tensor.name == name), None)
    return size if isinstance(size, int) else None


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: which tokens start, end and pad, how many it can read and write, and
    how many different ones a source may have."""

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int


@dataclass(frozen=True)
class FlowPart:
    """One graph of a flow, and where its inputs come from.

    `feeds`: by input of the graph, "part.output" of an earlier part, or the name of an input of the whole. `carries`:
    by input, the graph's own output of the step before, of a part that runs step by step; nothing is in it at the first
    step. `token`: the input of such a part that takes the tokens chosen last.
    `batch`: what the leading axis of its tensors is called in the whole; parts of one name run on equally many.
    """

    name: str
    feeds: dict[str, str]
    carries: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    batch: str = "batch"

    @property
    def repeats(self) -> bool:
        """Whether it runs step by step, as `SequenceSpec` says."""
        return self.token is not None


@dataclass(frozen=True)
class FlowSpec:
    """How the graphs of a model run together: `parts` in their order, and `outputs` of the whole by name, each a
    "part.output". Only the last part may repeat."""

    parts: tuple[FlowPart, ...]
    outputs: dict[str, str]


@dataclass(frozen=True)
class Budget:
    """What may be lost and what must be gained; None sets no bound.

    `max_drop` in points of top-1, `min_agreement` in percent of images with the original's top-1 answer,
    `max_latency` in milliseconds (p50 of a single stream), `max_size` in bytes of the engine's files.
    """

    max_drop: float | None = None
    min_agreement: float | None = None
    max_latency: float | None = None
    max_size: int | None = None

    def __str__(self) -> str:
        bounds = [f"{name} {bound:g}" for name, bound in vars(self).items() if bound is not None]
        return ", ".join(bounds) or "no bound"


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder: path with forward slashes relative to it, size in bytes, SHA-256 as hex."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class GraphSpec:
    """One named ONNX graph with its inputs and outputs."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class EngineSpec:
    """What one target loads, and what was seen when it ran.

    `files` are the paths that the runtime loads, `graph` is the placement they were made from. `precision` is the one
    that really ran: "int8" only when every linear and convolution placed in INT8 ran in an INT8 kernel. `kernels`
    counts linears and convolutions by the precision they ran in. `batch` is the batch the engine is compiled at unless
    the caller asks for another (only a graph with a dynamic batch can be compiled at another).

    `weight_bits` are those of INT8 weights; None without any, and in bundles of earlier versions, which have 8.

    An engine of several graphs has `parts`, each with its own files, inputs, precision and kernels; `inputs` and
    `outputs` are those of the whole. `flow` says how the parts run together (bundles of earlier versions have none: the
    names of an encoder-decoder's tensors say it), `sequence` how tokens are chosen where one part repeats.
    """

    target: str
    precision: str
    graph: str
    files: tuple[str, ...]
    batch: int
    dynamic_batch: bool
    provider: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kernels: dict[str, int] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    device: dict[str, str] = field(default_factory=dict)
    part: str = "model"
    parts: tuple[EngineSpec, ...] = ()
    sequence: SequenceSpec | None = None
    weight_bits: WeightBits | None = None
    flow: FlowSpec | None = field(default=None, metadata=SPARSE)

    @property
    def artifact(self) -> str:
        """The name of this engine in tables: target and precision."""
        return f"{self.target}-{self.precision}"


@dataclass(frozen=True)
class GoldenEngine:
    """What an engine gave for the golden inputs when the bundle was made.

    `outputs` is an .npz file; `tolerance` the largest max|a-b| / max|b| over the outputs by which the same engine may
    differ from it on another machine. At least `least_same` of its answers must be the original's.
    """

    outputs: str
    tolerance: float
    least_same: int


@dataclass(frozen=True)
class GoldenSpec:
    """Inputs and the original model's outputs for them, to check an engine wherever it is loaded.

    `inputs` and `outputs` are .npz files of arrays by tensor name. `engines`: by artifact. Bundles of earlier versions
    have a `tolerance` per target instead: twice the largest max|a-b| / max|b| between the engine and the original.
    """

    inputs: str
    outputs: str
    tolerance: dict[str, float] = field(default_factory=dict)
    engines: dict[str, GoldenEngine] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """`manifest.json` of a bundle, format 1. Data only: no field can name code.

    `preprocess` is None where the input is no image; `postprocess` is there for the tasks of `POSTPROCESS`.
    `sizes` are further image sizes of the same model, as "384x384" (height, width): `sizes/384x384` is a whole bundle.
    `gates`: by artifact, whether the engine met its budget when the bundle was made. `recommended`: the artifact that
    the verdict recommends, which is the first of `engines`; None where it recommends none of them.
    """

    format: int
    name: str
    task: Task
    graphs: dict[str, GraphSpec]
    preprocess: PreprocessSpec | None
    labels: str | None
    engines: tuple[EngineSpec, ...]
    golden: GoldenSpec | None
    files: tuple[FileEntry, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    postprocess: Postprocess | None = None
    sizes: tuple[str, ...] = ()
    gates: dict[str, GateStatus] = field(default_factory=dict)
    recommended: str | None = None

    def gate(self, engine: EngineSpec) -> GateStatus:
        """Whether an engine met its budget; "none" where it was never judged."""
        return self.gates.get(engine.artifact, "none")


def encode(value: Any) -> Any:
    """JSON values of a dataclass tree: dicts, lists (also of arrays), strings, finite numbers, booleans, None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {_key(f): encode(item) for f, item in found.items() if item is not None or not f.metadata.get("sparse")}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # an array, without importing numpy


def _key(f: dataclasses.Field[Any]) -> str:
    return str(f.metadata.get("alias", f.name))


T = TypeVar("T")


class DecodeError(ValueError):
    """The JSON values do not fit the dataclass; `problems` lists every misfit with its `$.path`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def decode(cls: type[T], data: Any) -> T:
    """Build the frozen dataclass `cls` from JSON values, strictly: no unknown field, no missing one, no coercion.

    Raises:
        DecodeError: with all problems found, each as "$.path: what was found, what is wanted".
    """
    problems: list[str] = []
    value = _decode(cls, data, "$", problems)
    if problems:
        raise DecodeError(problems)
    return typing.cast(T, value)


def _decode(kind: Any, data: Any, path: str, problems: list[str]) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in (Any, object):
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, path, problems)
    if origin is Literal:
        return _expect(data in args, data, path, f"one of {', '.join(map(str, args))}", problems)
    if origin in (typing.Union, types.UnionType):
        attempts: list[list[str]] = []
        for choice in args:
            attempt: list[str] = []
            value = _decode(choice, data, path, attempt)
            if not attempt:
                return value
            if dataclasses.is_dataclass(choice):
                attempts.append(attempt)
        if isinstance(data, dict) and attempts:  # what does not fit is inside of that which fits best
            problems.extend(sorted(attempts, key=len)[0])
            return data
        return _expect(False, data, path, " or ".join(_name(choice) for choice in args), problems)
    if origin is tuple:
        if not isinstance(data, list):
            return _expect(False, data, path, "a list", problems)
        if args[-1] is Ellipsis:
            kinds = [args[0]] * len(data)
        elif len(args) != len(data):
            return _expect(False, data, path, f"a list of {len(args)}", problems)
        else:
            kinds = list(args)
        return tuple(
            _decode(item_kind, item, f"{path}[{i}]", problems)
            for i, (item_kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is list:
        if not isinstance(data, list):
            return _expect(False, data, path, "a list", problems)
        return [_decode(args[0], item, f"{path}[{i}]", problems) for i, item in enumerate(data)]
    if getattr(origin, "__name__", "") == "ndarray":
        return _decode_array(data, path, problems)
    if origin is dict:
        if not isinstance(data, dict):
            return _expect(False, data, path, "an object", problems)
        return {key: _decode(args[1], item, f"{path}.{key}", problems) for key, item in data.items()}
    if kind is float:
        # Not math.isfinite: it fails on integers beyond the range of float.
        fits = isinstance(data, int | float) and not isinstance(data, bool) and abs(data) <= sys.float_info.max
        return float(data) if fits else _expect(False, data, path, "a finite number", problems)
    if kind is types.NoneType:
        return _expect(data is None, data, path, "null", problems)
    return _expect(type(data) is kind, data, path, _name(kind), problems)


def _decode_array(data: Any, path: str, problems: list[str]) -> Any:
    """A float64 array of one axis; numpy is there, for the dataclass that has the field imports it."""
    import numpy as np

    values: list[Any] = data if isinstance(data, list) else [None]
    fits = all(type(item) in (float, int) and abs(item) <= sys.float_info.max for item in values)
    return np.array(data, np.float64) if fits else _expect(False, data, path, "a list of finite numbers", problems)


def _decode_dataclass(cls: type, data: Any, path: str, problems: list[str]) -> Any:
    if not isinstance(data, dict):
        return _expect(False, data, path, "an object", problems)
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    before = len(problems)
    for f in dataclasses.fields(cls):
        key = _key(f)
        if key in data:
            values[f.name] = _decode(hints[f.name], data[key], f"{path}.{key}", problems)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            problems.append(f"{path}.{key}: missing")
    known = {_key(f) for f in dataclasses.fields(cls)}
    problems.extend(f"{path}.{key}: unknown field" for key in data if key not in known)
    if len(problems) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:  # of a check of its own
        problems.append(f"{path}: {error}")
        return None


def _expect(fits: bool, data: Any, path: str, wanted: str, problems: list[str]) -> Any:
    if not fits:
        problems.append(f"{path}: found {str(data)[:60]!r}, wanted {wanted}")
    return data


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return "a list"
    if dataclasses.is_dataclass(kind):
        return "an object"
    names = {str: "a string", int: "an integer", bool: "true or false", float: "a number", types.NoneType: "null"}
    return names.get(kind, str(kind))
