"""The parts of a bundle that are written into an app."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, read_bundle, verify_files
from vitdeploy.errors import CapabilityError, ManifestError, TargetError
from vitdeploy.runtime import choice, runner
from vitdeploy.runtime.golden import comparable, no_golden, read_golden
from vitdeploy.runtime.inputs import further_inputs, require_image_alone
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.registry import TASKS
from vitdeploy.runtime.tasks.task import DeviceTask
from vitdeploy.runtime.values import read_labels
from vitdeploy.spec import DEVICE_ROWS, EngineSpec, Fit, Manifest, PreprocessSpec, TensorSpec

# --- The parts of a bundle that every embedding uses ------------------------------------------------------------------
# An engine that the app can run, and the golden answers as a test.


# Fits that embedded apps do not implement, in words.
NOT_DONE: Mapping[Fit, str] = {
    "longest-pad": "resize images by their longer side and pad them",
    "contain": "pad images",
}


@dataclass(frozen=True)
class Embedded:
    """A bundle of an image model, and its embedded engine.

    `digest`: the SHA-256 of the manifest, which contains the digests of all other files. `pixels`: the golden inputs,
    uint8 [n, height, width, channels]. `outputs`: the engine's outputs for them when the bundle was made, [n, ...] by
    name, if comparable (`runtime.golden.comparable`). `tolerance`: the allowed difference from these on another machine
    (`spec.GoldenEngine`). `original`: the original's outputs; at least `least_same` of the engine's answers must equal
    them. `form`: the form of the task's answers; None if it defines none.
    """

    folder: Path
    manifest: Manifest
    engine: EngineSpec
    preprocess: PreprocessSpec
    labels: list[str]
    digest: str
    pixels: runner.Array
    outputs: dict[str, runner.Array]
    tolerance: float
    original: dict[str, runner.Array]
    least_same: int
    form: forms.Form | None


def refuse_fit(found: Embedded, what: str) -> None:
    """Raise CapabilityError if `what` prepares images itself, but not with this model's fit.

    Boxes are cropped only for key points: other answers are not mapped back from a box.
    """
    fit = found.preprocess.fit
    if fit in NOT_DONE:
        raise CapabilityError(
            f"{what} cannot {NOT_DONE[fit]} yet",
            found=f"the bundle {found.manifest.name}, which prepares images with fit {fit}",
            expected="images that are resized and cropped",
        )
    if fit == "topdown" and not isinstance(found.form, forms.PointsForm):
        raise CapabilityError(
            f"{what} can crop boxes from images only for key points",
            found=f"the task {found.manifest.task}, which prepares images with fit topdown",
            expected="images that are resized and cropped",
        )


def require_pixels(found: Embedded, tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise CapabilityError unless `tensors` are one image input that `what` supports: uint8 or normalised float32."""
    size, channels = found.preprocess.crop, found.preprocess.channels
    pixels, planes = (*size, channels), (channels, *size)
    if [(tensor.dtype, tensor.shape[1:]) for tensor in tensors] not in ([("uint8", pixels)], [("float32", planes)]):
        raise CapabilityError(
            f"{what} does not support the engine's inputs",
            found=", ".join(map(str, tensors)),
            expected=f"uint8 {pixels} or float32 {planes}",
        )


def _instead(manifest: Manifest) -> str:
    """Return an alternative to a program, page or layout."""
    if manifest.preprocess is None:
        return "use vitdeploy.runtime.load_sequence(BUNDLE) in a Python app"
    return "use vitdeploy.runtime.load(BUNDLE) in a Python app, or `vitdeploy serve BUNDLE` for other apps"


def has_form(task: DeviceTask) -> bool:
    """Whether a program can output the answers of a task."""
    return task.form is not None


def find_embedded(folder: Path, targets: Sequence[str], what: str, answers: Callable[[DeviceTask], bool]) -> Embedded:
    """Return the bundle in `folder` with its first engine for one of `targets`, with every file verified.

    Args:
        answers: whether `what` supports a task.

    Raises:
        CapabilityError: an unsupported task.
        TargetError: no engine for one of `targets`.
        GateError: every such engine failed its budget.
        InputError: the bundle has no golden answers. Errors of reading the bundle propagate.
    """
    manifest = read_bundle(folder)
    task = TASKS[manifest.task]
    if manifest.preprocess is None or not answers(task):
        raise CapabilityError(
            f"{what} does not support this task yet",
            found=f"the task {manifest.task}",
            expected=", ".join(name for name in DEVICE_ROWS if answers(TASKS[name])),
            fix=_instead(manifest),
        )
    found = [each for each in manifest.engines if each.target in targets]
    if not found:
        raise TargetError(
            f"the bundle {manifest.name} has no engine that {what} can run",
            found=", ".join(each.target for each in manifest.engines) or "none",
            expected=" or ".join(targets),
            fix=f"vitdeploy run RECIPE --set 'targets=[{targets[0]}]'",
        )
    engine = choice.usable_engines(manifest, found)[0]
    require_image_alone(manifest.name, further_inputs(manifest.task, engine.inputs), what)
    verify_files(folder, manifest)
    golden = read_golden(folder, manifest, engine)
    if golden is None:
        raise no_golden(manifest, what)
    (pixels,) = golden.inputs.values()
    names = comparable(manifest, golden.outputs)
    return Embedded(
        folder,
        manifest,
        engine,
        manifest.preprocess,
        read_labels(folder, manifest) or [],
        file_sha256(folder / MANIFEST_FILE),
        np.asarray(pixels),
        {name: golden.outputs[name] for name in names},
        golden.tolerance,
        {name: golden.original[name] for name in names},
        golden.least_same,
        None if task.form is None else task.form(list(golden.outputs), manifest.postprocess),
    )


# --- Sources and settings from templates: no HTML, so templates quote values explicitly -------------------------------


def render(folder: Path, template: str, facts: Mapping[str, object]) -> str:
    """Render a template in `folder`. The caller must sanitise untrusted names in `facts`; the filter `quoted` writes a
    JSON string, and `literal` a C++ literal of any text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  # no HTML
    )
    environment.filters.update(quoted=json.dumps, literal=_literal)
    return environment.get_template(template).render(facts)


def _literal(text: str) -> str:
    """Return a C++ literal of an untrusted text: all but ASCII letters and digits as octal bytes of UTF-8."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else _octal(c) for c in text) + '"'


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("utf-8"))


# --- The golden answers of a bundle as plain binary files -------------------------------------------------------------


ORIGINAL = "original"


def write_golden(found: Embedded, out: Path) -> None:
    """Fill the new folder `out`: inputs.u8, NAME.f32 for each output of the engine, and original/NAME.f32 for those of
    the original, in little-endian float32.

    Raises:
        ManifestError: an output name is not a valid file name.
    """
    for name in found.outputs:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ManifestError(
                f"the bundle {found.manifest.name} has a golden output whose name is not a valid file name",
                found=repr(name[:60]),
                expected="letters, digits, _, - and .",
            )
    out.mkdir()
    (out / "inputs.u8").write_bytes(np.ascontiguousarray(found.pixels, np.uint8).tobytes())
    (out / ORIGINAL).mkdir()
    for folder, outputs in ((out, found.outputs), (out / ORIGINAL, found.original)):
        for name, values in outputs.items():
            (folder / f"{name}.f32").write_bytes(np.ascontiguousarray(values).astype("<f4").tobytes())
