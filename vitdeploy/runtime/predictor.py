"""What an app uses: image in, answer out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.bundle.sign import signed_by
from vitdeploy.errors import HostError, ManifestError, TargetError
from vitdeploy.runtime.answers import Result, to_result
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.preprocess import ImageSource, Pixels, load_image, to_input
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.weight_bits import bits_of, saturation_warning
from vitdeploy.spec import EngineSpec, Manifest, PostprocessSpec, PreprocessSpec, Task, TensorSpec

# How many images a runner with a dynamic batch is given at once.
DYNAMIC_CHUNK = 8


class Predictor:
    """Answers for images with one engine of a bundle. Use as a context manager, or call `close`.

    >>> predictor = load("out/digits")            # doctest: +SKIP
    >>> predictor.predict("seven.png").label      # doctest: +SKIP
    '7'
    """

    def __init__(
        self,
        runner: Runner,
        preprocess: PreprocessSpec,
        labels: Sequence[str] | None = None,
        task: Task = "classification",
        postprocess: PostprocessSpec | None = None,
    ) -> None:
        self.runner = runner.load()
        self.preprocess = preprocess
        self.labels = labels
        self.task = task
        self.postprocess = postprocess
        self._input = runner.inputs[0]
        size = self._input.shape[0]
        self._batch = size if isinstance(size, int) else DYNAMIC_CHUNK

    @property
    def target(self) -> str:
        return self.runner.name

    def predict(self, image: ImageSource, top: int = 5) -> Result:
        """The answer for one image: a path, file bytes, a PIL image or a uint8 array [height, width, channels].

        Its type is the task's: Classification (of the `top` best classes), Features, Detections or Panoptic.

        Raises:
            ImageError, MissingFileError, TensorError: the image cannot be used.
        """
        return self.predict_batch([image], top)[0]

    def predict_batch(self, images: Sequence[ImageSource], top: int = 5) -> list[Result]:
        """Answers for images, in as many runs as the engine's batch needs; the last run is padded."""
        loaded = [load_image(image, self.preprocess) for image in images]
        if not loaded:
            return []
        outputs = self.outputs([pixels for pixels, _ in loaded])
        return [
            self.answer({name: output[i] for name, output in outputs.items()}, size, top)
            for i, (_, size) in enumerate(loaded)
        ]

    def answer(self, outputs: Mapping[str, Array], size: tuple[int, int], top: int = 5) -> Result:
        """The answer that the outputs of one image mean; `size` is the original image's (width, height)."""
        return to_result(self.task, outputs, size, self.preprocess, self.postprocess, self.labels, top)

    def outputs(self, pixels: Sequence[Pixels]) -> dict[str, Array]:
        """Every output, [n, ...], for n preprocessed images, each uint8 [height, width, channels]."""
        runs = []
        for start in range(0, len(pixels), self._batch):
            chunk = list(pixels[start : start + self._batch])
            missing = self._batch - len(chunk) if isinstance(self._input.shape[0], int) else 0
            feed = to_input(chunk + [chunk[-1]] * missing, self.preprocess, self._input)
            result = self.runner.infer({self._input.name: feed})
            runs.append({name: output[: len(chunk)] for name, output in result.items()})
        return {name: np.concatenate([run[name] for run in runs]) for name in runs[0]}

    def close(self) -> None:
        self.runner.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(path: str | Path, target: str = "auto", *, threads: int = 0, trust: Path | None = None) -> Predictor:
    """The predictor of a bundle folder.

    `target` "auto" takes the first engine of the manifest whose runtime works here (the manifest lists the recommended
    one first). The digests of the files that the engine needs are checked before the runtime sees them. With `trust`,
    the file of a public key or certificate, the bundle must be signed by that identity (`bundle.sign.signed_by`).

    Raises:
        MissingFileError, ManifestError, DigestError: not a bundle, or not an intact one.
        SignatureError: not signed by `trust`.
        TargetError: the bundle has no such target.
        HostError: no runtime that works here.
    """
    folder = Path(path)
    manifest = read_bundle(folder)
    preprocess, labels = images_of(manifest), read_labels(folder, manifest)
    runner = first_working(folder, manifest, target, threads, trust)
    return Predictor(runner, preprocess, labels, manifest.task, manifest.postprocess)


def first_working(folder: Path, manifest: Manifest, target: str, threads: int, trust: Path | None = None) -> Runner:
    """The loaded runner of the first engine whose runtime works here; errors as `load`.

    A RuntimeWarning says where its weights saturate on this CPU.
    """
    signed_by(folder, trust)
    failures: list[HostError] = []
    for engine in select_engines(manifest, target):
        verify_files(folder, manifest, engine.files)
        try:
            runner = make_runner(folder, engine, threads=threads, trust=trust).load()
        except HostError as error:
            failures.append(error)
            continue
        bits = bits_of(engine)
        if bits is not None and (text := saturation_warning(bits, describe_host()["isa"])):
            warnings.warn(f"{engine.artifact}: {text}", RuntimeWarning, stacklevel=3)
        return runner
    if len(failures) == 1:
        raise failures[0]
    raise HostError(
        f"no engine of {folder} works here",
        found="; ".join(error.message for error in failures) or "no engine at all",
        fix=" or ".join(error.fix for error in failures if error.fix),
    )


def images_of(manifest: Manifest) -> PreprocessSpec:
    """How images become the input of a bundle's engines.

    Raises:
        TargetError: its input is no image.
    """
    if manifest.preprocess is None:
        raise TargetError(
            f"the bundle {manifest.name} takes no images",
            found=f"the task {manifest.task}",
            wanted="a bundle for images",
            fix="vitdeploy.runtime.load_sequence(BUNDLE)",
        )
    return manifest.preprocess


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
        classes = number_of_classes(engine.outputs, manifest.postprocess)
        if classes is not None and classes != len(labels):
            raise ManifestError(
                f"{folder / manifest.labels} does not fit the engine {engine.artifact}",
                found=f"{len(labels)} labels",
                wanted=f"one a class: {classes}",
            )
    return labels


def number_of_classes(outputs: Sequence[TensorSpec], postprocess: PostprocessSpec | None) -> int | None:
    """How many classes the logits have, without a last "no object"; None where the outputs do not say."""
    size = next((tensor.shape[-1] for tensor in outputs if tensor.name == "logits"), None)
    if not isinstance(size, int):
        return None
    return size - 1 if postprocess is not None and postprocess.scores == "softmax" else size
