"""Zero-shot classification: images compared with texts given at run time, by similarity and probability.

Source: Radford et al., arXiv 2103.00020, section 3.1.2 (softmax); Zhai et al., arXiv 2303.15343, section 3.2 (sigmoid).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import ManifestError
from vitdeploy.runtime import flow, flows, tokenizer
from vitdeploy.runtime.postprocess import best_classes, sigmoid, softmax
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tasks.classification import ClassScore, Ranking
from vitdeploy.runtime.tasks.task import DeviceTask, OutputReading, Outputs, Result
from vitdeploy.runtime.tokenizer import OpenVocabularySpec, ReadsTexts, ZeroShotSpec
from vitdeploy.spec import Postprocess, TensorSpec


@dataclass(frozen=True)
class TextScore(ClassScore):
    """A text with its index in the list, its probability, and the cosine between its features and the image's."""

    similarity: float


@dataclass(frozen=True, repr=False)
class ZeroShot(Ranking):
    """The answer for one image: the best texts, best first. CLIP's scores add up to 1 over all given texts; SigLIP's
    scores are independent."""

    top: tuple[TextScore, ...]

    def __str__(self) -> str:
        return ", ".join(f"{each.label} {100 * each.score:.1f} % ({each.similarity:+.3f})" for each in self.top)


def unit(features: Array) -> npt.NDArray[np.float64]:
    """Return the rows scaled to length 1, float64; a row of zeros stays zero."""
    wide = features.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-300))


def logits(images: Array, texts: Array, spec: ZeroShotSpec) -> npt.NDArray[np.float32]:
    """Return scale * cosine + bias, float32 [n, texts], of features [n, width] and [texts, width]."""
    return np.asarray(spec.scale * (unit(images) @ unit(texts).T) + spec.bias, np.float32)


def compare_texts(image: Array, texts: Array, labels: Sequence[str], spec: ZeroShotSpec, top: int) -> ZeroShot:
    """Return the answer for one image's features [width] among the texts' features [texts, width]."""
    similar = unit(texts) @ unit(image)
    scaled = spec.scale * similar + spec.bias
    scores = softmax(scaled) if spec.scores == "softmax" else sigmoid(scaled)
    best = best_classes(scaled, top).tolist()
    return ZeroShot(tuple(TextScore(i, labels[i], float(scores[i]), float(similar[i])) for i in best))


def text_features(whole: flow.FlowRunner, tokens: tokenizer.Tokens) -> Array:
    """Return the text encoder's features for these tokens, float32 [texts, width], from a loaded flow."""
    texts = flow.FlowView(whole, [flows.TEXT_FEATURES]).load()
    return texts.infer({texts.inputs[0].name: tokens})[flows.TEXT_FEATURES]


class TextsBound(Runner):
    """An image and a text encoder with fixed texts, which run once: it takes images and returns "logits", float32
    [batch, texts], like a classifier. Subclasses set `tower`, the image encoder's outputs to read, and
    override `_outputs` and `_read`."""

    tower: Sequence[str] = (flows.IMAGE_FEATURES,)

    def __init__(self, whole: flow.FlowRunner, tokens: tokenizer.Tokens, spec: ReadsTexts) -> None:
        super().__init__(whole.name)
        self.whole, self.tokens, self.spec = whole, tokens, spec
        self._images = flow.FlowView(whole, self.tower)
        self._texts: Array = np.zeros(0, np.float32)

    def _load(self) -> None:
        self._images.load()
        self._texts = text_features(self.whole, self.tokens)
        self.inputs, self.provider = self._images.inputs, self._images.provider
        self.outputs = self._outputs()

    def _outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("logits", "float32", (self.inputs[0].shape[0], len(self.tokens))),)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return self._read(self._images.infer(feeds))

    def _read(self, outputs: Outputs) -> dict[str, Array]:
        assert isinstance(self.spec, ZeroShotSpec)
        return {"logits": logits(outputs[flows.IMAGE_FEATURES], self._texts, self.spec)}

    def _close(self) -> None:
        self._images.close()


class TextsSent(Runner):
    """As `TextsBound`, for a runner whose encoders are not accessible separately, such as on a device."""

    def __init__(self, whole: Runner, tokens: tokenizer.Tokens, spec: ZeroShotSpec) -> None:
        super().__init__(whole.name)
        self.whole, self.tokens, self.spec = whole, tokens, spec
        self._features: Array = np.zeros(0, np.float32)

    def _load(self) -> None:
        self.whole.load()
        image, text = self.whole.inputs
        blank = np.zeros((1, *(size if isinstance(size, int) else 1 for size in image.shape[1:])), image.dtype)
        self._features = flow.one_by_one(self.whole, {image.name: blank, text.name: self.tokens})[flows.TEXT_FEATURES]
        self.inputs, self.provider = (image,), self.whole.provider
        self.outputs = (TensorSpec("logits", "float32", (image.shape[0], len(self.tokens))),)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        text = self.whole.inputs[1].name
        found = flow.one_by_one(self.whole, {**feeds, text: self.tokens[:1]})
        return {"logits": logits(found[flows.IMAGE_FEATURES], self._features, self.spec)}

    def _close(self) -> None:
        self.whole.close()


def unanswered(outputs: Outputs, reading: OutputReading) -> Result:
    raise AssertionError("the predictor with two encoders makes the answers: it has the texts")


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether the best text is the same."""
    return int(ours["logits"].argmax()) == int(theirs["logits"].argmax())


def bind_texts(
    runner: Runner, given: Mapping[str, Array], postprocess: Postprocess | None, kind: type[TextsBound] = TextsBound
) -> TextsBound:
    """Return the image and text encoders with the texts in `given`, one array of tokens; raise ManifestError for other
    encoders or tokens."""
    tokens, spec = list(given.values()), ZeroShotSpec if kind is TextsBound else OpenVocabularySpec
    if not isinstance(runner, flow.FlowRunner) or not isinstance(postprocess, spec) or len(tokens) != 1:
        raise ManifestError("golden inputs do not fit a model of two encoders", found=", ".join(given), expected="text")
    return kind(runner, tokens[0], postprocess)


ZERO_SHOT = DeviceTask(
    unanswered,
    _same,
    bind_texts,
    predictor="vitdeploy.runtime.predictors:ZeroShotPredictor",
    takes="texts",
    flow=flows.TOWERS,
    postprocess=ZeroShotSpec,
)
