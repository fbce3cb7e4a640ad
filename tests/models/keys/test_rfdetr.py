"""Checkpoints of RF-DETR's repository: every key is used once, every tensor of transformers' module comes of one, and
the answers are those that the repository's own code gave.

The models answer where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.models.keys.original_detectors import (
    CLASSES,
    QUERIES,
    SIDE,
    checkpoint,
    images,
    recorded_answers,
    recorded_names,
)
from tests.parity import BATCHES, ENGINES, REPOSITORY, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models import catalog
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.rfdetr import FAMILY, RULES
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.rules import apply
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source

NAMES = FAMILY.names
PAGE = "RF-DETR, its repository's checkpoints"


@pytest.fixture(scope="module")
def names():
    return recorded_names()


@pytest.fixture(scope="module")
def deep(request):
    if "VITDEPLOY_TEST_DEPTH" not in os.environ and not request.config.getoption("record_parity"):
        pytest.skip("30 million numbers; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 draws them")
    reference("transformers")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_used_once_and_every_tensor_of_the_module_comes_of_one(names, name):
    reference("transformers")
    state = checkpoint(names[name], weights=False)
    found = FAMILY.recognise(state, Hints())
    assert (found.style, found.config) == ("original", NAMES[name])
    targets = Counter(target for named in apply(RULES, state).values() for target in named)
    assert max(targets.values()) == 1
    with torch.device("meta"):
        module = FAMILY.build(NAMES[name])
    own = module.state_dict()
    assert {key: each.shape for key, each in found.state.items()} == {key: each.shape for key, each in own.items()}
    assert sum(parameter.numel() for parameter in module.parameters()) == FAMILY.parameters[name]


def test_answers_are_those_of_the_original_repository(names, deep, parity, tmp_path):
    saved = {"model": checkpoint(names["rfdetr_nano"]), "args": argparse.Namespace(resolution=384), "epoch": 3}
    torch.save(saved, tmp_path / "checkpoint.pth")
    original = load_model(Source(checkpoint=tmp_path / "checkpoint.pth", image_size=(SIDE, SIDE)))
    assert (original.family, original.signature.task) == ("rfdetr", "detection")
    assert "assuming 2x2 windows and layers 3, 6, 9, 12, as published for patches of 16 pixels" in original.notes
    assert "resized from 384x384 to 320x320 pixels" in original.notes
    recorded = recorded_answers()
    expected = [torch.from_numpy(recorded[f"rfdetr_nano.{part}"]) for part in ("logits", "boxes")]
    with torch.no_grad():
        logits, boxes = original.module.double()(images())
    found = [logits[:, :QUERIES, :CLASSES], boxes[:, :QUERIES]]
    parity(PAGE, REPOSITORY, found, expected, keys="original")


@pytest.fixture(scope="module")
def exported(names, deep, tmp_path_factory):
    """The module and its graph, with so few queries that rounding does not change which cells they are."""
    config = replace(NAMES["rfdetr_nano"], queries=12, groups=1, image_size=(SIDE, SIDE))
    module = FAMILY.build(config).eval()
    state = FAMILY.recognise(checkpoint(names["rfdetr_nano"]), Hints()).state
    own = module.state_dict()
    load_state(module, {key: state[key][: len(each)] for key, each in own.items()}, "nano")
    signature, folder = FAMILY.describe(config), tmp_path_factory.mktemp("graph")
    graph = export_graph(
        module, name="model", preprocess=FAMILY.preprocess(config), image_size=(SIDE, SIDE), opset=20, batch=None,
        in_graph=False, task="detection", outputs=["logits", "boxes"], postprocess=signature.postprocess,
    )  # fmt: skip
    save_graph(graph, folder / "model.onnx")
    return module, folder / "model.onnx"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graph_is_the_module(exported, engine, parity):
    module, graph = exported
    for batch in BATCHES:
        image = torch.rand(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad(), engine_runner(engine, graph, batch) as runner:
            found, expected = runner.infer({"image": image.numpy()}), module(image)
        parity(PAGE, engine, [found["logits"], found["boxes"]], expected, top1=True)


def refused(state):
    with pytest.raises(CheckpointError) as caught:
        catalog.recognise(state, Hints(), [FAMILY])
    return caught.value


def test_masks_are_refused_with_their_keys(names):
    state = checkpoint(names["rfdetr_nano"], weights=False)
    error = refused(state | {"segmentation_head.spatial_features_proj.weight": torch.zeros(2)})
    assert error.found == "1 unknown: segmentation_head.spatial_features_proj.weight"
    assert error.expected.startswith("rfdetr_nano, ")


def test_missing_tensors_and_other_models_are_refused(names):
    state = checkpoint(names["rfdetr_nano"], weights=False)
    del state["class_embed.weight"]
    assert refused(state).found == "no tensor 'class_embed.weight'"
    assert FAMILY.differences(NAMES["rfdetr_base"], NAMES["rfdetr_nano"])[0] == "patch 14 instead of 16"
    assert FAMILY.recognise(checkpoint(names["dfine_n"], weights=False), Hints()) is None


def test_a_folder_of_transformers_stays_its_own(names):
    """`save_pretrained` writes the names of the repository."""
    state = checkpoint(names["rfdetr_nano"], weights=False)
    assert FAMILY.recognise(state, Hints(config={"model_type": "rf_detr"})) is None


def test_a_size_that_windows_do_not_divide_is_refused():
    with pytest.raises(CheckpointError) as caught:
        FAMILY.resize(NAMES["rfdetr_base"], {}, (560, 600))
    assert caught.value.found == "image size 560x600, not a multiple of 56 on both sides"
    assert caught.value.fix == "--image-size 560x616"


def test_a_size_of_fewer_tokens_than_queries_is_refused_with_the_next_that_has_enough():
    with pytest.raises(CheckpointError, match="fewer tokens than queries at 64x96") as caught:
        FAMILY.resize(NAMES["rfdetr_nano"], {}, (64, 96))
    assert caught.value.found == "24 tokens for 300 queries"
    assert caught.value.fix.startswith("--image-size 288x320 ")  # 18 x 20; 256x288 has 288
    FAMILY.resize(NAMES["rfdetr_nano"], {}, (288, 320))


@pytest.mark.parametrize(
    ("trained", "labels", "told"),
    [
        (["car", "bus\n"], ("car", "bus", "__background__"), "column 2, __background__, is unused"),
        (["car", "bus", "van"], ("car", "bus", "van"), "car is column 0 (use --labels FILE"),
        (["car"], (), "class names ignored: the checkpoint's arguments have 1 for 3 output columns"),
    ],
)
def test_class_names_are_those_of_the_arguments_of_training(names, trained, labels, told, tmp_path):
    reference("transformers")
    shapes = {key: [3, *shape[1:]] if "class_embed." in key else shape for key, shape in names["rfdetr_nano"].items()}
    state = {key: each.clone() for key, each in checkpoint(shapes, weights=False).items()}
    saved = {"model": state, "args": argparse.Namespace(class_names=trained, num_classes=2), "epoch": 3}
    torch.save(saved, tmp_path / "checkpoint.pth")
    original = load_model(Source(checkpoint=tmp_path / "checkpoint.pth"))
    assert original.labels == labels
    assert any(told in note for note in original.notes)
