"""A C++ program for OpenVINO: one source file, a CMakeLists.txt, the engine, and the golden answers as its test."""

import json
import re
import shutil
from pathlib import Path

from vitdeploy import __version__
from vitdeploy.embed.source import Embedded, find_embedded, refuse_fit, render, require_pixels, write_golden
from vitdeploy.runtime.openvino import HALVES, PRECISION_HINTS
from vitdeploy.runtime.tasks.binary import BinarySpec
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.embedding import EmbeddingSpec
from vitdeploy.runtime.tasks.foreground import ForegroundSpec
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.runtime.tasks.keypoints import KeypointSpec
from vitdeploy.runtime.tasks.multi_label import HALF, MultiLabelSpec
from vitdeploy.runtime.tasks.regression import RegressionSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.spec import Postprocess

TARGETS = ("openvino-cpu",)
TOP = 5
FIND_OPENVINO = "\"$(python -c 'import openvino.utils as u; print(u.get_cmake_path())')\""
A_MAP = "and a file of numpy there for each image:"
COLUMNS = {
    "classification": "path, class, label, score; the best classes first",
    "multi-label": "path, label's number, label, score, 1 above its threshold and 0 below; all labels in their order",
    "binary": "path, yes or no, what yes means, score",
    "features": "path, and the numbers of the vector",
    "embedding": "path, and the numbers of the vector",
    "detection": "path, class, label, score, left, top, right, bottom; the surest object first",
    "segmentation": "path, class, label, pixels, share of the image; the largest class first",
    "depth": "path, least, median and largest value",
    "regression": "path, number, name, value, unit",
    "foreground": "path, share of the image that is in the mask, and its left, top, right and bottom",
    "keypoints": "path, number of the box from 0 on, point, name, score, x, y; the points that are shown",
    "image-to-image": "path, width, height and channels of the picture, its mean level",
}
TASKS = tuple(COLUMNS)


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` with a program for the bundle in `folder`; gives the commands that build and test it
    there.

    Raises:
        CapabilityError: a panoptic or sequence model, or an input of another kind. Else as `source.find_embedded`.
    """
    found = find_embedded(folder, TARGETS, TASKS, "the C++ program")
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
    spec, engine = found.preprocess, found.engine
    post = found.manifest.postprocess if isinstance(found.manifest.postprocess, PostprocessSpec) else None
    options = {"PERFORMANCE_HINT": "LATENCY", **engine.options}
    options.setdefault("INFERENCE_PRECISION_HINT", PRECISION_HINTS[engine.precision])
    batch = engine.inputs[0].shape[0]
    return {
        "name": project,
        "project": project,
        "version": __version__,
        "digest": found.digest,
        "task": found.manifest.task,
        "columns": COLUMNS[found.manifest.task],
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
        "scores": post.scores if post is not None else None,
        "top_k": post.top_k if post is not None else None,
        "boxes": post.boxes if post is not None else None,
        "images": len(found.pixels),
        "topdown": spec.fit == "topdown",
        "unit": isinstance(found.manifest.postprocess, EmbeddingSpec) and found.manifest.postprocess.normalised,
        "positive": None,
        "thresholds": None,
        **_head(found.manifest.postprocess),
    }


def _literal(text: str) -> str:
    """A literal of C++ for a text of others: all but letters and digits of ASCII as octal bytes of UTF-8."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else _octal(c) for c in text) + '"'


def _octal(text: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in text.encode("utf-8"))


def _head(post: Postprocess | None) -> dict[str, object]:
    """What the program knows of the model's outputs; `maps_too`: what it writes into the folder of an `option`, `taps`:
    cells a pixel lies between."""
    if isinstance(post, SegmentationSpec):
        told = f"{A_MAP} int16 [height, width] of classes, -1 where the model does not see"
        kind = {"map_type": "int16_t", "map_dtype": "int16", "map_descr": "<i2", "taps": 2}
        return {"maps_too": told, "option": "--maps", **kind, "maps": post.maps, "mask_size": post.mask_size}
    if isinstance(post, DepthSpec):
        told = f"{A_MAP} float32 [height, width], not a number where the model does not see"
        taps = {"bilinear": 2, "bicubic": 4}[post.resize]
        kind = {"map_type": "float", "map_dtype": "float32", "map_descr": "<f4", "taps": taps}
        return {"maps_too": told, "option": "--maps", **kind}
    if isinstance(post, ForegroundSpec):
        told = f"{A_MAP} float32 [height, width], the matte, not a number where the model does not see"
        kind = {"map_type": "float", "map_dtype": "float32", "map_descr": "<f4", "taps": 2}
        how = {"alpha": post.alpha, "enlarge": post.enlarge, "threshold": repr(float(post.threshold))}
        return {"maps_too": told, "option": "--maps", **kind, **how}
    if isinstance(post, ImageSpec):
        told = "and the picture as a PNG there, for each image"
        levels = {name: f"{value:.9e}" for name, value in (("black", post.black), ("white", post.white))}
        return {"maps_too": told, "option": "--pictures", **levels}
    if isinstance(post, MultiLabelSpec):
        thresholds = None if post.thresholds is None else ", ".join(map(repr, post.thresholds))
        return {"maps_too": None, "thresholds": thresholds}
    if isinstance(post, BinarySpec):
        threshold = HALF if post.decision_threshold is None else post.decision_threshold
        positive = None if post.positive is None else _literal(post.positive)
        return {"maps_too": None, "threshold": repr(threshold), "positive": positive}
    if isinstance(post, KeypointSpec):
        return {"maps_too": None, "threshold": repr(post.threshold), "decoding": post.decoding, "kernel": post.kernel}
    if isinstance(post, RegressionSpec):
        return {"maps_too": None, "units": ", ".join(map(_literal, post.units))}
    return {"maps_too": None, "threshold": repr(post.threshold) if isinstance(post, PostprocessSpec) else None}
