"""The committed models of the drawn scenes: each loads in transformers and is as good as its metrics.json says."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.references import reference

pytest.importorskip("pycocotools")
transformers = reference("transformers")

MODELS = ROOT / "calibration/scenes/models"
CLASSES = {
    "detection": "RTDetrV2ForObjectDetection",
    "dual": "CLIPModel",
    "prompted": "SamModel",
    "depth": "DepthAnythingForDepthEstimation",
    "keypoints": "VitPoseForPoseEstimation",
    "text": "VisionEncoderDecoderModel",
    "embedding": "Dinov2Model",
    "semantic": "SegformerForSemanticSegmentation",
    **dict.fromkeys(("counts", "digits", "seven"), "ViTForImageClassification"),
}
SCENES = 24
LARGEST = 5_000_000  # bytes of a checkpoint: all of them stay below 25 MB


# Modules of plain PyTorch, with their weights alone.
PLAIN = ("foreground", "heads")


@pytest.fixture(params=[name for name in (*CLASSES, *PLAIN) if (MODELS / name).is_dir()])
def name(request):
    return request.param


def test_a_model_is_as_good_as_it_is_said_to_be(name):
    """Its metrics on the first evaluation scenes agree with the recorded ones, within the interval of so few scenes."""
    from calibration.scenes.training.train import kind_of

    kind, recorded = kind_of(name), json.loads((MODELS / name / "metrics.json").read_text("utf-8"))
    if name in PLAIN:
        model = kind.build().eval()
        model.load_state_dict(load_file(MODELS / name / "model.safetensors"))
    else:
        model = getattr(transformers, CLASSES[name]).from_pretrained(MODELS / name).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.inference_mode():
        found = kind.measure(model, [kind.draw("evaluation", index) for index in range(SCENES)])
    assert found.keys() == recorded.keys()
    for metric, value in found.items():
        assert value.low <= recorded[metric]["value"] <= value.high, metric


def test_a_folder_has_what_a_stranger_brings(name):
    """The image processor's file says what training did, and what is read from the folder reads pictures so."""
    from calibration.scenes.training.train import kind_of

    kind = kind_of(name)
    for processor in kind.processors():
        again = type(processor).from_pretrained(MODELS / name)
        if hasattr(processor, "image_mean"):
            assert again.to_dict() == processor.to_dict()
        else:
            assert again.get_vocab() == processor.get_vocab()
    assert (MODELS / name / "model.safetensors").stat().st_size < LARGEST
