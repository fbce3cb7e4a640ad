"""Open-vocabulary detection: a detector whose classes are texts given at run time, from an image and a text encoder.

Source: Minderer et al., "Simple Open-Vocabulary Object Detection with Vision Transformers", ECCV 2022 (arXiv
2205.06230), section 3.1, and the class head of its released code: logit = (cosine + shift) * scale.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np

from vitdeploy.runtime import flows, runner
from vitdeploy.runtime.postprocess import sigmoid
from vitdeploy.runtime.tasks import detection, task, zero_shot
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tokenizer import OpenVocabularySpec
from vitdeploy.spec import PreprocessSpec, TensorSpec

CLASS_FEATURES, SHIFT, SCALE, BOXES = "class_features", "shift", "scale", "boxes"
OF_IMAGES = (CLASS_FEATURES, SHIFT, SCALE, BOXES)
# Added by the class head to the lengths by which it divides.
EPSILON = 1e-6


def head_of(spec: OpenVocabularySpec) -> PostprocessSpec:
    """Return the spec that reads the scores, labels and boxes of `candidates`."""
    return PostprocessSpec(scores="given", threshold=spec.threshold)


def candidates(outputs: task.Outputs, texts: runner.Array) -> dict[str, runner.Array]:
    """Return the best text of each box: float32 "scores" [..., boxes], int64 "labels" [..., boxes], "boxes" [...,
    boxes, 4].

    Args:
        outputs: of the image encoder: "class_features" [..., boxes, width] of length 1, "shift" and "scale" [...,
            boxes], "boxes" [..., boxes, 4].
        texts: the features of the texts, [texts, width].
    """
    similar = outputs[CLASS_FEATURES].astype(np.float64) @ (zero_shot.unit(texts) / (1 + EPSILON)).T
    logits = (similar + outputs[SHIFT][..., None]) * outputs[SCALE][..., None]
    scores = np.asarray(sigmoid(logits.max(axis=-1)), np.float32)
    return {"scores": scores, "labels": logits.argmax(axis=-1).astype(np.int64), "boxes": outputs[BOXES]}


def find_texts(
    outputs: task.Outputs,
    texts: runner.Array,
    labels: Sequence[str],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    spec: OpenVocabularySpec,
) -> detection.Detections:
    """Return the objects in one image of `size` (width, height); outputs without the batch axis, texts [texts,
    width]."""
    return within(detection.detect(candidates(outputs, texts), size, preprocess, head_of(spec), labels))


def within(found: detection.Detections) -> detection.Detections:
    """Return the objects whose box overlaps the image: a box may lie in the padding. transformers also returns
    those."""
    boxes = ((each, each.box) for each in found.objects)
    kept = tuple(each for each, (left, top, right, bottom) in boxes if right > left and bottom > top)
    return dataclasses.replace(found, objects=kept)


class TextsFound(zero_shot.TextsBound):
    """As `TextsBound`, with "scores", "labels" and "boxes" like a detector whose graph ranks its objects."""

    tower = OF_IMAGES

    def _outputs(self) -> tuple[TensorSpec, ...]:
        batch, count = next(tensor for tensor in self._images.outputs if tensor.name == SHIFT).shape
        return (
            TensorSpec("scores", "float32", (batch, count)),
            TensorSpec("labels", "int64", (batch, count)),
            TensorSpec("boxes", "float32", (batch, count, 4)),
        )

    def _read(self, outputs: task.Outputs) -> dict[str, runner.Array]:
        return candidates(outputs, self._texts)


def _same(ours: task.Outputs, theirs: task.Outputs, reading: task.OutputReading) -> bool:
    """Whether two answers agree, as for detection."""
    spec = reading.head(OpenVocabularySpec)
    return detection.DETECTION.same(ours, theirs, dataclasses.replace(reading, postprocess=head_of(spec)))


OPEN_VOCABULARY = task.DeviceTask(
    zero_shot.unanswered,
    _same,
    partial(zero_shot.bind_texts, kind=TextsFound),
    detection.draw_boxes,
    "vitdeploy.runtime.predictors:OpenVocabularyPredictor",
    "texts",
    flows.TOWERS,
    OpenVocabularySpec,
)
