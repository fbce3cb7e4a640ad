"""A C++ program for OpenVINO: one source file, CMakeLists.txt, the engine, and the golden answers as a test."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from vitdeploy import __version__
from vitdeploy.embed.source import Embedded, find_embedded, has_form, refuse_fit, render, require_pixels, write_golden
from vitdeploy.runtime.openvino import HALVES, PRECISION_HINTS
from vitdeploy.runtime.tasks import forms

TARGETS = ("openvino-cpu",)
TOP = 5
FIND_OPENVINO = "\"$(python -c 'import openvino.utils as u; print(u.get_cmake_path())')\""
A_MAP = "also writes a numpy file per image into DIR:"
# The values in each output line, after the path of the image.
COLUMNS: Mapping[type[forms.Form], str] = {
    forms.RankingForm: "class, label, score; best classes first",
    forms.LabelsForm: "label number, label, score, 1 above its threshold and 0 below; all labels in order",
    forms.DecisionForm: "yes or no, meaning of yes, score",
    forms.VectorForm: "the numbers of the vector",
    forms.NumbersForm: "number, name, value, unit",
    forms.BoxesForm: "class, label, score, left, top, right, bottom; highest score first",
    forms.ClassMapForm: "class, label, pixels, share of the image; largest class first",
    forms.DepthForm: "minimum, median, maximum",
    forms.MatteForm: "share of the image in the mask, left, top, right, bottom of the mask",
    forms.PointsForm: "box number from 0, point, name, score, x, y; points above the threshold",
    forms.PictureForm: "width, height, channels and mean level of the output image",
}
# The option for a folder of additional output files, and their description.
FILES: Mapping[type[forms.Form], tuple[str, str]] = {
    forms.ClassMapForm: ("--maps", f"{A_MAP} int16 [height, width] of classes, -1 outside the model's input"),
    forms.DepthForm: ("--maps", f"{A_MAP} float32 [height, width], NaN outside the model's input"),
    forms.MatteForm: (
        "--maps",
        f"{A_MAP} float32 [height, width], the matte, NaN outside the model's input",
    ),
    forms.PictureForm: ("--pictures", "also writes the output image as a PNG into DIR, for each image"),
}
# The types of a map's pixels in C++ and numpy.
CLASSES = {"map_type": "int16_t", "map_dtype": "int16", "map_descr": "<i2"}
FLOATS = {"map_type": "float", "map_dtype": "float32", "map_descr": "<f4"}


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a program for the bundle in `folder`; return the commands to build and test it.

    Raises:
        CapabilityError: the task or the input is not supported. Other errors as `source.find_embedded`.
    """
    embedded = find_embedded(folder, TARGETS, "the C++ program", has_form)
    refuse_fit(embedded, "the C++ program")
    require_pixels(embedded, embedded.engine.inputs, "the C++ program")
    project = re.sub(r"[^A-Za-z0-9]+", "_", embedded.manifest.name).strip("_") or "model"
    project = project if project[0].isalpha() else f"model_{project}"
    facts = _facts(embedded, project)
    for name in ("main.cpp", "CMakeLists.txt", "README.md"):
        (out / name).write_text(render(Path(__file__).parent, f"{name}.jinja", facts), encoding="utf-8")
    for file in embedded.engine.files:
        shutil.copyfile(folder / file, out / f"model{Path(file).suffix}")
    (out / "labels.txt").write_text("".join(f"{label}\n" for label in embedded.labels), encoding="utf-8")
    write_golden(embedded, out / "golden")
    return [f"cmake -B build -DOpenVINO_DIR={FIND_OPENVINO}", "cmake --build build", "ctest --test-dir build"]


def _facts(found: Embedded, project: str) -> dict[str, object]:
    spec, engine, form = found.preprocess, found.engine, found.form
    assert form is not None, "find_embedded requires a form"
    option, files = FILES.get(type(form), ("", ""))
    options = {"PERFORMANCE_HINT": "LATENCY", **engine.options}
    options.setdefault("INFERENCE_PRECISION_HINT", PRECISION_HINTS[engine.precision])
    batch = engine.inputs[0].shape[0]
    return {
        "name": project,
        "project": project,
        "version": __version__,
        "digest": found.digest,
        "task": found.manifest.task,
        "columns": _columns(form),
        "form": form,
        "top": TOP,
        "channels": spec.channels,
        "crop": spec.crop,
        "short_side": spec.resize if isinstance(spec.resize, int) else None,
        "resize": spec.resize,
        "cover": spec.fit == "cover",
        "even": spec.crop_rounding == "even",
        "interpolation": spec.interpolation,
        "batch": batch if isinstance(batch, int) else 1,
        "tolerance": f"{found.tolerance:.9e}",
        "normalised": engine.inputs[0].dtype == "float32",
        "bgr": spec.channel_order == "bgr",
        "mean": [f"{value:.9e}" for value in spec.mean],
        "std": [f"{value:.9e}" for value in spec.std],
        "options": ", ".join(f"{{{json.dumps(key)}, {json.dumps(value)}}}" for key, value in options.items()),
        # Float operators of an INT8 engine may also run in fp32.
        "half": hint if (hint := options["INFERENCE_PRECISION_HINT"]) in HALVES and not engine.float_rest else "",
        "outputs": ", ".join(json.dumps(name) for name in found.outputs),
        "images": len(found.pixels),
        "topdown": spec.fit == "topdown",
        "option": option,
        "maps_too": files,
        **(CLASSES if isinstance(form, forms.ClassMapForm) else FLOATS),
        # Map cells that are interpolated for a pixel, per axis.
        "taps": 4 if isinstance(form, forms.DepthForm) and form.resize == "bicubic" else 2,
    }


def _columns(form: forms.Form) -> str:
    if not isinstance(form, forms.PartsForm):
        return f"path, {COLUMNS[type(form)]}"
    kinds = {part.form.kind: COLUMNS[type(part.form)] for part in form.parts}
    return "path, name of the part; then for " + ", for ".join(f"{kind}: {text}" for kind, text in kinds.items())
