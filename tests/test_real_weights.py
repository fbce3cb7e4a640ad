"""A published checkpoint on photographs: the export gives the answers of the PyTorch model, one for one.

The data is not part of the repository: see `needs_data` for where it is looked for.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from vitdeploy.data.folder import split
from vitdeploy.data.pixels import readable
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import default_preprocess, load_original
from vitdeploy.pipeline.stages import ExportConfig, export
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.collect import collect_from_pixels

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
    return load_original(MODEL, CHECKPOINT)


@pytest.fixture(scope="module")
def parts():
    return split(PHOTOGRAPHS, "folders", calibration=1, evaluation=64, seed=0)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, original, parts):
    """The exported graph on ONNX Runtime against the PyTorch model, on 64 photographs."""
    out = tmp_path_factory.mktemp("vit_tiny")
    preprocess = default_preprocess(original.config)
    export(ExportConfig(MODEL, "vit-tiny", None, 20, None, True), CHECKPOINT, out)
    images = [pixels for _, pixels in readable(parts.evaluation, preprocess, None)]
    ours, theirs = (
        collect_from_pixels(runner, images, preprocess)
        for runner in (OnnxRuntimeRunner(out / "model.onnx", name="graph"), TorchRunner(original))
    )
    return ours, theirs, np.array([sample.label for sample in parts.evaluation])


def test_the_checkpoint_loads_strictly(original):
    assert original.parameters == 5_717_416
    assert (original.config.num_classes, original.config.in_channels) == (1000, 3)


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
