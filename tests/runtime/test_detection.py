"""Objects of one image: against transformers' post-processing, and by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.references import reference
from vitdeploy.runtime.tasks.detection import Detection, Detections, PostprocessSpec, detect
from vitdeploy.spec import PreprocessSpec

SQUASH = PreprocessSpec((64, 96), (64, 96), "bilinear")
GIVEN = PostprocessSpec("given", "xyxy")


def rows(found):
    return np.array([[d.index, d.score, *d.box] for d in found.objects]).reshape(-1, 6)


def sorted_rows(scores, classes, boxes):
    table = np.concatenate([classes[:, None], scores[:, None], boxes], axis=1)
    return table[np.argsort(-table[:, 1], kind="stable")]


def random_outputs(columns, queries=40, seed=0):
    """Boxes well inside of the image: transformers does not clip."""
    generator = np.random.default_rng(seed)
    boxes = np.concatenate([generator.uniform(0.3, 0.7, (queries, 2)), generator.uniform(0.05, 0.5, (queries, 2))], 1)
    logits = generator.normal(0, 3, (queries, columns))
    return {"logits": logits.astype(np.float32), "boxes": boxes.astype(np.float32)}


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_softmax_scores_are_those_of_transformers_detr(threshold):
    transformers = reference("transformers")
    outputs, (width, height) = random_outputs(8), (640, 427)
    theirs = transformers.DetrImageProcessor().post_process_object_detection(
        SimpleNamespace(logits=torch.tensor(outputs["logits"])[None], pred_boxes=torch.tensor(outputs["boxes"])[None]),
        threshold=threshold,
        target_sizes=[(height, width)],
    )[0]
    expected = sorted_rows(*(theirs[name].numpy() for name in ("scores", "labels", "boxes")))
    found = rows(detect(outputs, (width, height), SQUASH, PostprocessSpec("softmax", threshold=threshold), None))
    assert len(found) == len(expected) == {0.0: 40, 0.3: len(found), 0.7: len(found), 1.0: 0}[threshold]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_sigmoid_scores_are_those_of_transformers_rt_detr():
    transformers = reference("transformers")
    outputs, (width, height) = random_outputs(5), (640, 427)
    theirs = transformers.RTDetrImageProcessor().post_process_object_detection(
        SimpleNamespace(logits=torch.tensor(outputs["logits"])[None], pred_boxes=torch.tensor(outputs["boxes"])[None]),
        threshold=0.5,
        target_sizes=[(height, width)],
    )[0]
    expected = sorted_rows(*(theirs[name].numpy() for name in ("scores", "labels", "boxes")))
    found = rows(detect(outputs, (width, height), SQUASH, PostprocessSpec("sigmoid"), None))
    assert len(found) == len(expected) > 10
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_given_scores_are_taken_as_they_are_and_sorted():
    outputs = {
        "scores": np.array([0.2, 0.9, 0.6], np.float32),
        "labels": np.array([3, 1, 0]),
        "boxes": np.array([[0, 0, 1, 1], [0.25, 0.5, 0.75, 1], [0, 0, 0.5, 0.5]], np.float32),
    }
    found = detect(outputs, (200, 100), SQUASH, GIVEN, ["cat", "dog"])
    assert [(d.index, d.label, d.box) for d in found.objects] == [
        (1, "dog", (50.0, 50.0, 150.0, 100.0)),
        (0, "cat", (0.0, 0.0, 100.0, 50.0)),
    ]
    everything = detect(outputs, (200, 100), SQUASH, replace(GIVEN, threshold=0.0), ["cat", "dog"])
    assert everything.objects[2].label == "3"  # a class without a name


def test_boxes_are_mapped_back_through_a_crop_and_clipped_to_the_image():
    # 200x100 -> 100x50, of which the crop takes x 30..70 and y 5..45: x 60..140 and y 10..90 of the original.
    spec = PreprocessSpec(50, (40, 40))
    outputs = {
        "scores": np.array([0.9, 0.8], np.float32),
        "labels": np.array([0, 0]),
        "boxes": np.array([[0.25, 0.5, 0.75, 1.0], [-1, -1, 3, 3]], np.float32),
    }
    found = detect(outputs, (200, 100), spec, GIVEN, None)
    assert [d.box for d in found.objects] == [(80.0, 50.0, 120.0, 90.0), (0.0, 0.0, 200.0, 100.0)]


def test_an_image_without_objects_has_none():
    outputs = {"logits": np.array([[0.0, 0.0, 9.0]], np.float32), "boxes": np.full((1, 4), 0.5, np.float32)}
    assert detect(outputs, (8, 6), SQUASH, PostprocessSpec("softmax"), None) == Detections((8, 6), ())


def test_the_answer_is_json():
    found = Detections((8, 6), (Detection(2, "cat", 0.75, (1.0, 2.0, 3.0, 4.0)),))
    assert json.loads(json.dumps(found.to_dict())) == {
        "width": 8,
        "height": 6,
        "objects": [{"index": 2, "label": "cat", "score": 0.75, "box": [1.0, 2.0, 3.0, 4.0]}],
    }
