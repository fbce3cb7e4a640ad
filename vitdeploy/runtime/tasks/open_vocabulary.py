"""A detector whose classes are texts that are given at run time: what its two towers say of each box and each text.

Source: Minderer et al., "Simple Open-Vocabulary Object Detection with Vision Transformers", ECCV 2022 (arXiv
2205.06230), section 3.1, and the class head of its released code: logit = (cosine + shift) * scale.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vitdeploy.errors import ManifestError
from vitdeploy.runtime.flow import FlowRunner, FlowView
from vitdeploy.runtime.flows import TOWERS
from vitdeploy.runtime.postprocess import sigmoid
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.detection import DETECTION, Detections, detect, draw_boxes
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs
from vitdeploy.runtime.tasks.zero_shot import text_features, unit
from vitdeploy.runtime.tokenizer import Tokens
from vitdeploy.spec import OpenVocabularySpec, Postprocess, PostprocessSpec, PreprocessSpec, TensorSpec

CLASS_FEATURES, SHIFT, SCALE, BOXES = "class_features", "shift", "scale", "boxes"
OF_IMAGES = (CLASS_FEATURES, SHIFT, SCALE, BOXES)
# The class head divides by lengths to which it adds this.
EPSILON = 1e-6


def head_of(spec: OpenVocabularySpec) -> PostprocessSpec:
    """How the scores, labels and boxes of `candidates` are read."""
    return PostprocessSpec(scores="given", threshold=spec.threshold)


def candidates(outputs: Outputs, texts: Array) -> dict[str, Array]:
    """float32 "scores" [..., boxes], int64 "labels" [..., boxes], "boxes" [..., boxes, 4]: of each box the best text.

    Args:
        outputs: of the image tower: "class_features" [..., boxes, width] of length 1, "shift" and "scale" [..., boxes],
            "boxes" [..., boxes, 4].
        texts: the features of the texts, [texts, width].
    """
    similar = outputs[CLASS_FEATURES].astype(np.float64) @ (unit(texts) / (1 + EPSILON)).T
    logits = (similar + outputs[SHIFT][..., None]) * outputs[SCALE][..., None]
    scores = np.asarray(sigmoid(logits.max(axis=-1)), np.float32)
    return {"scores": scores, "labels": logits.argmax(axis=-1).astype(np.int64), "boxes": outputs[BOXES]}


def find_texts(
    outputs: Outputs,
    texts: Array,
    labels: Sequence[str],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    spec: OpenVocabularySpec,
) -> Detections:
    """The objects in one image of `size` (width, height); outputs without the batch axis, texts [texts, width]."""
    return within(detect(candidates(outputs, texts), size, preprocess, head_of(spec), labels))


def within(found: Detections) -> Detections:
    """Those with an area in the image: a box may lie in what an image was padded with. transformers gives these, too,
    beside the image."""
    boxes = ((each, each.box) for each in found.objects)
    kept = tuple(each for each, (left, top, right, bottom) in boxes if right > left and bottom > top)
    return dataclasses.replace(found, objects=kept)


class TextsFound(Runner):
    """A flow of two towers with its texts given: it takes images and gives "scores", "labels" and "boxes", as a
    detector does whose graph ranks its objects itself. The texts run once."""

    def __init__(self, whole: FlowRunner, tokens: Tokens) -> None:
        super().__init__(whole.name)
        self.whole, self.tokens = whole, tokens
        self._images = FlowView(whole, OF_IMAGES)
        self._texts: Array = np.zeros(0, np.float32)

    def _load(self) -> None:
        self._images.load()
        self._texts = text_features(self.whole, self.tokens)
        self.inputs, self.provider = self._images.inputs, self._images.provider
        batch, count = next(tensor for tensor in self._images.outputs if tensor.name == SHIFT).shape
        self.outputs = (
            TensorSpec("scores", "float32", (batch, count)),
            TensorSpec("labels", "int64", (batch, count)),
            TensorSpec("boxes", "float32", (batch, count, 4)),
        )

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return candidates(self._images.infer(feeds), self._texts)

    def _close(self) -> None:
        self._images.close()


def _answer(outputs: Outputs, reading: OutputReading) -> Detections:
    raise AssertionError("the predictor of two towers answers itself: it alone has the texts")


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """As of detectors."""
    spec = reading.head(OpenVocabularySpec)
    return DETECTION.same(ours, theirs, dataclasses.replace(reading, postprocess=head_of(spec)))


def bind_texts(runner: Runner, given: Mapping[str, Array], postprocess: Postprocess | None) -> TextsFound:
    """Two towers with the texts of `given`, one array of tokens; raises ManifestError for other towers or tokens."""
    tokens = list(given.values())
    if not isinstance(runner, FlowRunner) or not isinstance(postprocess, OpenVocabularySpec) or len(tokens) != 1:
        raise ManifestError("no two towers and tokens of texts", found=", ".join(given), wanted="text")
    return TextsFound(runner, tokens[0])


OPEN_VOCABULARY = DeviceTask(
    _answer,
    _same,
    bind_texts,
    draw_boxes,
    "vitdeploy.runtime.predictors:OpenVocabularyPredictor",
    "texts",
    TOWERS,
)
