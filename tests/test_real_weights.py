"""A published checkpoint on photographs: the export gives the answers of the PyTorch model, one for one.

The data is not part of the repository: see `needs_data` for where it is looked for.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from vitdeploy.data.folder import split
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import Source, load_original
from vitdeploy.pipeline.origin import find_origin
from vitdeploy.pipeline.stages.export import ExportConfig, export
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import load_image
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.collect import collect

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("VITDEPLOY_TEST_DATA", ROOT.parent / "shared" / "data"))
MODEL = "vit_tiny_patch16_224"
CHECKPOINT = DATA / "weights" / f"{MODEL}_imagenet1k.safetensors"
PHOTOGRAPHS = DATA / "imagenet-sample"

pytestmark = pytest.mark.skipif(
    not (CHECKPOINT.is_file() and PHOTOGRAPHS.is_dir()),
    reason=f"set VITDEPLOY_TEST_DATA to a folder with weights/{CHECKPOINT.name} and imagenet-sample/<class>/*.jpg",
)


@pytest.fixture(scope="module")
def original():
    return load_original(Source(MODEL, CHECKPOINT))


@pytest.fixture(scope="module")
def parts():
    return split(PHOTOGRAPHS, "folders", calibration=1, evaluation=64, seed=0)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, original, parts):
    """The exported graph on ONNX Runtime against the PyTorch model, on 64 photographs."""
    out = tmp_path_factory.mktemp("vit_tiny")
    origin = find_origin(Source(MODEL, CHECKPOINT))
    export(origin, ExportConfig("vit-tiny", opset=20, batch=None, in_graph=True), out)
    images = [load_image(sample.path, origin.images) for sample in parts.evaluation]
    ours, theirs = (
        collect(runner, images, origin.images).stacked("logits")
        for runner in (OnnxRuntimeRunner(out / "model.onnx", name="graph"), TorchRunner(original))
    )
    return ours, theirs, np.array([sample.label for sample in parts.evaluation])


def test_the_checkpoint_is_what_its_name_says(original):
    assert original.parameters == 5_717_416
    assert (original.classes, original.signature.channels, original.signature.image_size) == (1000, 3, (224, 224))


def test_the_file_alone_says_the_same(original):
    alone = load_original(Source(checkpoint=CHECKPOINT))
    assert alone.signature == original.signature
    assert alone.preprocess == original.preprocess
    assert alone.module.state_dict().keys() == original.module.state_dict().keys()


def test_the_graph_gives_the_answer_of_the_original_for_every_photograph(comparison):
    ours, theirs, _ = comparison
    assert ours.shape == (64, 1000)
    np.testing.assert_array_equal(ours.argmax(axis=1), theirs.argmax(axis=1))


def test_the_logits_are_those_of_the_original(comparison):
    ours, theirs, labels = comparison
    found = compare(ours, theirs, labels)
    assert (found.agreement, found.drop) == (100.0, 0.0)
    assert found.max_difference <= 1e-4


def test_the_photographs_are_recognised(comparison):
    """Mixed-up weights or labels would still agree with themselves, but recognise nothing.

    A coarse check on 64 photographs, not an accuracy: of all photographs about 82 % are recognised.
    """
    _, theirs, labels = comparison
    assert (theirs.argmax(axis=1) == labels).mean() >= 0.6
