"""What an app uses: image in, answer out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.errors import HostError, ManifestError, TargetError
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.postprocess import Classification, classify
from vitdeploy.runtime.preprocess import ImageSource, Pixels, load_pixels, to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec, Manifest, PreprocessSpec

# How many images a runner with a dynamic batch is given at once.
DYNAMIC_CHUNK = 8


class Predictor:
    """Classifies images with one engine of a bundle. Use as a context manager, or call `close`.

    >>> predictor = load("out/digits")            # doctest: +SKIP
    >>> predictor.predict("seven.png").label      # doctest: +SKIP
    '7'
    """

    def __init__(self, runner: Runner, preprocess: PreprocessSpec, labels: Sequence[str] | None) -> None:
        self.runner = runner.load()
        self.preprocess = preprocess
        self.labels = labels
        self._input = runner.inputs[0]
        size = self._input.shape[0]
        self._batch = size if isinstance(size, int) else DYNAMIC_CHUNK

    @property
    def target(self) -> str:
        return self.runner.name

    def predict(self, image: ImageSource, top: int = 5) -> Classification:
        """Classify one image: a path, file bytes, a PIL image or a uint8 array [height, width, channels].

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        return self.predict_batch([image], top)[0]

    def predict_batch(self, images: Sequence[ImageSource], top: int = 5) -> list[Classification]:
        """Classify images, in as many runs as the engine's batch needs; the last run is padded."""
        pixels = [load_pixels(image, self.preprocess) for image in images]
        if not pixels:
            return []
        return [classify(logits, self.labels, top) for logits in self.logits(pixels)]

    def logits(self, pixels: Sequence[Pixels]) -> Array:
        """float32 [n, classes] for n preprocessed images, each uint8 [height, width, channels]."""
        outputs = []
        for start in range(0, len(pixels), self._batch):
            chunk = list(pixels[start : start + self._batch])
            missing = self._batch - len(chunk) if isinstance(self._input.shape[0], int) else 0
            feed = to_input(chunk + [chunk[-1]] * missing, self.preprocess, self._input)
            result = self.runner.infer({self._input.name: feed})[self.runner.outputs[0].name]
            outputs.append(result[: len(chunk)])
        return np.concatenate(outputs)

    def close(self) -> None:
        self.runner.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(path: str | Path, target: str = "auto", *, threads: int = 0) -> Predictor:
    """The predictor of a bundle folder.

    `target` "auto" takes the first engine of the manifest whose runtime works here (the manifest lists the recommended
    one first). The digests of the files that the engine needs are checked before the runtime sees them.

    Raises:
        MissingFileError, ManifestError, DigestError: not a bundle, or not an intact one.
        TargetError: the bundle has no such target.
        HostError: no runtime that works here.
    """
    folder = Path(path)
    manifest = read_bundle(folder)
    labels = read_labels(folder, manifest)
    failures: list[HostError] = []
    for engine in select_engines(manifest, target):
        verify_files(folder, manifest, engine.files)
        try:
            return Predictor(make_runner(folder, engine, threads=threads), manifest.preprocess, labels)
        except HostError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise HostError(
        f"no engine of {folder} works here",
        found="; ".join(error.message for error in failures) or "no engine at all",
        fix=" or ".join(error.fix for error in failures if error.fix),
    )


def select_engines(manifest: Manifest, target: str) -> list[EngineSpec]:
    """The engines of a target (or of all, for "auto"), in the manifest's order."""
    chosen = [engine for engine in manifest.engines if target in ("auto", engine.target)]
    if not chosen:
        raise TargetError(
            f"the bundle {manifest.name} has no engine for {target}",
            found=", ".join(engine.target for engine in manifest.engines) or "none",
            fix=f"vitdeploy compile BUNDLE --target {target} -o DIR" if target != "auto" else "",
        )
    return chosen


def read_labels(folder: Path, manifest: Manifest) -> list[str] | None:
    """One label a class, or None where the bundle has none.

    Raises:
        DigestError, ManifestError: the file is not the recorded one, or has not one line a class.
    """
    if manifest.labels is None:
        return None
    verify_files(folder, manifest, [manifest.labels])
    # Not splitlines(): a label may hold other characters that it takes for the end of a line.
    labels = (folder / manifest.labels).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    for engine in manifest.engines:
        if (len(labels),) != engine.outputs[0].shape[-1:]:
            raise ManifestError(
                f"{folder / manifest.labels} does not fit the engine {engine.artifact}",
                found=f"{len(labels)} labels",
                wanted=f"one a class: {engine.outputs[0]}",
            )
    return labels
