"""What is written into an app."""

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
# one engine that it can run, and the golden answers as its test.


# Fits that no program of ours prepares images by, and what that would be in words.
NOT_DONE: Mapping[Fit, str] = {
    "longest-pad": "pad images beside their longer side",
    "contain": "pad images",
}


@dataclass(frozen=True)
class Embedded:
    """A bundle of an image model, and the engine of it that is embedded.

    `digest` is the SHA-256 of the manifest, which names that of everything else. `pixels` are the golden inputs, uint8
    [n, height, width, channels]; `outputs` what the engine gave for them when the bundle was made, [n, ...] by name, as
    far as it can be compared (`runtime.golden.comparable`); `tolerance` how far from that it may be on another machine
    (`spec.GoldenEngine`); `original` what the original gives, and at least `least_same`
    of the engine's answers must be its. `form`: that of its answers, None of a task that says none.
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
    """Raise CapabilityError where `what` prepares images itself, and does not as this model wants them.

    Boxes are cut out for key points alone: other answers are not mapped back from a box.
    """
    fit = found.preprocess.fit
    if fit in NOT_DONE:
        raise CapabilityError(
            f"{what} does not {NOT_DONE[fit]} yet",
            found=f"the bundle {found.manifest.name}, whose images are prepared with fit {fit}",
            expected="images that are resized and cropped",
        )
    if fit == "topdown" and not isinstance(found.form, forms.PointsForm):
        raise CapabilityError(
            f"{what} cuts boxes out of images for key points only",
            found=f"the task {found.manifest.task}, whose images are prepared with fit topdown",
            expected="images that are resized and cropped",
        )


def require_pixels(found: Embedded, tensors: Sequence[TensorSpec], what: str) -> None:
    """Raise CapabilityError unless `tensors` are one input of images as `what` makes them: plain, or normalised."""
    size, channels = found.preprocess.crop, found.preprocess.channels
    pixels, planes = (*size, channels), (channels, *size)
    if [(tensor.dtype, tensor.shape[1:]) for tensor in tensors] not in ([("uint8", pixels)], [("float32", planes)]):
        raise CapabilityError(
            f"{what} cannot feed this engine",
            found=", ".join(map(str, tensors)),
            expected=f"uint8 {pixels} or float32 {planes}",
        )


def _instead(manifest: Manifest) -> str:
    """What an app takes in the place of a program, page or layout."""
    if manifest.preprocess is None:
        return "vitdeploy.runtime.load_sequence(BUNDLE) in a Python app"
    return "vitdeploy.runtime.load(BUNDLE) in a Python app, or `vitdeploy serve BUNDLE` for others"


def has_form(task: DeviceTask) -> bool:
    """Whether a program can write the answers of a task."""
    return task.form is not None


def find_embedded(folder: Path, targets: Sequence[str], what: str, answers: Callable[[DeviceTask], bool]) -> Embedded:
    """The bundle in `folder` with its first engine for one of `targets`, with every file verified.

    Args:
        answers: whether `what` answers for models of a task.

    Raises:
        CapabilityError: another task.
        TargetError: no such engine.
        GateError: every such engine failed its budget.
        InputError: no golden answers to test it with. Errors of reading the bundle come through.
    """
    manifest = read_bundle(folder)
    task = TASKS[manifest.task]
    if manifest.preprocess is None or not answers(task):
        raise CapabilityError(
            f"{what} does not answer for models of this task yet",
            found=f"the task {manifest.task}",
            expected=", ".join(name for name in DEVICE_ROWS if answers(TASKS[name])),
            fix=_instead(manifest),
        )
    found = [each for each in manifest.engines if each.target in targets]
    if not found:
        raise TargetError(
            f"the bundle {manifest.name} has no engine that {what} could run",
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


# --- Sources and settings from templates: no HTML, so nothing is escaped except what a template quotes itself ---------


def render(folder: Path, template: str, facts: Mapping[str, object]) -> str:
    """The text of a template in `folder`. Whoever gives the facts has reduced names of others to harmless characters;
    the filter `quoted` writes a JSON string, and `literal` a literal of C++ for any text."""
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
    """A literal of C++ for a text of others: all but letters and digits of ASCII as octal bytes of UTF-8."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else _octal(c) for c in text) + '"'


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("utf-8"))


# --- The golden answers of a bundle as plain files, which every language reads ----------------------------------------


ORIGINAL = "original"


def write_golden(found: Embedded, out: Path) -> None:
    """Fill the new folder `out`: inputs.u8, NAME.f32 for each output of the engine, and original/NAME.f32 for those of
    the original; float32 in little-endian order.

    Raises:
        ManifestError: an output whose name is no name for a file.
    """
    for name in found.outputs:
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ManifestError(
                f"the bundle {found.manifest.name} has a golden output whose name is no name for a file",
                found=repr(name[:60]),
                expected="letters, digits, _, - and .",
            )
    out.mkdir()
    (out / "inputs.u8").write_bytes(np.ascontiguousarray(found.pixels, np.uint8).tobytes())
    (out / ORIGINAL).mkdir()
    for folder, outputs in ((out, found.outputs), (out / ORIGINAL, found.original)):
        for name, values in outputs.items():
            (folder / f"{name}.f32").write_bytes(np.ascontiguousarray(values).astype("<f4").tobytes())
