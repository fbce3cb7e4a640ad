"""Answers are collected through a Predictor; what is not a number is never counted as an answer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from vitdeploy.errors import EngineError
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec, TensorSpec
from vitdeploy.verify.collect import collect_from_pixels

SPEC = PreprocessSpec(2, (2, 2), "bicubic", (0.5,), (0.5,))


class MeanPixel(Runner):
    """Two logits an image: its mean pixel, and the negative; an image of 255 gives NaN."""

    def _load(self) -> None:
        self.inputs = (TensorSpec("image", "uint8", ("batch", 2, 2, 1)),)
        self.outputs = (TensorSpec("logits", "float32", ("batch", 2)),)
        self.provider = "numpy"

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        mean = feeds["image"].reshape(len(feeds["image"]), -1).mean(axis=1).astype(np.float32)
        mean[mean == 255] = np.nan
        return {"logits": np.stack([mean, -mean], axis=1)}

    def _close(self) -> None:
        pass


def images(*values: int) -> list[np.ndarray]:
    return [np.full((2, 2, 1), value, np.uint8) for value in values]


def test_every_image_has_its_answer_in_order() -> None:
    seen: list[int] = []
    logits = collect_from_pixels(MeanPixel("mean"), images(*range(19)), SPEC, seen.append)
    assert logits[:, 0].tolist() == list(range(19))
    assert seen == [8, 8, 3]


def test_a_nan_is_an_error_and_not_an_answer() -> None:
    with pytest.raises(EngineError) as caught:
        collect_from_pixels(MeanPixel("mean"), images(1, 255, 3), SPEC)
    assert "1 of 3 images" in caught.value.found
