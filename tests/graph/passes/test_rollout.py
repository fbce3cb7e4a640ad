"""The output "attention" of a graph is the rollout that numpy computes from all its attention weights."""

import numpy as np
import onnxruntime
import pytest

from tests.pipeline import planted
from vitdeploy.attention import run_instrumented
from vitdeploy.graph.analysis.attention import token_views
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io.files import load_graph, serialised
from vitdeploy.graph.passes.optimize import optimize
from vitdeploy.graph.passes.tokens import add_rollout
from vitdeploy.spec import PreprocessSpec


def class_token_only():
    model = planted.classifier()
    normalise(model)
    assert optimize(model)["class_token_only"] == 1
    return model


PLANTED = {
    "class token": planted.classifier,
    "class token only": class_token_only,
    "average": lambda: planted.classifier("average"),
    "pooling": lambda: planted.classifier("learned"),
    "one block": lambda: planted.classifier(blocks=1),
    "fixed batch": lambda: planted.classifier(batch=2),
}


def outputs(model, images):
    session = onnxruntime.InferenceSession(serialised(model), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {session.get_inputs()[0].name: images}), strict=True))


@pytest.mark.parametrize("kind", PLANTED)
def test_it_is_the_rollout_of_numpy_and_the_answers_stay(kind):
    model, plain, marked = (PLANTED[kind]() for _ in range(3))
    for each in (model, plain, marked):
        normalise(each)
    assert add_rollout(model, token_views(model, kind)) == "attention"
    pixels = np.random.default_rng(0).integers(0, 256, (2, planted.SIDE, planted.SIDE, 1), np.uint8)
    images = pixels.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    found = outputs(model, images)
    assert (found["attention"].dtype, found["attention"].shape) == (np.float32, (2, 4, 4))
    np.testing.assert_array_equal(found["logits"], outputs(plain, images)["logits"])
    views = token_views(marked, kind)
    maps = [each.flow_map(views) for each in run_instrumented(marked, views, pixels, planted.PREPROCESS)]
    np.testing.assert_allclose(found["attention"], maps, atol=1e-6)


def test_of_an_exported_model_too(small_export):
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 32, 1), np.uint8)
    model, marked = (load_graph(small_export / "model.onnx") for _ in range(2))
    for each in (model, marked):
        normalise(each)
    add_rollout(model, token_views(model, "small"))
    views = token_views(marked, "small")
    spec = PreprocessSpec(32, (32, 32), mean=(0.5,), std=(0.5,))
    maps = [each.flow_map(views) for each in run_instrumented(marked, views, pixels, spec)]
    np.testing.assert_allclose(outputs(model, pixels)["attention"], maps, atol=1e-6)
