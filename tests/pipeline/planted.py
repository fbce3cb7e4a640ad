"""Bundles of tiny graphs whose attention is known: it goes to the brightest patch, or to the darkest.

The image is 32x32 and has 4x4 patches of 8 pixels. A patch's token is (its mean brightness in 0..1, 1).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from vitdeploy.bundle.write import write_bundle
from vitdeploy.graph.io.files import GraphMetadata, graph_spec, save_graph, set_metadata
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import PreprocessSpec

SIDE, PATCH, GRID = 32, 8, 4
PREPROCESS = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.0,), (1.0,))
# One channel for each of two heads: scores are +40 and -40 times the brightness of the key.
SHARPNESS = 40.0
QUERY = np.array([[0, 0], [SHARPNESS, -SHARPNESS]], np.float32)
KEY = np.array([[1, 1], [0, 0]], np.float32)


class Graph:
    """Writes nodes one after the other; every method returns the name of a tensor."""

    def __init__(self):
        self.nodes, self.constants = [], {}

    def constant(self, array):
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array)
        return name

    def ints(self, *values):
        return self.constant(np.array(values, np.int64))

    def op(self, operator, *inputs, name=None, **attributes):
        name = name or f"n{len(self.nodes)}/{operator}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def tokens(self, image="image", *, convolution=True):
        """[batch, 16, 2] of float32 [batch, 1, 32, 32]."""
        if not convolution:
            pixels = self.op("Reshape", image, self.ints(-1, GRID * GRID, PATCH * PATCH))
            return self.linear(pixels, np.full((PATCH * PATCH, 2), 1 / PATCH**2, np.float32))
        kernel = np.zeros((2, 1, PATCH, PATCH), np.float32)
        kernel[0] = 1 / PATCH**2
        strides = {"kernel_shape": [PATCH, PATCH], "strides": [PATCH, PATCH]}
        bias = self.constant(np.array([0, 1], np.float32))
        patches = self.op("Conv", image, self.constant(kernel), bias, **strides)
        return self.op("Transpose", self.op("Reshape", patches, self.ints(-1, 2, GRID * GRID)), perm=[0, 2, 1])

    def with_class_token(self, tokens):
        """A first token of (0.5, 1)."""
        nothing = self.op("Mul", self.op("Slice", tokens, *map(self.ints, (0, 1, 1))), self.constant(np.float32(0)))
        token = self.op("Add", nothing, self.constant(np.array([[[0.5, 1]]], np.float32)))
        return self.op("Concat", token, tokens, axis=1)

    def linear(self, x, weight):
        return self.op("MatMul", x, self.constant(weight))

    def heads(self, x, rows, *, key=False):
        """[batch, rows, 2] -> [batch, 2, rows, 1], or its transpose for a key."""
        return self.op(
            "Transpose", self.op("Reshape", x, self.ints(-1, rows, 2, 1)), perm=[0, 2, 3, 1] if key else [0, 2, 1, 3]
        )

    def attention(self, queries, tokens, query_rows, rows, name):
        """softmax(Q K^T) V over two heads, [batch, query_rows, 2]; no residual."""
        query = self.heads(self.linear(queries, QUERY), query_rows)
        key = self.heads(self.linear(tokens, KEY), rows, key=True)
        value = self.heads(self.linear(tokens, np.eye(2, dtype=np.float32)), rows)
        weights = self.op("Softmax", self.op("MatMul", query, key), axis=-1, name=f"{name}/Softmax")
        mixed = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self.op("Reshape", mixed, self.ints(-1, query_rows, 2))

    def block(self, tokens, rows, name):
        return self.op("Add", tokens, self.attention(tokens, tokens, rows, rows, name))

    def model(self, batch="batch", **outputs):
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 1, SIDE, SIDE])
        named = [helper.make_node("Identity", [value], [name], name=name) for name, (value, _) in outputs.items()]
        results = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *shape])
            for name, (_, shape) in outputs.items()
        ]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph([*self.nodes, *named], "planted", [image], results, constants)
        return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))


def classifier(read="class", *, blocks=2, batch="batch", convolution=True):
    """Two classes. `read`: "class" token, "average" of the patches, or a "learned" pooling query."""
    g = Graph()
    tokens, rows = g.tokens(convolution=convolution), GRID * GRID
    if read == "class":
        tokens, rows = g.with_class_token(tokens), rows + 1
    for index in range(blocks):
        tokens = g.block(tokens, rows, f"blocks.{index}.attn")
    if read == "class":
        pooled = g.op("Gather", tokens, g.constant(np.array(0, np.int64)), axis=1)
    elif read == "average":
        pooled = g.op("ReduceMean", tokens, g.ints(1), keepdims=0)
    else:
        latent = g.constant(np.array([[[0.5, 1]]], np.float32))
        pooled = g.op("Reshape", g.attention(latent, tokens, 1, rows, "pool"), g.ints(-1, 2))
    return g.model(batch, logits=(g.linear(pooled, np.eye(2, dtype=np.float32)), [2]))


def windowed():
    """Attention inside 4 windows of 4 tokens."""
    g = Graph()
    windows = g.op("Reshape", g.tokens(), g.ints(-1, 4, 2))
    tokens = g.op("Reshape", g.block(windows, 4, "layers.0.attn"), g.ints(-1, GRID * GRID, 2))
    return g.model(logits=(g.op("ReduceMean", tokens, g.ints(1), keepdims=0), [2]))


def uneven():
    """A block over the patches alone, then one over a class token and the patches."""
    g = Graph()
    tokens = g.with_class_token(g.block(g.tokens(), GRID * GRID, "first"))
    tokens = g.block(tokens, GRID * GRID + 1, "second")
    return g.model(logits=(g.op("Gather", tokens, g.constant(np.array(0, np.int64)), axis=1), [2]))


def convolutional():
    """No attention at all."""
    g = Graph()
    return g.model(logits=(g.op("ReduceMean", g.tokens(), g.ints(1), keepdims=0), [2]))


def detector(*, cross=True):
    """Three object queries: "bright" looks at the brightest patch, "dark" at the darkest, the last is no object.

    Boxes are (0.25, 0.25, 0.5, 0.5), centre and size. Without `cross`, queries never look at the image.
    """
    g = Graph()
    queries = g.constant(np.array([[[0, 1], [0, -1], [0, 0]]], np.float32))
    seen = g.attention(queries, g.tokens(), 3, GRID * GRID, "decoder.cross_attn")
    if not cross:
        seen = g.op("Slice", g.block(g.tokens(), GRID * GRID, "encoder"), *map(g.ints, (0, 3, 1)))
    nothing = g.linear(seen, np.zeros((2, 4), np.float32))
    logits = g.constant(np.array([[[4, 0, 0, 0], [0, 3, 0, 0], [0, 0, 0, 6]]], np.float32))
    boxes = g.constant(np.array([0.25, 0.25, 0.5, 0.5], np.float32))
    return g.model(logits=(g.op("Add", nothing, logits), [3, 4]), boxes=(g.op("Add", nothing, boxes), [3, 4]))


def bundle(folder, model, task="classification", *, labels=(), threshold=0.5, precision=None):
    """The folder of a bundle without engines, whose float graph is `model`."""
    postprocess = PostprocessSpec(threshold=threshold) if task == "detection" else None
    preprocess = None if task == "sequence" else PREPROCESS
    metadata = GraphMetadata("planted", task, preprocess, postprocess=postprocess)
    if precision:
        metadata = dataclasses.replace(metadata, target="openvino-cpu", precision=precision)
    set_metadata(model, metadata)
    file = folder / "model.onnx"
    save_graph(model, file)
    out = folder / "bundle"
    out.mkdir()
    graphs = {"model": (file, graph_spec(model, file.name))}
    write_bundle(
        out,
        name="planted",
        task=task,
        graphs=graphs,
        preprocess=preprocess,
        postprocess=postprocess,
        engines=[],
        labels=labels,
    )
    return out


def picture(folder, bright=(1, 2), dark=(3, 0)):
    """A grey 32x32 PNG with one white and one black patch, given as (row, column)."""
    pixels = np.full((SIDE, SIDE), 128, np.uint8)
    for (row, column), value in ((bright, 255), (dark, 0)):
        pixels[row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = value
    path = folder / "image.png"
    Image.fromarray(pixels).save(path)
    return path
