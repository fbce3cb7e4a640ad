"""How objects are read from a detector's outputs: the table of rules is what transformers' processors do."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.models.model_folder.folder import PROCESSOR_OF, RULES, detector_size, reading_rule
from vitdeploy.models.model_folder.image_processor import PROCESSORS
from vitdeploy.runtime.tasks.detection import PostprocessSpec, detect
from vitdeploy.spec import PreprocessSpec

QUERIES, CLASSES = 150, 4
SIZE = (640, 480)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_finds_what_the_processor_of_transformers_finds(name):
    """More queries than the 100 that some take; a threshold of 0 shows all that is kept."""
    transformers = reference("transformers")
    reference("torchvision")
    generator = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(1, QUERIES, CLASSES, generator=generator)
    boxes = 0.3 + 0.2 * torch.rand(1, QUERIES, 4, generator=generator)
    outputs = SimpleNamespace(logits=logits, pred_boxes=boxes)
    processor = getattr(transformers, f"{name}ImageProcessor")()
    (theirs,) = processor.post_process_object_detection(outputs, threshold=0.0, target_sizes=[SIZE[::-1]])
    given = {"logits": logits[0].numpy(), "boxes": boxes[0].numpy()}
    ours = detect(given, SIZE, PreprocessSpec((8, 8), (8, 8)), replace(RULES[name], threshold=0.0), None).objects
    order = np.argsort(-theirs["scores"].numpy(), kind="stable")
    assert len(ours) == len(order) == (RULES[name].top_k or QUERIES)
    assert [each.index for each in ours] == theirs["labels"].numpy()[order].tolist()
    np.testing.assert_allclose([each.score for each in ours], theirs["scores"].numpy()[order], rtol=1e-6)
    np.testing.assert_allclose([each.box for each in ours], theirs["boxes"].numpy()[order], rtol=1e-5)


def test_every_detector_of_transformers_has_a_processor_or_is_known_to_have_none():
    reference("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES as DETECTORS

    # Layout of documents, whose answers are an order of reading too, and maps of where text is.
    others = {name for name in DETECTORS if name.startswith("pp_")}
    assert set(DETECTORS) - others == set(PROCESSOR_OF)
    assert set(PROCESSOR_OF.values()) == set(RULES) <= set(PROCESSORS)


def test_the_processors_file_says_how_many_are_kept():
    config = {"model_type": "rt_detr"}
    assert reading_rule(config) == PostprocessSpec("sigmoid")
    assert reading_rule(config, {"image_processor_type": "RTDetrImageProcessorFast"}) == PostprocessSpec("sigmoid")
    other = reading_rule(config, {"image_processor_type": "DeformableDetrImageProcessor"})
    assert other == PostprocessSpec("sigmoid", top_k=100)


def test_a_processor_that_scores_in_another_way_than_the_model_is_refused():
    with pytest.raises(CheckpointError, match="score objects differently") as caught:
        reading_rule({"model_type": "rt_detr"}, {"image_processor_type": "DetrImageProcessor"})
    assert caught.value.found == "DetrImageProcessor: softmax; RTDetrImageProcessor, the model's: sigmoid"


@pytest.mark.parametrize(
    "config",
    # transformers' softmax of RTDetrImageProcessor is over the first axis, the batch: nothing to be equal to.
    [{"model_type": "rt_detr", "use_focal_loss": False}, {"model_type": "my_detector"}, {}],
)
def test_no_rule_is_guessed(config):
    assert reading_rule(config) is None


@pytest.mark.parametrize(
    ("model_type", "processor", "backbone", "size"),
    [
        ("rt_detr_v2", None, {}, (640, 640)),
        ("rf_detr", None, {"image_size": 384}, (384, 384)),
        ("rf_detr", None, {}, (800, 800)),
        ("rf_detr", None, {"image_size": 518, "patch_size": 14, "num_windows": 4}, (560, 560)),
        ("conditional_detr", {"size": {"shortest_edge": 480, "longest_edge": 800}}, {}, (480, 480)),
        ("conditional_detr", {"size": 600, "max_size": 1000}, {}, (600, 600)),
        ("vit", None, {"image_size": 384}, None),
    ],
)
def test_the_size_of_a_detector_that_tells_none(model_type, processor, backbone, size):
    assert detector_size({"model_type": model_type, "backbone_config": backbone}, processor) == size
