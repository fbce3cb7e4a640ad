"""Checkpoints of the original repositories of RT-DETR and D-FINE: every key is used once, every tensor of transformers'
module comes of one, and the answers are those that the repositories' own code gave.

The large ones answer where the page of models is written, or with VITDEPLOY_TEST_DEPTH.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

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
from vitdeploy.errors import CapabilityError, CheckpointError, MissingPackageError
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import save_graph
from vitdeploy.models import catalog
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.families.rtdetr import COMPUTED, FAMILY, RULES, TRAINING, TWINS
from vitdeploy.models.family import Hints
from vitdeploy.models.keys.rules import apply
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime.tasks.detection import PostprocessSpec

NAMES = FAMILY.names
ANSWERS = ("rtdetr_r18vd", "rtdetrv2_r18vd", "dfine_n")
PAGE = {"rtdetr_r18vd": "RT-DETR", "rtdetrv2_r18vd": "RT-DETRv2", "dfine_n": "D-FINE"}


@pytest.fixture(scope="module")
def names():
    return recorded_names()


def deep(request):
    return "VITDEPLOY_TEST_DEPTH" in os.environ or request.config.getoption("record_parity")


def told(name):
    """What the name says to the reader of a checkpoint."""
    return FAMILY.hints(name, NAMES[name])


@pytest.fixture(params=[name for name in NAMES if name not in ("rtdetrv2_r18vd_sp2", "rtdetrv2_r18vd_sp3")])
def variant(request, names):
    """A published model's name, and a checkpoint of it that has no numbers."""
    recorded = request.param.replace("_dsp", "")  # discrete sampling has the same tensors
    return request.param, checkpoint(names[recorded], weights=False)


def test_the_shape_of_a_published_checkpoint_is_that_of_its_name(variant):
    name, state = variant
    found = FAMILY.recognise(state, told(name))
    assert (found.style, found.config) == ("original", NAMES[name])
    assert FAMILY.differences(found.config, NAMES[name]) == []


def test_every_key_is_used_once_and_every_tensor_of_the_module_comes_of_one(variant):
    name, state = variant
    reference("transformers")
    found = apply(RULES[NAMES[name].kind], state)
    assert None not in found.values()
    unused = {key for key, targets in found.items() if not targets}
    assert all(
        key.startswith((*COMPUTED, *TRAINING)) or key.endswith("num_batches_tracked") for key in unused - set(TWINS)
    )
    assert max(Counter(target for targets in found.values() for target in targets).values()) == 1
    recognised = FAMILY.recognise(state, told(name)).state
    with torch.device("meta"):
        own = FAMILY.build(NAMES[name]).state_dict()
    assert {key: tensor.shape for key, tensor in recognised.items()} == {key: each.shape for key, each in own.items()}


def test_what_is_listed_is_what_is_built():
    reference("transformers")
    assert set(FAMILY.parameters) == set(NAMES)
    for name, config in NAMES.items():
        with torch.device("meta"):
            module = FAMILY.build(config)
        assert sum(parameter.numel() for parameter in module.parameters()) == FAMILY.parameters[name]


# --- answers of the repositories' own code ---


@pytest.fixture(scope="module", params=ANSWERS)
def loaded(request, names, tmp_path_factory):
    """The name and the loaded model, from a file as the repositories save it."""
    name = request.param
    if name != "dfine_n" and not deep(request):
        pytest.skip("`make models-doc`, or VITDEPLOY_TEST_DEPTH=1 loads it too")
    reference("transformers")
    file = tmp_path_factory.mktemp(name) / "checkpoint.pth"
    state = checkpoint(names[name])
    torch.save({"ema": {"module": state, "updates": 3}, "model": {}, "last_epoch": 2, "date": "today"}, file)
    return name, load_model(Source(None if name == "dfine_n" else name, file, image_size=(SIDE, SIDE)))


def test_answers_are_those_of_the_original_repository(loaded, parity):
    name, original = loaded
    recorded = recorded_answers()
    expected = [torch.from_numpy(recorded[f"{name}.{part}"]) for part in ("logits", "boxes")]
    module = original.module.double()
    try:
        with torch.no_grad():
            logits, boxes = module(images())
    finally:
        module.float()
    assert min(float(each.std()) for each in expected) > 1e-3  # they say something
    found = [logits[:, :QUERIES, :CLASSES], boxes[:, :QUERIES]]
    parity(f"{PAGE[name]}, its repository's checkpoints", REPOSITORY, found, expected, keys="original")


def test_objects_are_read_as_the_repositories_do(loaded):
    _, original = loaded
    assert (original.family, original.signature.task) == ("rtdetr", "detection")
    assert original.signature.postprocess == PostprocessSpec(scores="sigmoid")
    assert original.signature.image_size == original.preprocess.crop == (SIDE, SIDE)
    assert (original.preprocess.mean, original.preprocess.std) == ((0.0,) * 3, (1.0,) * 3)
    notes = "\n".join(original.notes)
    assert "resized from 640x640 to 320x320" in notes  # the anchors in the file are those of 640x640
    assert "left out, used in training only: decoder.denoising_class_embed.weight" in notes


@pytest.fixture(scope="module", params=ANSWERS)
def exported(request, names, tmp_path_factory):
    """The name, the module and its graph, with so few queries that rounding does not change which cells they are."""
    name = request.param
    if not deep(request):
        pytest.skip("like test_detectors, with other numbers; `make models-doc`, or VITDEPLOY_TEST_DEPTH=1 runs it")
    reference("transformers")
    config = replace(NAMES[name], queries=12, image_size=(SIDE, SIDE))
    module = FAMILY.build(config).eval()
    load_state(module, FAMILY.recognise(checkpoint(names[name]), told(name)).state, name)
    signature, folder = FAMILY.describe(config), tmp_path_factory.mktemp("graph")
    graph = export_graph(
        module, name="model", preprocess=FAMILY.preprocess(config), image_size=(SIDE, SIDE), opset=20, batch=None,
        in_graph=False, task="detection", outputs=["logits", "boxes"], postprocess=signature.postprocess,
    )  # fmt: skip
    save_graph(graph, folder / "model.onnx")
    return name, module, folder / "model.onnx"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_graph_is_the_module(exported, engine, parity):
    name, module, graph = exported
    for batch in BATCHES:
        image = torch.rand(batch, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(batch))
        with torch.no_grad(), engine_runner(engine, graph, batch) as runner:
            found, expected = runner.infer({"image": image.numpy()}), module(image)
        family = f"{PAGE[name]}, its repository's checkpoints"
        parity(family, engine, [found["logits"], found["boxes"]], expected, top1=True)


# --- what is refused ---


def refused(state, hints=None):
    with pytest.raises(CheckpointError) as caught:
        catalog.recognise(state, hints or Hints(), [FAMILY])
    return caught.value


def test_a_variant_that_transformers_has_no_module_for_is_refused_with_its_keys(names):
    state = checkpoint(names["dfine_n"], weights=False)
    state["decoder.decoder.layers.0.mixture.gate.weight"] = torch.zeros(3)
    error = refused(state)
    assert error.found == "1 unknown: decoder.decoder.layers.0.mixture.gate.weight"
    assert "vitdeploy export list rtdetr" in error.expected
    assert "export_onnx.py" in error.fix


def test_two_numbers_for_one_are_refused(names):
    state = checkpoint(names["dfine_n"], weights=False) | {"decoder.decoder.up": torch.tensor([0.25])}
    assert refused(state).found == "values that differ from those of the duplicate: decoder.decoder.up"


def test_missing_tensors_are_refused_with_their_names(names, tmp_path):
    reference("transformers")
    state = checkpoint(names["dfine_n"])
    del state["decoder.reg_scale"], state["decoder.decoder.reg_scale"], state["encoder.lateral_convs.0.conv.weight"]
    assert refused(state).found == "no tensor 'encoder.lateral_convs.0.conv.weight'"
    state["encoder.lateral_convs.0.conv.weight"] = torch.zeros(128, 128, 1, 1)
    torch.save(state, tmp_path / "less.pth")
    with pytest.raises(CheckpointError) as caught:
        load_model(Source("dfine_n", tmp_path / "less.pth"))
    assert "1 missing: model.model.decoder.reg_scale" in caught.value.found


def test_how_an_unnamed_model_samples_is_assumed_and_said(names):
    found = FAMILY.recognise(checkpoint(names["rtdetrv2_r18vd"], weights=False), Hints())
    assert (found.config.sampling, "assuming interpolated sampling" in found.notes[0]) == ("default", True)
    found = FAMILY.recognise(checkpoint(names["rtdetrv2_r18vd"], weights=False), told("rtdetrv2_r18vd_dsp"))
    assert (found.config.sampling, "sampling" in found.notes[0]) == ("discrete", False)


def test_what_transformers_cannot_build_is_refused():
    reference("transformers")
    with pytest.raises(CapabilityError, match="cannot build this RTDetrV2") as caught:
        FAMILY.build(replace(NAMES["rtdetrv2_r18vd"], decoder_layers=1))
    assert "use the ONNX file" in caught.value.fix


def test_a_decoder_that_may_stop_early_must_be_named(names):
    state = checkpoint(names["rtdetrv2_r50vd_m"], weights=False)
    error = refused(state)
    assert "6 layers; the published r50vd_m stops after the third" in error.found
    assert error.fix == "vitdeploy export rtdetrv2_r50vd_m --checkpoint FILE"
    found = FAMILY.recognise(state, told("rtdetrv2_r50vd_m"))
    assert "left out, used in training only: decoder layers 4 to 6" in found.notes


def test_another_variant_than_the_name_says_is_refused(names, tmp_path):
    torch.save(checkpoint(names["rtdetrv2_r18vd_sp1"]), tmp_path / "sp1.pth")
    with pytest.raises(CheckpointError) as caught:
        load_model(Source("rtdetrv2_r18vd", tmp_path / "sp1.pth"))
    assert caught.value.found == "points (1, 1, 1) instead of (4, 4, 4)"


def test_anchors_tell_the_size_of_a_square_image(names):
    state = checkpoint(names["dfine_n"], weights=False)
    state["decoder.anchors"] = torch.zeros(1, 20 * 20 + 10 * 10, 4)
    assert FAMILY.recognise(state, told("dfine_n")).config.image_size == (320, 320)
    state["decoder.anchors"] = torch.zeros(1, 20 * 30 + 10 * 15, 4)
    found = FAMILY.recognise(state, told("dfine_n"))
    assert found.config.image_size == (640, 640)
    assert "750 anchors do not match a square image: assuming 640x640" in found.notes


def test_a_size_that_strides_do_not_divide_is_refused():
    with pytest.raises(CheckpointError) as caught:
        FAMILY.resize(NAMES["dfine_n"], {}, (650, 400))
    assert caught.value.found == "image size 650x400, not a multiple of 32 on both sides"
    assert caught.value.fix == "--image-size 640x384"
    with pytest.raises(CheckpointError, match="fewer tokens than queries at 96x96") as caught:
        FAMILY.resize(NAMES["rtdetr_r18vd"], {}, (96, 96))
    assert caught.value.found == "189 tokens for 300 queries"  # 12 x 12, 6 x 6 and 3 x 3
    assert caught.value.fix.startswith("--image-size 128x128 ")


def test_transformers_of_before_these_names_is_refused(monkeypatch):
    old = SimpleNamespace(__version__="4.49.0")
    monkeypatch.setattr("vitdeploy.models.families.library_detector.library", lambda name, why: old)
    with pytest.raises(CapabilityError) as caught:
        FAMILY.build(NAMES["dfine_n"])
    assert (caught.value.found, caught.value.fix) == ("transformers 4.49.0", "pip install --upgrade transformers")


def test_names_are_listed_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (entry,) = catalog.entries("rtdetrv2_r18vd")
    assert (entry.parameters, entry.task, entry.image_size) == (20_153_872, "detection", (640, 640))
    with pytest.raises(MissingPackageError):
        load_model(Source("rtdetrv2_r18vd"))
