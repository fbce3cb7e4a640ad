"""The measures of each task, in words and columns: its metric against labels, its agreement, and its own numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from vitdeploy.document.report import Judgement
from vitdeploy.document.verified import Verified
from vitdeploy.report import text

Format = Callable[[float | None], str]


@dataclass(frozen=True)
class Metric:
    """A metric as a column says it, as a sentence says it, and what it is where its name does not say so."""

    title: str
    words: str
    meaning: str = ""


@dataclass(frozen=True)
class Measure:
    """One of a task's own numbers. `key` leads to it in an engine's `verify` ("a.b": b of a), `reference` to the
    original's, if that has one; `interval` is the key of its 95 % bounds."""

    title: str
    key: str
    form: Format
    reference: str = ""
    interval: str = ""


@dataclass(frozen=True)
class Cell:
    """A value and, in small print below it, its interval or condition."""

    value: str
    note: str = ""


_METRICS = {
    "top-1": Metric("Top-1", "top-1 accuracy"),
    "1-NN top-1": Metric(
        "1-NN top-1", "1-NN top-1 accuracy", "1-NN top-1 counts images whose nearest other image is of their class."
    ),
    "mAP": Metric("mAP", "mAP", "mAP is COCO’s: the mean over IoU 0.50 to 0.95 and over the classes."),
    "mask mAP": Metric(
        "Mask mAP",
        "mask mAP",
        "Mask mAP is COCO’s of masks: the mean over IoU 0.50 to 0.95 and over the classes; the best 100 instances of "
        "an image with a score of 0.01 or more count.",
    ),
    "PQ": Metric("PQ", "panoptic quality", "PQ is the panoptic quality, the mean over the classes."),
    "OKS AP": Metric(
        "OKS AP",
        "OKS AP",
        "OKS AP is COCO’s of key points: the mean over OKS 0.50 to 0.95, each object given by its labelled box.",
    ),
    "PCK@0.1": Metric(
        "PCK@0.1",
        "PCK@0.1",
        "PCK@0.1 counts the labelled points that are found within 10 % of the longer side of the object’s box.",
    ),
    "mIoU": Metric(
        "mIoU", "mIoU", "mIoU is the mean over the classes of the intersection over union of all images’ pixels."
    ),
    "delta-1": Metric(
        "delta-1", "delta-1", "delta-1 counts the pixels whose depth is not off by more than a factor of 1.25."
    ),
    "image AUROC": Metric(
        "Image AUROC",
        "AUROC of images",
        "Image AUROC is the chance that a defective image has a higher score than a good one; 50 % is guessing.",
    ),
    "SSIM": Metric("SSIM", "SSIM", "SSIM is the structural similarity with the target pictures; 100 of equal ones."),
    "mask IoU": Metric(
        "Mask IoU",
        "IoU of the masks",
        "Mask IoU is the mean over the prompts of the intersection over union with the labelled objects.",
    ),
    "character accuracy": Metric(
        "Character accuracy",
        "character accuracy",
        "Character accuracy is 100 % minus the character error rate: insertions, deletions and substitutions over all "
        "characters that are written.",
    ),
    "token accuracy": Metric(
        "Token accuracy", "token accuracy", "Token accuracy counts the positions that hold the wanted token."
    ),
}

_PERCENT: Format = text.number
_COSINE: Format = partial(text.number, digits=5)
_COUNT: Format = partial(text.number, digits=0)
_COSINES = (Measure("Cosine, mean", "cosine_mean", _COSINE), Measure("Cosine, least", "cosine_min", _COSINE))

_CLASSES = (
    Measure("Top-5, %", "top5", _PERCENT, "reference_top5"),
    Measure("KL, nats", "kl", text.small),
    *_COSINES,
)
_OBJECTS = (
    Measure("AP at IoU 0.50, %", "ap50", _PERCENT, "reference_ap50"),
    Measure("AP at IoU 0.75, %", "ap75", _PERCENT, "reference_ap75"),
    Measure("Objects of the original", "objects", _COUNT),
    Measure("IoU of pairs, mean", "iou_mean", partial(text.number, digits=4)),
    Measure("Score difference, mean", "score_difference_mean", text.small),
)
_MEASURES: dict[str, tuple[Measure, ...]] = {
    "classification": _CLASSES,
    "zero-shot": _CLASSES,
    "features": _COSINES,
    "detection": _OBJECTS,
    "open-vocabulary-detection": _OBJECTS,
    "panoptic": (
        Measure("PQ of things, %", "things.pq", _PERCENT, "reference_things.pq"),
        Measure("PQ of stuff, %", "stuff.pq", _PERCENT, "reference_stuff.pq"),
        Measure("SQ, %", "all.sq", _PERCENT, "reference_all.sq"),
        Measure("RQ, %", "all.rq", _PERCENT, "reference_all.rq"),
        Measure("Segments of the original", "segments", _COUNT),
        Measure("Pixels as the original, %", "pixel_agreement", _PERCENT),
    ),
    "keypoints": (
        Measure("PCK@0.1, %", "pck", _PERCENT, "reference_pck"),
        Measure("AP at OKS 0.50, %", "oks_ap50", _PERCENT, "reference_oks_ap50"),
        Measure("AP at OKS 0.75, %", "oks_ap75", _PERCENT, "reference_oks_ap75"),
        Measure("Points of the original", "points", _COUNT),
        Measure("Distance, % of the box, mean", "distance_mean", partial(text.number, digits=3)),
    ),
    "image-to-image": (
        Measure("PSNR, dB", "psnr", _PERCENT, "reference_psnr"),
        Measure("Drop of PSNR, dB", "psnr_drop", _PERCENT, interval="psnr_drop_ci95"),
        Measure("PSNR with the original’s, mean, dB", "psnr_to_original_mean", _PERCENT),
        Measure("PSNR with the original’s, least, dB", "psnr_to_original_min", _PERCENT),
    ),
    "image-to-text": (
        Measure("Texts wholly right, %", "line_accuracy", _PERCENT, "reference_line_accuracy"),
        Measure("Characters as the original, %", "character_agreement", _PERCENT),
        Measure("Texts cut", "cut", _COUNT),
    ),
    "sequence": (
        Measure("Wholly right, %", "exact_match", _PERCENT, "reference_exact_match"),
        Measure("Wholly as the original, %", "exact_agreement", _PERCENT, interval="exact_agreement_ci95"),
        Measure("Tokens compared", "tokens", _COUNT),
    ),
    "segmentation": (
        Measure("Right pixels, %", "pixel_accuracy", _PERCENT, "reference_pixel_accuracy"),
        Measure("Classes in images, of the original", "regions", _COUNT),
    ),
    "instance-segmentation": (
        Measure("AP at IoU 0.50, %", "ap50", _PERCENT, "reference_ap50"),
        Measure("AP at IoU 0.75, %", "ap75", _PERCENT, "reference_ap75"),
        Measure("Instances of the original", "instances", _COUNT),
        Measure("IoU of pairs’ masks, mean", "mask_iou_mean", partial(text.number, digits=4)),
        Measure("Score difference, mean", "score_difference_mean", text.small),
    ),
    "depth": (Measure("AbsRel", "abs_rel", partial(text.number, digits=4), "reference_abs_rel"),),
    "anomaly": (
        Measure("Image AUROC, %", "value", _PERCENT, interval="auroc_ci95"),
        Measure("of the original, %", "reference_value", _PERCENT, interval="reference_auroc_ci95"),
        Measure("Pixel AUROC, %", "pixel_auroc", _PERCENT, interval="pixel_auroc_ci95"),
        Measure(
            "of the original’s pixels, %", "reference_pixel_auroc", _PERCENT, interval="reference_pixel_auroc_ci95"
        ),
        Measure("Drop of pixel AUROC", "pixel_drop", _PERCENT, interval="pixel_drop_ci95"),
        Measure("Called anomalous", "anomalous", _COUNT, "reference_anomalous"),
        Measure("Score difference, %, mean", "score_difference_mean", text.small),
    ),
    "promptable-segmentation": (
        Measure("IoU of points, %", "point_iou", _PERCENT, "reference_point_iou"),
        Measure("IoU of boxes, %", "box_iou", _PERCENT, "reference_box_iou"),
        Measure("Prompts", "masks", _COUNT),
        Measure("IoU with the original’s, least", "iou_min", partial(text.number, digits=3)),
    ),
    "tensors": (
        Measure("Cosine, least", "cosine_min", _COSINE),
        Measure("Signal to noise, least, dB", "snr_min", partial(text.number, digits=1)),
        Measure("Equal elements, %", "equal_min", _PERCENT),
    ),
}

# Of what an agreement is a share, where that can be nothing: then it is 100 % by definition.
_COUNTED = {
    "detection": "objects",
    "open-vocabulary-detection": "objects",
    "panoptic": "segments",
    "instance-segmentation": "instances",
    "sequence": "tokens",
    "keypoints": "points",
}


def metric(report: Judgement) -> Metric | None:
    """The metric that is measured against labels; None without labels. An unknown metric keeps its own name."""
    names = (engine.verify.metric for engine in report.engines)
    name = next((name for name in names if name is not None), None)
    return None if name is None else _METRICS.get(name, Metric(name, name))


def agreement_of(report: Judgement) -> str:
    """What agreement with the original counts, in a few words; empty without engines."""
    return next((engine.verify.agreement_of for engine in report.engines), "")


def counts_nothing(report: Judgement) -> bool:
    """Whether the original gave no answers at all, so that agreement is meaningless."""
    key = _COUNTED.get(report.task)
    return key is not None and any(getattr(engine.verify, key) == 0 for engine in report.engines)


def columns(report: Judgement) -> list[Measure]:
    """The task's own numbers for which at least one engine has a value."""
    return [
        measure
        for measure in _MEASURES[report.task]
        if any(_value(engine.verify, measure.key) is not None for engine in report.engines)
    ]


def cell(verify: Verified, measure: Measure) -> Cell:
    """One engine's value, with the original's or its interval below it."""
    note = ""
    if measure.reference:
        note = f"original {measure.form(_value(verify, measure.reference))}"
    elif measure.interval:
        note = text.interval(getattr(verify, measure.interval))
    return Cell(measure.form(_value(verify, measure.key)), note)


def _value(verify: Verified, key: str) -> float | None:
    outer, _, inner = key.partition(".")
    value = getattr(verify, outer)
    if inner and value is not None:
        value = getattr(value, inner)
    return None if value is None else float(value)
