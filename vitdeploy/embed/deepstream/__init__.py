"""NVIDIA DeepStream: a configuration of Gst-nvinfer, its parser of the model's outputs, and the graph that it builds.

Source: `gstnvinfer_property_parser.h`, `nvdsinfer.h`, `nvdsinfer_custom_impl.h` and `nvdsinfer_context_impl.cpp` of
NVIDIA/DeepStream 9.1; DeepStream's developer guide, "Gst-nvinfer".
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from vitdeploy import __version__
from vitdeploy.embed.source import Embedded, find_embedded, render
from vitdeploy.errors import CapabilityError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.spec import PostprocessSpec, PreprocessSpec

TARGETS = ("tensorrt",)
TASKS = ("classification", "detection")
WHAT = "DeepStream"
CONFIG, PARSER, MODEL, LABELS = "config_infer.txt", "parser.cpp", "model.onnx", "labels.txt"
# Gst-nvinfer's numbers for its `network-type` and `model-color-format`.
NETWORK_TYPES = {"detection": 0, "classification": 1}
COLOUR_FORMATS = {3: 0, 1: 2}  # by channels: RGB, grey
# Of `scaling-filter`: NvBufSurfTransform's, which do not antialias as Pillow's do.
FILTERS = {"nearest": 0, "bilinear": 1, "bicubic": 2}


def write(folder: Path, out: Path) -> list[str]:
    """Fill the empty folder `out` for the bundle in `folder`; gives the commands that build the parser there.

    Raises:
        CapabilityError: another task, or images that Gst-nvinfer does not prepare as the model wants them. Else as
            `source.find_embedded`.
    """
    found = find_embedded(folder, TARGETS, TASKS, WHAT)
    spec = found.preprocess
    _refuse_images(found)
    save_graph(_with_float_pixels(load_graph(folder / found.engine.graph), found), out / MODEL)
    post = found.manifest.postprocess if isinstance(found.manifest.postprocess, PostprocessSpec) else None
    facts: dict[str, object] = {
        "name": found.manifest.name,
        "version": __version__,
        "digest": found.digest,
        "task": found.manifest.task,
        "network_type": NETWORK_TYPES[found.manifest.task],
        "colour_format": COLOUR_FORMATS[spec.channels],
        "filter": FILTERS.get(spec.interpolation, FILTERS["bilinear"]),
        "precision": found.engine.precision,
        "crop": spec.crop,
        "classes": _classes(found),
        "labels": bool(found.labels),
        "threshold": repr(post.threshold) if post is not None else None,
        "scores": post.scores if post is not None else None,
        "boxes": post.boxes if post is not None else None,
        "top_k": post.top_k if post is not None else None,
    }
    for name in (CONFIG, PARSER, "Makefile", "README.md"):
        (out / name).write_text(render(Path(__file__).parent, f"{name}.jinja", facts), encoding="utf-8")
    if found.labels:
        # Gst-nvinfer splits a classifier's line at ";", and takes the first lines of a detector's.
        between = ";" if found.manifest.task == "classification" else "\n"
        names = [" ".join(label.replace(";", ",").split()) for label in found.labels]
        (out / LABELS).write_text(between.join(names) + "\n", encoding="utf-8")
    return ["make"]


def _refuse_images(found: Embedded) -> None:
    """Gst-nvinfer scales a frame, or an object in it, to the network's size as a whole."""
    spec = found.preprocess
    if spec.fit != "stretch" or spec.resize != spec.crop or spec.channels not in COLOUR_FORMATS:
        raise CapabilityError(
            "DeepStream scales images to the network's size, and does not crop or pad them as this model wants them",
            found=f"resize {_size(spec)}, crop {spec.crop[0]}x{spec.crop[1]}, fit {spec.fit}, {spec.channels} channels",
            wanted=f"resize {spec.crop[0]}x{spec.crop[1]}, fit stretch, 1 or 3 channels",
            fix=f"vitdeploy run RECIPE --set 'preprocess.resize=[{spec.crop[0]}, {spec.crop[1]}]', and judge it again",
        )


def _size(spec: PreprocessSpec) -> str:
    return f"the short side to {spec.resize}" if isinstance(spec.resize, int) else "{}x{}".format(*spec.resize)


def _with_float_pixels(model: ir.Model, found: Embedded) -> ir.Model:
    """The graph with float32 pixels 0..255 in place of uint8, which is what Gst-nvinfer writes into the input.

    Raises:
        CapabilityError: an input of another kind.
    """
    [pixels] = model.graph.inputs
    height, width = found.preprocess.crop
    shape = [size if isinstance(size, int) else None for size in (pixels.shape or ())]
    reads = [node.op_type for node, _ in pixels.uses()]
    wanted = [height, width, found.preprocess.channels]
    if pixels.dtype != ir.DataType.UINT8 or shape[1:] != wanted or set(reads) != {"Cast"}:
        raise CapabilityError(
            "DeepStream cannot feed this engine",
            found=f"{found.engine.inputs[0]}, read by {', '.join(reads)}",
            wanted=f"uint8 [batch, {height}, {width}, {found.preprocess.channels}], with preprocessing in the graph",
        )
    pixels.dtype = ir.DataType.FLOAT
    return model


def _classes(found: Embedded) -> int | None:
    """How many classes a detector has; Gst-nvinfer has thresholds for as many."""
    post = found.manifest.postprocess
    if not isinstance(post, PostprocessSpec):
        return None
    return post.number_of_classes(found.engine.outputs) or len(found.labels) or None
