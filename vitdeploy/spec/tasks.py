"""What the outputs of each task are: their tensors, how they are read, and when two are comparable."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args

from vitdeploy.extensions import entry_points_of, load_row
from vitdeploy.spec.coding import SPARSE, Extensible
from vitdeploy.spec.preprocess import TensorSpec, last_axis


class OutputSpec:
    """What the outputs of a task mean: a frozen dataclass for each task that has something to say of that.

    tensors: the float outputs [batch, ...] by their names, each with its number of axes, by which a graph or a module
        of others is of the task where that is asked for; it then means what the defaults say. For tasks of other
        packages: ours are recognised in `graph.io.outputs` and `models.external.outputs`.
    """

    tensors: ClassVar[Mapping[str, int]] = {}

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes the outputs are of, without "no object"; None where there are none, or they do not say."""
        return None


# --- What the outputs of a model of anomalies mean --------------------------------------------------------------------


DISTANCES, NEIGHBOURS = "distances", "neighbours"
# The names that anomalib gives its outputs.
ANOMALY_MAP, PREDICTED_SCORE = "anomaly_map", "pred_score"


@dataclass(frozen=True)
class AnomalySpec(OutputSpec):
    """From a model's outputs to the anomaly score of an image and of every pixel.

    Of a memory bank: "distances" [height, width] of the patches to normal ones, and "neighbours" [b], the distances of
    the patch with the largest one to the entry nearest to it (first) and to those around that entry (PatchCore, arXiv
    2106.08265, equation 7). Of other models: "anomaly_map" [1, height, width] and "pred_score" [], map and score.

    `threshold`: an image whose score is above it is anomalous; `pixel_threshold`: the same of a pixel. `sigma`: of the
    Gaussian that smooths the map, in pixels of the model's input (section 4.2 of the paper); 0 smooths nothing.
    """

    threshold: float
    pixel_threshold: float
    sigma: float = 4.0

    def __post_init__(self) -> None:
        if self.sigma < 0:
            raise ValueError(f"sigma {self.sigma:g}: wanted 0 or more pixels")

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number: all but the neighbours, which are those of one
        patch, and another patch's where two are about as far."""
        return [name for name in outputs if name != NEIGHBOURS]


# What anomalib's exported graphs mean: their scores are scaled so that its own threshold is at 0.5.
GIVEN = AnomalySpec(threshold=0.5, pixel_threshold=0.5, sigma=0.0)


# --- What the outputs of the tasks with an answer for every pixel mean, and those of no task at all -------------------
# `spec.tasks` joins them into `Postprocess`. No two of these classes have the same fields, so that JSON values say of
# which class they are.


# Segmentation: "logits" of every pixel, or masks of queries and the classes of these.
SegmentationMaps = Literal["logits", "queries"]
DepthValues = Literal["inverse", "metric"]
DepthResize = Literal["bilinear", "bicubic"]


# What is said where a graph or a module does not say it.
INVERSE_ASSUMED = "the depth is taken for relative inverse depth (postprocess: {values: metric} says otherwise)"
MASKS_ASSUMED = (
    "masks are not enlarged before their sigmoid, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)


@dataclass(frozen=True)
class TensorsSpec(OutputSpec):
    """Outputs of no task. `exact` are those that are no floats (indices, counts, masks of booleans): they are equal or
    not, and have no distance."""

    exact: tuple[str, ...] = ()

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number."""
        return [name for name in outputs if name not in self.exact]


@dataclass(frozen=True)
class SegmentationSpec(OutputSpec):
    """From the outputs of a semantic segmentation model to the class of every pixel.

    `maps` "logits": "logits" [classes, height, width]. "queries": "class_logits" [queries, classes + 1], whose last
    column is "no object", and "masks" [queries, height, width], logits; the score of a class at a pixel is the sum over
    the queries of softmax times sigmoid (arXiv 2107.06278, section 3.4). `mask_size`: (height, width) to which the
    masks are enlarged before their sigmoid; None leaves them as they are.

    Of labelled maps: the value `ignore` has no class; with `reduce_labels` 0 has none either, and 1 is class 0.
    """

    maps: SegmentationMaps = "logits"
    mask_size: tuple[int, int] | None = None
    ignore: int = 255
    reduce_labels: bool = False

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        shapes = {tensor.name: tensor.shape for tensor in outputs}
        if self.maps == "queries":
            size = shapes["class_logits"][-1] if "class_logits" in shapes else None
            return size - 1 if isinstance(size, int) else None
        size = shapes["logits"][-3] if len(shapes.get("logits", ())) >= 3 else None
        return size if isinstance(size, int) else None


@dataclass(frozen=True)
class DepthSpec(OutputSpec):
    """From "depth" [height, width] of a model to a value for every pixel of the image.

    `values` "inverse": disparity, larger is nearer, known up to a scale and a shift (arXiv 1907.01341); "metric":
    metres. `resize`: how the library's own post-processing enlarges it, without antialiasing. `max_depth`: the largest
    depth that the model can say, in metres; None where it says none.
    """

    values: DepthValues = "inverse"
    resize: DepthResize = "bicubic"
    max_depth: float | None = None


# --- What the outputs of a detector mean ------------------------------------------------------------------------------


Scores = Literal["softmax", "sigmoid", "given"]
Boxes = Literal["cxcywh", "xyxy"]


@dataclass(frozen=True)
class PostprocessSpec(OutputSpec):
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


# --- How the graphs of a model run together ---------------------------------------------------------------------------


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


# --- What the picture that a model gives means ------------------------------------------------------------------------


RECONSTRUCTION = "reconstruction"


@dataclass(frozen=True)
class ImageSpec(OutputSpec):
    """From "reconstruction" [channels, height, width] to a picture of 8 bits: the value that is black, and the one that
    is white; what is beyond them is clipped."""

    black: float = 0.0
    white: float = 1.0

    def __post_init__(self) -> None:
        if not self.black < self.white:
            raise ValueError(f"black {self.black} and white {self.white}: wanted white above black")


# --- What the outputs of an instance segmentation model mean ----------------------------------------------------------


ClassScores = Literal["softmax", "sigmoid"]
Candidates = Literal["pairs", "queries"]
Enlarging = Literal["nearest", "bilinear"]

# What is said where a graph or a module does not say it.
PAIRS_ASSUMED = (
    "instances are read as Mask2Former's are (postprocess: {candidates: queries, enlarge: bilinear} are EoMT's), and "
    "masks are not enlarged before they are cut at 0, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)
# And where the same queries may be read in two ways.
QUERIES_ASSUMED = (
    "queries with masks are read as semantic segmentation; of a model that was trained for instances "
    "--task instance-segmentation (source.task in a recipe) reads objects"
)


@dataclass(frozen=True)
class InstanceSpec(OutputSpec):
    """From "class_logits" [queries, classes] and "masks" [queries, height, width], logits, to instances.

    `class_scores` "softmax": "class_logits" have one more column, the last, for "no object", and the score of an
    instance is that of its class times the mean of the sigmoids inside its mask, as in the code of Mask2Former (arXiv
    2112.01527). "sigmoid": classes are independent, and the score is that of the class alone (RF-DETR).
    `candidates` "pairs": of all pairs of query and class the best, as many as there are queries; "queries": each query
    with its best class (EoMT).
    `mask_size`: (height, width) to which the masks are enlarged, bilinear, before they are cut at 0; None leaves them
    as they are. `enlarge`: how a mask then gets the size of the image: "nearest" after it was cut, "bilinear" before.
    `threshold`: the score from which an instance is shown.
    """

    class_scores: ClassScores = "softmax"
    candidates: Candidates = "pairs"
    mask_size: tuple[int, int] | None = None
    enlarge: Enlarging = "nearest"
    threshold: float = 0.5

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        count = last_axis(outputs, "class_logits")
        return count - 1 if count is not None and self.class_scores == "softmax" else count


# --- What the heat maps of a model of key points mean -----------------------------------------------------------------


HEATMAPS = "heatmaps"
Decoding = Literal["dark", "argmax"]


@dataclass(frozen=True)
class KeypointSpec(OutputSpec):
    """From "heatmaps" [points, height, width] to points.

    `decoding` "argmax": the largest value of a map; "dark": moved from there to the peak of the parabola through the
    logarithm of the map, which a Gaussian of `kernel` pixels smooths first (DARK, arXiv 1910.06278, equations 7 to 9).
    `threshold`: the score from which a point is shown. `skeleton`: the pairs of points that a line joins in drawings.
    """

    decoding: Decoding = "dark"
    kernel: int = 11
    threshold: float = 0.3
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel}: wanted an odd number of pixels")

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many points there are, which is what labels name; None if the outputs do not say."""
        size = next((tensor.shape[1] for tensor in outputs if tensor.name == HEATMAPS), None)
        return size if isinstance(size, int) else None


# --- What the inputs and outputs of a model of promptable segmentation mean -------------------------------------------


# Kinds of a prompt's slots, as the prompt encoder numbers them: a point outside of the object or inside, the corners of
# a box, and no point at all, for which the model has an embedding of its own.
OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT, NO_POINT = 0, 1, 2, 3, -1
# A slot that is not used: it is masked in every attention.
EMPTY = -10
MASKS, IOU_SCORES = "masks", "iou_scores"


@dataclass(frozen=True)
class PromptSpec(OutputSpec):
    """From a prompt to tensors, and from the outputs to masks (SAM, arXiv 2304.02643).

    A prompt is `slots` points in pixels of the model's input, "points" [slots, 2], each of a kind, "labels" [slots].
    `closed_box`: after the corners of a box stands a slot that is no point (SAM 2); without a box there always is one.

    "masks" [4, height, width], logits, and the IoU that the model promises of each, "iou_scores" [4]. The first is for
    prompts that mean one thing, the others for those that may mean several, such as one point. A pixel is in a mask
    above `mask_threshold`. `stability`: (delta, least): where the first mask at +delta covers less than this share of
    what it covers at -delta, the best of the others takes its place (SAM 2); None of a model without this rule.
    """

    slots: int
    closed_box: bool = False
    mask_threshold: float = 0.0
    stability: tuple[float, float] | None = None


# --- Texts as tokens: of models that compare them with images, and of those that write them --------------------------


# What OpenCLIP's tokenizers do to a text first: nothing but white space; small letters; no punctuation either.
Clean = Literal["whitespace", "lower", "canonicalize"]
CLEANINGS: tuple[Clean, ...] = get_args(Clean)


@dataclass(frozen=True)
class ZeroShotSpec(OutputSpec):
    """How texts become tokens, and how the features of images and texts are compared.

    A text is `length` tokens, padded with the token `pad` on the side `padding`; `tokenizer` is the file of the bundle
    that makes them, `lowercase` whether texts become small letters first, `clean` how they are changed before all that
    (`runtime.tokenizer.cleaned`; OpenCLIP's checkpoints). The logit of an image and a text is scale * cosine + bias;
    `scores` says what its probability is: "softmax" over the texts that are given (CLIP, arXiv 2103.00020, section
    2.3), or "sigmoid" of each (SigLIP, arXiv 2303.15343, section 3.2).
    """

    length: int
    pad: int
    scale: float
    bias: float = 0.0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"
    clean: Clean | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class OpenVocabularySpec(OutputSpec):
    """How texts become tokens, and how a detector finds what they say (OWL-ViT, arXiv 2205.06230; OWLv2, 2306.09683).

    `length`, `pad`, `padding`, `tokenizer`, `lowercase` and `clean` are as in `ZeroShotSpec`. The logit of a box and a
    text is (cosine + shift) * scale, with the box's own shift and scale; of each box the best text is a candidate, with
    its sigmoid as the score, and it is shown from `threshold` on. Boxes are cx cy w h relative to the model's input.
    """

    length: int
    pad: int
    threshold: float = 0.1
    padding: Literal["left", "right"] = "right"
    lowercase: bool = False
    tokenizer: str = "tokenizer.json"
    clean: Clean | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of "scores", "labels" and "boxes" the scores: boxes of nearly equal scores for two texts may change these."""
        return [name for name in outputs if name == "scores"]


# What says how texts become tokens.
ReadsTexts: TypeAlias = "ZeroShotSpec | OpenVocabularySpec"


@dataclass(frozen=True)
class TextSpec(OutputSpec):
    """How tokens become a text: by the file `tokenizer` of the bundle, without the tokens `left_out`, such as those
    that begin, end and fill up."""

    left_out: tuple[int, ...]
    tokenizer: str = "tokenizer.json"

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """None of the outputs: the scores behind the first token that differs are of other texts."""
        return []


@dataclass(frozen=True)
class BeamSpec:
    """Beam search with the rules of transformers' `generate`: the texts that end are ranked by the sum of their tokens'
    log probabilities over (number of tokens) ** `length_penalty`.

    `early_stopping`: True ends with the first `beams` texts, False where a heuristic sees no better one, "never" where
    none can come.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ValueError(f"beams {self.beams}: wanted at least 1")


@dataclass(frozen=True)
class SequenceSpec:
    """How an encoder-decoder's tokens are decoded: which tokens start, end and pad, how many it can read and write, and
    how many different ones a source may have (None of a source that is an image).

    `search`: beam search, None takes the likeliest token at each step. `forced_end`: the last token that can be written
    is the end, whatever the model says. `no_repeat`: no run of so many tokens is written twice, the start counted.
    """

    start: int
    end: int
    pad: int
    max_length: int
    source_vocabulary: int | None
    search: BeamSpec | None = field(default=None, metadata=SPARSE)
    forced_end: bool | None = field(default=None, metadata=SPARSE)
    no_repeat: int | None = field(default=None, metadata=SPARSE)


# --- The tasks, and for each the class that says what its outputs mean ------------------------------------------------


_Ours = Literal[
    "classification",
    "features",
    "detection",
    "panoptic",
    "segmentation",
    "instance-segmentation",
    "depth",
    "anomaly",
    "keypoints",
    "image-to-image",
    "image-to-text",
    "sequence",
    "tensors",
    "zero-shot",
    "open-vocabulary-detection",
    "promptable-segmentation",
]
# The entry points of other packages' tasks: rows of `runtime.tasks.registry`.
TASKS_GROUP = "vitdeploy.runtime.tasks"


def task_names() -> tuple[str, ...]:
    """All tasks: ours, then those of other packages."""
    ours = get_args(_Ours)
    return (*ours, *(name for name in entry_points_of(TASKS_GROUP) if name not in ours))


# Types know ours alone; what is read from files may be any.
Task: TypeAlias = Annotated[_Ours, Extensible(lambda: operator.getitem(Literal, task_names()))]
# Where the labels of images come from: `data/` says what each is.
LabelKind = Literal[
    "folders", "none", "yolo", "coco", "panoptic", "masks", "depth", "targets", "prompts", "texts", "mvtec"
]

# What the outputs of a task mean, for tasks that have something to say of that: one class of data a task, or several.
_OurPostprocess: TypeAlias = (
    PostprocessSpec
    | KeypointSpec
    | SegmentationSpec
    | InstanceSpec
    | DepthSpec
    | AnomalySpec
    | ImageSpec
    | TensorsSpec
    | ZeroShotSpec
    | OpenVocabularySpec
    | PromptSpec
    | TextSpec
)
Postprocess: TypeAlias = Annotated[
    _OurPostprocess,
    Extensible(lambda: operator.getitem(Union, (_OurPostprocess, *filter(None, map(postprocess_of, task_names()))))),
]
# The class of each of our tasks; one that is not here has none.
POSTPROCESS: dict[str, type[OutputSpec]] = {
    "detection": PostprocessSpec,
    "panoptic": PostprocessSpec,
    "segmentation": SegmentationSpec,
    "instance-segmentation": InstanceSpec,
    "depth": DepthSpec,
    "anomaly": AnomalySpec,
    "zero-shot": ZeroShotSpec,
    "open-vocabulary-detection": OpenVocabularySpec,
    "tensors": TensorsSpec,
    "keypoints": KeypointSpec,
    "image-to-image": ImageSpec,
    "promptable-segmentation": PromptSpec,
    "image-to-text": TextSpec,
}


def postprocess_of(task: str) -> type[Any] | None:
    """The class that says what a task's outputs mean; None of a task with nothing to say of that.

    Raises:
        HostError: the package of the task cannot be loaded.
    """
    entry = None if task in get_args(_Ours) else entry_points_of(TASKS_GROUP).get(task)
    # The class of the row is known further up, where it is checked.
    return POSTPROCESS.get(task) if entry is None else getattr(load_row(entry, object), "postprocess", None)


def tokenizer_file(postprocess: Postprocess | None) -> str | None:
    """The file of a bundle that turns texts into tokens, or tokens into texts; None of a model without."""
    return getattr(postprocess, "tokenizer", None)
