"""Run an artifact over images and keep its answers. It is driven exactly as an app drives it: through a Predictor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import EngineError
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import Pixels, load_pixels
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import PreprocessSpec

CHUNK = 8


def collect_logits(
    runner: Runner,
    images: Sequence[Path],
    preprocess: PreprocessSpec,
    progress: Callable[[int], None] = lambda images: None,
) -> npt.NDArray[np.float32]:
    """float32 [n, classes] for n image files, at most `CHUNK` images in memory at a time.

    Raises:
        ImageError, MissingFileError: an image cannot be used.
        EngineError: an output is NaN or infinite.
    """
    return collect_from_pixels(runner, (load_pixels(image, preprocess) for image in images), preprocess, progress)


def collect_from_pixels(
    runner: Runner,
    pixels: Iterable[Pixels],
    preprocess: PreprocessSpec,
    progress: Callable[[int], None] = lambda images: None,
) -> npt.NDArray[np.float32]:
    """The same for images that are already resized and cropped, uint8 [height, width, channels] each."""
    results, held = [], []
    with Predictor(runner, preprocess, None) as predictor:
        for image in pixels:
            held.append(image)
            if len(held) == CHUNK:
                results.append(predictor.logits(held))
                progress(len(held))
                held = []
        if held:
            results.append(predictor.logits(held))
            progress(len(held))
    logits = np.concatenate(results).astype(np.float32, copy=False)
    broken = int((~np.isfinite(logits)).any(axis=1).sum())
    if broken:
        raise EngineError(
            f"{runner.name} gives outputs that are not finite",
            found=f"NaN or infinity for {broken} of {len(logits)} images",
            wanted="finite logits",
            fix="choose another precision, or check the checkpoint",
        )
    return logits
