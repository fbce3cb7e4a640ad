"""A C++ program for OpenVINO: one source file, a CMakeLists.txt, the engine, and the golden answers as its test."""

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
A_MAP = "and a file of numpy there for each image:"
# The values of the lines that it prints, behind the path of the image.
COLUMNS: Mapping[type[forms.Form], str] = {
    forms.RankingForm: "class, label, score; the best classes first",
    forms.LabelsForm: "label's number, label, score, 1 above its threshold and 0 below; all labels in their order",
    forms.DecisionForm: "yes or no, what yes means, score",
    forms.VectorForm: "and the numbers of the vector",
    forms.NumbersForm: "number, name, value, unit",
    forms.BoxesForm: "class, label, score, left, top, right, bottom; the surest object first",
    forms.ClassMapForm: "class, label, pixels, share of the image; the largest class first",
    forms.DepthForm: "least, median and largest value",
    forms.MatteForm: "share of the image that is in the mask, and its left, top, right and bottom",
    forms.PointsForm: "number of the box from 0 on, point, name, score, x, y; the points that are shown",
    forms.PictureForm: "width, height and channels of the picture, its mean level",
}
# The option that names a folder for files beside the lines, and what these are.
FILES: Mapping[type[forms.Form], tuple[str, str]] = {
    forms.ClassMapForm: ("--maps", f"{A_MAP} int16 [height, width] of classes, -1 where the model does not see"),
    forms.DepthForm: ("--maps", f"{A_MAP} float32 [height, width], not a number where the model does not see"),
    forms.MatteForm: (
        "--maps",
        f"{A_MAP} float32 [height, width], the matte, not a number where the model does not see",
    ),
    forms.PictureForm: ("--pictures", "and the picture as a PNG there, for each image"),
}
# What a pixel of a map is to C++ and to numpy.
CLASSES = {"map_type": "int16_t", "map_dtype": "int16", "map_descr": "<i2"}
FLOATS = {"map_type": "float", "map_dtype": "float32", "map_descr": "<f4"}


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a program for the bundle in `folder`; gives the commands that build and test it
    there.

    Raises:
        CapabilityError: a task whose answers have no form, or an input of another kind. Else as `source.find_embedded`.
    """
    found = find_embedded(folder, TARGETS, "the C++ program", has_form)
    refuse_fit(found, "the C++ program")
    require_pixels(found, found.engine.inputs, "the C++ program")
    project = re.sub(r"[^A-Za-z0-9]+", "_", found.manifest.name).strip("_") or "model"
    project = project if project[0].isalpha() else f"model_{project}"
    facts = _facts(found, project)
    for name in ("main.cpp", "CMakeLists.txt", "README.md"):
        (out / name).write_text(render(Path(__file__).parent, f"{name}.jinja", facts), encoding="utf-8")
    for file in found.engine.files:
        shutil.copyfile(folder / file, out / f"model{Path(file).suffix}")
    (out / "labels.txt").write_text("".join(f"{label}\n" for label in found.labels), encoding="utf-8")
    write_golden(found, out / "golden")
    return [f"cmake -B build -DOpenVINO_DIR={FIND_OPENVINO}", "cmake --build build", "ctest --test-dir build"]


def _facts(found: Embedded, project: str) -> dict[str, object]:
    spec, engine, form = found.preprocess, found.engine, found.form
    assert form is not None, "of tasks with a form"
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
        # Float operators of an INT8 engine may run in fp32 too.
        "half": hint if (hint := options["INFERENCE_PRECISION_HINT"]) in HALVES and not engine.float_rest else "",
        "outputs": ", ".join(json.dumps(name) for name in found.outputs),
        "images": len(found.pixels),
        "topdown": spec.fit == "topdown",
        "option": option,
        "maps_too": files,
        **(CLASSES if isinstance(form, forms.ClassMapForm) else FLOATS),
        # Cells of a map that a pixel lies between.
        "taps": 4 if isinstance(form, forms.DepthForm) and form.resize == "bicubic" else 2,
    }


def _columns(form: forms.Form) -> str:
    if not isinstance(form, forms.PartsForm):
        return f"path, {COLUMNS[type(form)]}"
    kinds = {part.form.kind: COLUMNS[type(part.form)] for part in form.parts}
    return "path, name of the part; then of " + ", of ".join(f"{kind}: {text}" for kind, text in kinds.items())
