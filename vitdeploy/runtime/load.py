"""Load a bundle as the predictor of its task."""

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
    """Return the predictor of a bundle folder.

    `target` "auto" uses the first engine of the manifest that works here: its runtime is installed, loads it and
    completes one run. The manifest lists the recommended engine first; `Predictor.why` gives the choice and its reason.
    `batch` is the number of images per run; None keeps the batch that the engine was compiled at. With `trust`, the
    file of a public key or certificate, the bundle must be signed by that identity (`bundle.sign.signed_by`). An engine
    that failed its budget when the bundle was made is refused unless `allow_failed` is set.

    `streams` is the number of concurrent runs, which share the threads, for `Predictor.stream` and for calls from
    several threads: higher throughput, but higher latency per answer. Single-graph engines on the CPU support it, with
    OpenVINO and ONNX Runtime; others run one by one. With `reduced`, JPEG files much larger than the engine's input are
    decoded at reduced size: faster, with slightly different pixels (`runtime.geometry`).

    `verify` "used" checks the SHA-256 of each file that is read, before a runtime opens it; "all" checks every file of
    the bundle; "none" checks no file, and runs the golden inputs at every load instead. `expect_digest`, the
    "sha256:HEX" of manifest.json, refuses any other bundle: the manifest has the digests of all other files.

    With `monitor`, True or a `Monitor`, images, answers and golden answers are monitored (`Predictor.monitor`).

    A bundle that is replaced while it loads is read again, at most twice.

    Raises:
        InputError: `streams` below 1, or another invalid argument.
        MissingFileError, ManifestError, DigestError: not a bundle, not an intact one, or not the expected one.
        SignatureError: not signed by `trust`.
        TargetError: the bundle has no such target, or its engine has a fixed batch other than `batch`.
        GateError: every engine of the target failed its budget.
        HostError: no engine of the target works here.
    """
    folder = bundle_folder(path)
    if not isinstance(streams, int) or streams < 1:
        raise InputError("streams must be a positive integer", found=repr(streams), expected="an integer >= 1")
    from PIL import Image

    Image.preinit()  # import plugins now: a child forked during this import would deadlock
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
        "monitor must be True, False or a Monitor", found=type_name(given), expected="True, False or a Monitor"
    )


def bundle_folder(path: object) -> Path:
    """Return the path of a bundle from an app's argument.

    Raises:
        InputError: not a path.
    """
    if not isinstance(path, str | Path):
        raise InputError(
            "the bundle path must be a str or Path", found=type_name(path), expected="the path of a bundle folder"
        )
    return Path(path)


def images_of(manifest: Manifest) -> PreprocessSpec:
    """Return the preprocessing of a bundle.

    Raises:
        TargetError: its input is not an image.
    """
    if manifest.preprocess is None:
        raise TargetError(
            f"the bundle {manifest.name} does not take images",
            found=f"the task {manifest.task}",
            expected="a bundle with an image task",
            fix="vitdeploy.runtime.load_sequence(BUNDLE)",
        )
    return manifest.preprocess
