"""The distance that searches rank by, and a try on the real runtimes."""

import numpy as np
import pytest
import scipy.special
import scipy.stats

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import split
from vitdeploy.graph.io.files import get_metadata, load_graph
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.frame import ReferenceOutputs, answers_of
from vitdeploy.spec import PreprocessSpec

IMAGES = 10
PREPROCESS = PreprocessSpec(32, (32, 32), "bicubic", (0.5,), (0.5,))


@pytest.fixture(scope="module")
def pixels(digits):
    samples = split(digits, "none", calibration=IMAGES, evaluation=1, seed=0).calibration
    [found] = batches(samples, PREPROCESS, IMAGES)
    return found


@pytest.fixture(scope="module")
def reference_outputs(small_export, pixels):
    with OnnxRuntimeRunner(small_export / "model.onnx", name="float") as runner:
        return ReferenceOutputs(runner, pixels, PREPROCESS, "classification", batch=4)


def test_answers_are_those_of_all_images_at_once(small_export, reference_outputs, pixels):
    with OnnxRuntimeRunner(small_export / "model.onnx", name="float") as runner:
        [tensor] = runner.inputs
        at_once = runner.infer({tensor.name: pixels})
    assert len(pixels) % reference_outputs.batch
    for name, expected in at_once.items():
        np.testing.assert_allclose(reference_outputs.answers[name], expected, atol=1e-5)


def test_distance_of_a_classifier_is_the_kl_divergence_that_scipy_computes(reference_outputs):
    [(name, logits)] = reference_outputs.answers.items()
    other = logits + np.random.default_rng(0).normal(size=logits.shape)
    p, q = (scipy.special.softmax(each.astype(np.float64), axis=1) for each in (logits, other))
    np.testing.assert_allclose(reference_outputs.distance({name: other}), scipy.stats.entropy(p, q, axis=1), rtol=1e-6)
    assert reference_outputs.distance(reference_outputs.answers).max() < 1e-12


def test_distance_of_another_task_is_the_share_of_wrong_power_and_ignores_integers(small_export, pixels):
    with OnnxRuntimeRunner(small_export / "model.onnx", name="float") as runner:
        found = ReferenceOutputs(runner, pixels, PREPROCESS, "features", batch=4)
    [(name, expected)] = found.answers.items()
    found.answers["labels"] = np.zeros((IMAGES, 3), np.int64)
    answers = {name: expected * 1.5, "labels": np.ones((IMAGES, 3), np.int64)}
    np.testing.assert_allclose(found.distance(answers), np.full(IMAGES, 0.25), rtol=1e-5)


@pytest.mark.parametrize("target", ["openvino-cpu", "onnxruntime-cpu"])
def test_a_try_answers_as_float_and_nearly_so_in_int8(small_export, reference_outputs, pixels, target):
    model = load_graph(small_export / "model.onnx")
    assert get_metadata(model, "it").task == "classification"
    assert reference_outputs.distance(answers_of(model, target, "fp32", reference_outputs)).max() < 1e-9
    shape(model, target)
    prepared = prepare(model, observe(model, [pixels], PREPROCESS), choose(model, target))
    place(model, prepared.ranges, target, weights=prepared.weights)
    distance = reference_outputs.distance(answers_of(model, target, "int8", reference_outputs))
    assert distance.min() > 0
    assert distance.max() < 0.05
