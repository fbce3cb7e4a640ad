"""From a bundle to the predictor of its task."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.bundle.checked import Verify, open_checked, retry_if_replaced
from vitdeploy.errors import InputError, TargetError
from vitdeploy.runtime import choice, values
from vitdeploy.runtime.predictor import OpenedBundle, Predictor
from vitdeploy.runtime.runner import type_name
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.spec import Manifest, PreprocessSpec, tokenizer_file

if TYPE_CHECKING:
    from vitdeploy.runtime.monitor import Monitor


def load(
    path: str | Path,
    target: str = choice.AUTO,
    *,
    batch: int | None = None,
    threads: int = 0,
    trust: Path | None = None,
    allow_failed: bool = False,
    streams: int = 1,
    reduced: bool = False,
    verify: Verify = "used",
    expect_digest: str | None = None,
    monitor: Monitor | bool = False,
) -> Predictor:
    """The predictor of a bundle folder.

    `target` "auto" takes the first engine of the manifest that works here (the manifest lists the recommended one
    first): its runtime is there, loads it, and has answered once; `Predictor.why` says which and why. `batch` is how
    many images the engine takes in one run; None leaves what it was compiled at. With `trust`, the file of a public key
    or certificate, the bundle must be signed by that identity (`bundle.sign.signed_by`). An engine that failed its
    budget when the bundle was made is refused without `allow_failed`.

    `streams` runs go on at once and share the threads, for `Predictor.stream` and for calls from several threads: more
    answers a second than one run on all threads, each of which takes longer. Engines of one graph on the CPU have them,
    with OpenVINO and ONNX Runtime; others run one at a time. With `reduced`, JPEG files that are much larger than what
    the engine takes are decoded at a part of their size: sooner, and to slightly other pixels (`runtime.reduced`).

    `verify` "used" checks the SHA-256 of each file that is read, before a runtime sees it; "all" of every file of the
    bundle; "none" of no file, and the engine is asked for its golden answers each time instead. `expect_digest`,
    "sha256:HEX" of manifest.json, refuses any other bundle, as no digest is above the manifest's.

    With `monitor`, True or a `Monitor`, the images, the answers and golden answers are watched (`Predictor.monitor`).

    A bundle that is replaced meanwhile is read again, twice at most.

    Raises:
        InputError: streams below 1, or another argument that makes no sense.
        MissingFileError, ManifestError, DigestError: not a bundle, not an intact one, or not the expected one.
        SignatureError: not signed by `trust`.
        TargetError: the bundle has no such target, or its engine has another batch and a fixed one.
        GateError: every engine of the target failed its budget.
        HostError: no runtime that works here.
    """
    folder = bundle_folder(path)
    if not isinstance(streams, int) or streams < 1:
        raise InputError("streams are runs at once", found=repr(streams), expected="a whole number from 1 on")
    from PIL import Image

    Image.preinit()  # what the first image would import: a child forked meanwhile would wait for that import forever
    how: dict[str, Any] = {"batch": batch, "threads": threads, "trust": trust, "allow_failed": allow_failed}
    how |= {
        "streams": streams,
        "reduced": reduced,
        "verify": verify,
        "expect_digest": expect_digest,
        "monitor": monitor,
    }
    options = _monitor_of(monitor)

    def read() -> Predictor:
        files = open_checked(folder, verify, expect_digest, trust)
        manifest = files.manifest
        preprocess, labels = images_of(manifest), values.read_labels(folder, manifest, files)
        tokenizer = tokenizer_file(manifest.postprocess)
        data = None if tokenizer is None else files.read(tokenizer)
        runner, engine, why = choice.choose_engine(
            folder, manifest, target, threads, trust, batch, allow_failed=allow_failed, streams=streams, files=files
        )
        try:
            module, _, kind = TASKS[manifest.task].predictor.partition(":")
            opened = OpenedBundle(files, runner, why, preprocess, labels, data)
            predictor: Predictor = getattr(importlib.import_module(module), kind).of_bundle(opened)
            if options is not None:
                from vitdeploy.runtime.monitor import watch

                predictor.monitor, predictor.canary = watch(files, engine, runner, options)
        except BaseException:
            runner.close()
            raise
        predictor.reduced = reduced
        predictor.again = partial(load, folder.absolute(), target, **how)
        return predictor

    return retry_if_replaced(folder, read)


def _monitor_of(given: object) -> Monitor | None:
    if given is None or given is False:
        return None
    from vitdeploy.runtime.monitor import Monitor

    if given is True:
        return Monitor()
    if isinstance(given, Monitor):
        return given
    raise InputError(
        "monitor says whether images and answers are watched", found=type_name(given), expected="True, or a Monitor"
    )


def bundle_folder(path: object) -> Path:
    """The path of a bundle from an app's argument.

    Raises:
        InputError: no path.
    """
    if not isinstance(path, str | Path):
        raise InputError("no bundle is named", found=type_name(path), expected="the path of its folder, str or Path")
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
            expected="a bundle for images",
            fix="vitdeploy.runtime.load_sequence(BUNDLE)",
        )
    return manifest.preprocess
