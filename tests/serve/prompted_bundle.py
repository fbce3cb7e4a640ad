"""A bundle of promptable segmentation that is made in no time, whose masks one can tell beforehand.

The mask of a prompt is a square around the middle of its points that are inside, or of its box. It is the larger, the
brighter the image is: 4 pixels in each direction where it is black, 12 where it is white; of the three masks of one
point the last is twice as large.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitdeploy.runtime.prompts import PromptSpec
from vitdeploy.spec import GraphSpec, PreprocessSpec, TensorSpec

SIDE, CELLS, SLOTS = 48, 12, 4
RADII = (8, 4, 6, 16)


def make_prompted(root: Path, batch: int | str = "batch", target: str = "onnxruntime-cpu") -> Path:
    pytest.importorskip("onnx", reason="pip install 'vitdeploy[export]'")
    from vitdeploy.bundle.write import write_bundle
    from vitdeploy.compilation.engine import compile_engine, joined, within

    image = TensorSpec("image", "uint8", (batch, SIDE, SIDE, 3))
    embedding = TensorSpec("embedding", "float32", (batch, 1, CELLS, CELLS))
    prompts = (TensorSpec("points", "float32", (batch, SLOTS, 2)), TensorSpec("labels", "int64", (batch, SLOTS)))
    answers = (
        TensorSpec("masks", "float32", (batch, 4, CELLS, CELLS)),
        TensorSpec("iou_scores", "float32", (batch, 4)),
    )
    graphs = {
        "image_encoder": GraphSpec("image_encoder.onnx", (image,), (embedding,)),
        "prompt_decoder": GraphSpec("prompt_decoder.onnx", (embedding, *prompts), answers),
    }
    parts = []
    (root / "engine").mkdir()
    for name, nodes in (("image_encoder", _encoder()), ("prompt_decoder", _decoder())):
        _save(root / f"{name}.onnx", graphs[name], *nodes)
        (root / "engine" / name).mkdir()
        size = 1 if batch == "batch" else batch
        file, out = root / f"{name}.onnx", root / "engine" / name
        spec = compile_engine(file, out, target=target, precision="fp32", batch=size, placed=0, bare=True)
        parts.append(within(spec, name))
    (root / "bundle").mkdir()
    write_bundle(
        root / "bundle",
        name="squares",
        task="promptable-segmentation",
        graphs={name: (root / f"{name}.onnx", spec) for name, spec in graphs.items()},
        preprocess=PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.5,) * 3, (0.5,) * 3, fit="longest-pad"),
        postprocess=PromptSpec(SLOTS),
        engines=[(joined(parts, None), root / "engine")],
    )
    return root / "bundle"


def _save(path: Path, spec: GraphSpec, nodes, constants):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    kinds = {"uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
    inputs, outputs = (
        [helper.make_tensor_value_info(each.name, kinds[each.dtype], list(each.shape)) for each in tensors]
        for tensors in (spec.inputs, spec.outputs)
    )
    made = [helper.make_node(kind, list(given), [out], **more) for kind, given, out, more in nodes]
    known = [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(made, path.stem, inputs, outputs, known)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def _encoder():
    """The brightness of each cell, 0 to 1."""
    cell = SIDE // CELLS
    nodes = [
        ("Cast", ["image"], "numbers", {"to": 1}),
        ("Transpose", ["numbers"], "planes", {"perm": [0, 3, 1, 2]}),
        ("AveragePool", ["planes"], "cells", {"kernel_shape": [cell, cell], "strides": [cell, cell]}),
        ("ReduceMean", ["cells", "channels"], "grey", {"keepdims": 1}),
        ("Div", ["grey", "white"], "embedding", {}),
    ]
    return nodes, {"channels": np.array([1]), "white": np.float32(255)}


def _decoder():
    """How far inside of a square around the middle of the prompt each cell is, in pixels of the input."""
    nodes = [
        ("GreaterOrEqual", ["labels", "one"], "used", {}),
        ("Cast", ["used"], "weights", {"to": 1}),
        ("Unsqueeze", ["weights", "last"], "columns", {}),
        ("Mul", ["points", "columns"], "weighed", {}),
        ("ReduceSum", ["weighed", "slots"], "sums", {"keepdims": 0}),
        ("ReduceSum", ["columns", "slots"], "counts", {"keepdims": 0}),
        ("Div", ["sums", "counts"], "middle", {}),
        ("Unsqueeze", ["middle", "planes"], "places", {}),
        ("Sub", ["grid", "places"], "offsets", {}),
        ("Abs", ["offsets"], "distances", {}),
        ("ReduceMax", ["distances", "slots"], "furthest", {"keepdims": 1}),
        ("Sub", ["embedding", "half"], "grey", {}),
        ("Mul", ["grey", "eight"], "larger", {}),
        ("Add", ["larger", "radii"], "sides", {}),
        ("Sub", ["sides", "furthest"], "masks", {}),
        ("ReduceMean", ["embedding", "planes"], "bright", {"keepdims": 0}),
        ("Mul", ["bright", "shares"], "iou_scores", {}),
    ]
    centres = (np.arange(CELLS, dtype=np.float32) + 0.5) * (SIDE / CELLS)
    constants = {
        "one": np.int64(1),
        "last": np.array([2]),
        "slots": np.array([1]),
        "planes": np.array([2, 3]),
        "grid": np.stack(np.meshgrid(centres, centres))[None],
        "half": np.float32(0.5),
        "eight": np.float32(8),
        "radii": np.array(RADII, np.float32).reshape(1, 4, 1, 1),
        "shares": np.array([0.9, 0.5, 0.8, 0.6], np.float32),
    }
    return nodes, constants
