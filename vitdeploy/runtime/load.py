"""From a bundle to the predictor of its task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.errors import InputError, TargetError
from vitdeploy.runtime.choice import AUTO, Choice, choose_engine
from vitdeploy.runtime.labels import read_labels
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.runner import type_name
from vitdeploy.spec import (
    Manifest,
    OpenVocabularySpec,
    PreprocessSpec,
    PromptSpec,
    ReadsTexts,
    TextSpec,
    ZeroShotSpec,
    tokenizer_file,
)


def load(
    path: str | Path,
    target: str = AUTO,
    *,
    batch: int | None = None,
    threads: int = 0,
    trust: Path | None = None,
    allow_failed: bool = False,
    streams: int = 1,
    reduced: bool = False,
) -> Predictor:
    """The predictor of a bundle folder.

    `target` "auto" takes the first engine of the manifest that works here (the manifest lists the recommended one
    first): its runtime is there, loads it, and has answered once; `Predictor.why` says which and why. The digests of
    the files that the engine needs are checked before the runtime sees them. `batch` is how many images the engine
    takes in one run; None leaves what it was compiled at. With `trust`, the file of a public key or
    certificate, the bundle must be signed by that identity (`bundle.sign.signed_by`). An engine that failed its budget
    when the bundle was made is refused without `allow_failed`.

    `streams` runs go on at once and share the threads, for `Predictor.stream` and for calls from several threads: more
    answers a second than one run on all threads, each of which takes longer. Engines of one graph on the CPU have them,
    with OpenVINO and ONNX Runtime; others run one at a time. With `reduced`, JPEG files that are much larger than what
    the engine takes are decoded at a part of their size: sooner, and to slightly other pixels (`runtime.reduced`).

    Raises:
        InputError: streams below 1.
        MissingFileError, ManifestError, DigestError: not a bundle, or not an intact one.
        SignatureError: not signed by `trust`.
        TargetError: the bundle has no such target, or its engine has another batch and a fixed one.
        GateError: every engine of the target failed its budget.
        HostError: no runtime that works here.
    """
    folder = bundle_folder(path)
    require_streams(streams)
    manifest = read_bundle(folder)
    preprocess, labels = images_of(manifest), read_labels(folder, manifest)
    if (tokenizer := tokenizer_file(manifest.postprocess)) is not None:
        verify_files(folder, manifest, [tokenizer])
    choice = choose_engine(folder, manifest, target, threads, trust, batch, allow_failed=allow_failed, streams=streams)
    predictor = _of_task(folder, manifest, choice, preprocess, labels)
    predictor.reduced = reduced
    return predictor


def require_streams(streams: object) -> None:
    """
    Raises:
        InputError: no whole number from 1 on.
    """
    if not isinstance(streams, int) or streams < 1:
        raise InputError("streams are runs at once", found=repr(streams), wanted="a whole number from 1 on")


def _of_task(
    folder: Path, manifest: Manifest, choice: Choice, preprocess: PreprocessSpec, labels: Sequence[str] | None
) -> Predictor:
    if isinstance(manifest.postprocess, ZeroShotSpec | OpenVocabularySpec):
        return _among_texts(folder, manifest.postprocess, choice, preprocess, labels)
    if isinstance(manifest.postprocess, PromptSpec):
        from vitdeploy.runtime.prompted_predictor import PromptedPredictor

        return PromptedPredictor(choice.runner, preprocess, manifest.postprocess, choice.why)
    if isinstance(manifest.postprocess, TextSpec):
        return _reader(folder, manifest.postprocess, choice, preprocess)
    return Predictor(choice.runner, preprocess, labels, manifest.task, manifest.postprocess, choice.why)


def _among_texts(
    folder: Path, spec: ReadsTexts, choice: Choice, preprocess: PreprocessSpec, labels: Sequence[str] | None
) -> Predictor:
    from vitdeploy.runtime.tokenizer import TextTokenizer
    from vitdeploy.runtime.zero_shot_predictor import OpenVocabularyPredictor, ZeroShotPredictor

    try:
        tokenizer = TextTokenizer(folder / spec.tokenizer, spec)
    except BaseException:
        choice.runner.close()
        raise
    make = ZeroShotPredictor if isinstance(spec, ZeroShotSpec) else OpenVocabularyPredictor
    return make(choice.runner, preprocess, spec, tokenizer, labels, choice.why)


def _reader(folder: Path, spec: TextSpec, choice: Choice, preprocess: PreprocessSpec) -> Predictor:
    from vitdeploy.runtime.text_predictor import TextPredictor
    from vitdeploy.runtime.tokenizer import TextWriter

    try:
        writer = TextWriter(folder / spec.tokenizer, spec)
    except BaseException:
        choice.runner.close()
        raise
    return TextPredictor(choice.runner, preprocess, spec, writer, choice.why)


def bundle_folder(path: object) -> Path:
    """The path of a bundle from an app's argument.

    Raises:
        InputError: no path.
    """
    if not isinstance(path, str | Path):
        raise InputError("no bundle is named", found=type_name(path), wanted="the path of its folder, str or Path")
    return Path(path)


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
