"""Cases of the table as bundles with golden answers: their engines, as the releases here compile them, and what ONNX
Runtime without optimisation gives for the same graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from tests.graph.builder import Builder, run, values
from vitdeploy.bundle.write import Golden, GoldenAnswers, write_bundle
from vitdeploy.graph.io.files import GraphMetadata, graph_spec, save_graph, set_metadata
from vitdeploy.pipeline.assemble import TOLERANCE
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import engine_outputs
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.compile import compile_graph

SAMPLES = 4


def constant_attention():
    """Attention of queries and keys that come of the input to values that do not."""
    b = Builder()
    x = b.input("x", ["batch", 3, 8, 8])
    flat = b.add("Reshape", x, np.array([-1, 12, 16]))
    heads = [b.add("Reshape", b.add("MatMul", flat, values(16, 32, seed=s)), np.array([-1, 12, 4, 8])) for s in (1, 2)]
    query, key = b.add("Transpose", heads[0], perm=[0, 2, 1, 3]), b.add("Transpose", heads[1], perm=[0, 2, 3, 1])
    scores = b.add("Softmax", b.add("MatMul", b.add("Mul", query, 0.3), key), axis=-1)
    answer = b.add("MatMul", scores, values(1, 4, 12, 8, seed=3))
    return b.model(b.add("Reshape", answer, np.array([-1, 384])), rank=2)


def norm():
    """A linear behind a norm by root mean squares, whose mean has its axes as an input."""
    b = Builder()
    x = b.add("Reshape", b.input("x", ["batch", 3, 8, 8]), np.array([-1, 6, 32]))
    mean = b.add("ReduceMean", b.add("Mul", x, x), np.array([-1]), keepdims=1)
    scaled = b.add("Div", x, b.add("Sqrt", b.add("Add", mean, 1e-6)))
    answer = b.add("MatMul", b.add("Mul", scaled, values(32)), values(32, 8, seed=1))
    return b.model(b.add("Reshape", answer, np.array([-1, 48])), rank=2)


def ties():
    """The place of the largest of rounded numbers, of which many are equal."""
    b = Builder()
    x = b.add("Reshape", b.input("x", ["batch", 3, 8, 8]), np.array([-1, 8, 24]))
    index = b.add("ArgMax", b.add("Round", b.add("Mul", x, 1.5)), axis=-1, keepdims=0)
    return b.model(b.add("Cast", index, to=1), rank=2)


def written(proto, target, out: Path, spoilt: float = 0.0) -> Path:
    """The bundle of a graph, in `out`, with one engine in fp32. `spoilt` is added to the golden answers."""
    work = out.with_name(f"{out.name}-work")
    (work / "engine").mkdir(parents=True)
    model = ir.from_proto(proto)
    set_metadata(model, GraphMetadata("case", "tensors", PreprocessSpec(8, (8, 8)), postprocess=TensorsSpec()))
    save_graph(model, work / "model.onnx")
    engine = compile_graph(work / "model.onnx", target, 1, work / "engine")
    pixels = np.random.default_rng(0).integers(0, 256, (SAMPLES, 8, 8, 3), np.uint8)
    preprocess = PreprocessSpec(8, (8, 8))
    with make_runner(work / "engine", engine, batch=SAMPLES) as runner:
        found = engine_outputs(runner, preprocess, pixels)
    pictures = pixels.astype(np.float32).transpose(0, 3, 1, 2) / np.float32(255)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (preprocess.mean, preprocess.std))
    expected = dict(zip(found, run(proto, x=(pictures - mean) / std), strict=True))
    told = {name: array + np.float32(spoilt) for name, array in expected.items()}
    answers = GoldenAnswers(told, TOLERANCE["fp32"], SAMPLES)
    out.mkdir(exist_ok=True)
    write_bundle(
        out,
        name="case",
        task="tensors",
        graphs={"model": (work / "model.onnx", graph_spec(model, "model.onnx"))},
        preprocess=preprocess,
        postprocess=TensorsSpec(),
        engines=[(engine, work / "engine")],
        golden=Golden({"pixels": pixels}, expected, {engine.artifact: answers}),
    )
    return out
