"""transformers' modules for dense tasks: exported, run on both engines, and verified against labels that transformers'
own post-processing made, so that an original has all of its metric only if every pixel and every point arrives."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.parity import BATCHES, ENGINES, engine_runner
from tests.references import reference
from vitdeploy.errors import CheckpointError, DataError
from vitdeploy.models.external.module import from_module
from vitdeploy.models.source import Source
from vitdeploy.progress import silent
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.image_to_image import ImageSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import Overrides, ReferenceModel, find_reference_model, reference_runner
from vitdeploy.tasks.adapter import DataChoice, Setting
from vitdeploy.tasks.registry import make_adapter

IMAGES, CALIBRATION = 6, 2


@dataclass(frozen=True)
class Exported:
    """A library's model and processor, what vitdeploy makes of their folder, and its graph."""

    model: Any
    processor: Any
    folder: Path
    original: ReferenceModel
    graph: Path


def exported(model: Any, processor: Any, home: Path, task: Any = None) -> Exported:
    folder = home / "model"
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    original = find_reference_model(Source(model=f"hf:{folder}", task=task))
    export(original, ExportConfig("small", 20, None, True), home)
    return Exported(model, processor, folder, original, home / "model.onnx")


def setting_of(original: ReferenceModel) -> Setting:
    return Setting(original.task, original.preprocess, original.postprocess, None, original.labels, original.classes)


def assert_parity(made: Exported, family: str, output: str, parity: Any) -> None:
    """The graph is the module on both engines, at several batch sizes."""
    generator = np.random.default_rng(0)
    with reference_runner(made.original.source) as theirs:
        for batch in BATCHES:
            pixels = generator.integers(0, 256, (batch, *made.original.image_size, 3), dtype=np.uint8)
            expected = theirs.infer({"image": normalise(pixels, made.original.images)})[output]
            for engine in ENGINES:
                with engine_runner(engine, made.graph, batch) as runner:
                    parity(family, engine, runner.infer({"image": pixels})[output], expected)


def scenes(folder: Path, sizes: list[tuple[int, int]]) -> list[Path]:
    """Pictures of coloured rectangles on noise, of these (width, height)."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    for number, (width, height) in enumerate(sizes):
        pixels = generator.integers(0, 90, (height, width, 3), np.uint8)
        for _ in range(6):
            x, y = generator.integers(0, width - 12), generator.integers(0, height - 12)
            pixels[y : y + 16, x : x + 18] = generator.integers(0, 256, 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


# --- key points -------------------------------------------------------------------------------------------------------

POSE, SIDES, POINTS = "ViTPose, transformers' module", (64, 48), 5
NAMES = ["nose", "left hand", "right hand", "left foot", "right foot"]


def vitpose(simple: bool, experts: int = 1) -> tuple[Any, Any]:
    """A ViTPose whose maps tell images apart, and its processor."""
    library = reference("transformers")
    backbone = library.VitPoseBackboneConfig(
        image_size=list(SIDES), patch_size=[8, 8], hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        mlp_ratio=2, num_experts=experts, part_features=8 if experts > 1 else 0, out_indices=[1],
    )  # fmt: skip
    config = library.VitPoseConfig(
        backbone_config=backbone, use_simple_decoder=simple,
        id2label=dict(enumerate(NAMES)), label2id={name: index for index, name in enumerate(NAMES)},
    )  # fmt: skip
    config.edges = [[0, 1], [0, 2]]
    torch.manual_seed(0)
    model = library.VitPoseForPoseEstimation(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
        head = [layer for layer in model.head.modules() if isinstance(layer, nn.Conv2d)][-1]
        maps = model(torch.randn(8, 3, *SIDES)).heatmaps if experts == 1 else torch.ones(8, POINTS, 2, 2)
        head.bias.copy_(0.1 - maps.mean(dim=(0, 2, 3)) / (3 * maps.std() + 1e-9))
        head.weight.mul_(1 / (3 * maps.std() + 1e-9))
    return model, library.VitPoseImageProcessor(size={"height": SIDES[0], "width": SIDES[1]})


@pytest.fixture(scope="module")
def pose(tmp_path_factory):
    return exported(*vitpose(simple=False), tmp_path_factory.mktemp("pose"))


def test_vitpose_is_the_same_function_on_both_engines(pose, parity):
    assert (pose.original.task, pose.original.image_size, pose.original.labels) == ("keypoints", SIDES, tuple(NAMES))
    assert pose.original.images.fit == "topdown"
    assert pose.original.postprocess.skeleton == ((0, 1), (0, 2))
    assert_parity(pose, POSE, "heatmaps", parity)


def test_vitpose_has_the_points_of_transformers(pose, tmp_path):
    """Labels are transformers' own answers, for two boxes an image, one of them beyond its borders."""
    paths = scenes(tmp_path / "images", [(90, 70), (60, 110)] * (IMAGES // 2))
    rows, images = [], []
    for number, path in enumerate(paths):
        image = Image.open(path)
        boxes = [[3.5, 4.0, 40.0, 50.5], [-6.0, 10.0, 60.0, 55.0]]
        with torch.no_grad():
            outputs = pose.model(pose.processor(image, boxes=[boxes], return_tensors="pt")["pixel_values"])
        [poses] = pose.processor.post_process_pose_estimation(outputs, boxes=[boxes])
        for box, found in zip(boxes, poses, strict=True):
            flat = [value for x, y in found["keypoints"].tolist() for value in (x, y, 2)]
            rows.append({"image_id": number, "category_id": 1, "bbox": box, "area": 1000, "keypoints": flat})
        images.append({"id": number, "file_name": path.name, "width": image.width, "height": image.height})
    category = {"id": 1, "name": "person", "keypoints": NAMES, "sigmas": [0.005] * POINTS}  # strict: a pixel matters
    file = tmp_path / "points.json"
    file.write_text(json.dumps({"images": images, "annotations": rows, "categories": [category]}))

    adapter = make_adapter(setting_of(pose.original))
    data = adapter.load(
        DataChoice(paths[0].parent, "coco", file, CALIBRATION, "all", 0), skip_bad=False, progress=silent
    )
    assert (len(data.calibration), len(data.evaluation)) == (2 * CALIBRATION, 2 * (IMAGES - CALIBRATION))
    answers = adapter.answers(OnnxRuntimeRunner(pose.graph, name="engine"), data, lambda count: None)
    found = adapter.compare(answers, answers, data)
    assert (found.metric, found.n, found.agreement) == ("OKS AP", 8, 100)
    assert found.value > 99
    assert (found.pck, found.points > 20) == (100, True)
    assert adapter.doubt(answers, data, found) is None
    assert not adapter.changes(answers, answers, data).changed.any()
    marked = adapter.marks("engine", answers, answers, 0).both
    assert adapter.show(answers, 0, NAMES).label == f"{len(marked)} of {POINTS} points"

    runner, original = OnnxRuntimeRunner(pose.graph, name="engine"), pose.original
    with Predictor(runner, original.images, NAMES, "keypoints", original.postprocess) as app:
        boxes = [(x, y, x + w, y + h) for x, y, w, h in (row["bbox"] for row in rows[:2])]
        for answer, row in zip(app.predict_boxes(paths[0], boxes), rows, strict=False):
            expected = np.reshape(row["keypoints"], (-1, 3))[:, :2]
            np.testing.assert_allclose([(p.x, p.y) for p in answer.points], expected, atol=0.02)
        assert app.predict_boxes(paths[0], []) == []
        assert app.predict(paths[0]).box == (0, 0, 90, 70)


def test_what_is_said_of_boxes_does_not_fit_key_points(pose):
    with pytest.raises(CheckpointError, match="the post-processing does not fit") as refused:
        find_reference_model(Source(model=f"hf:{pose.folder}"), Overrides(postprocess=PostprocessSpec()))
    assert refused.value.expected == "decoding, kernel, threshold, skeleton"


def test_a_mixture_of_experts_is_refused_with_what_it_asks_for(tmp_path):
    model, processor = vitpose(simple=True, experts=2)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        find_reference_model(Source(model=f"hf:{tmp_path}"))
    assert "dataset_index must be provided" in refused.value.found
    assert "wrap it in a module" in refused.value.fix


# --- image to image ---------------------------------------------------------------------------------------------------

SUPER = "Swin2SR, transformers' module"


@pytest.fixture(scope="module")
def upscaler(tmp_path_factory):
    library = reference("transformers")
    config = library.Swin2SRConfig(
        image_size=16, embed_dim=16, depths=[2], num_heads=[2], window_size=8, mlp_ratio=2.0, upscale=2,
        upsampler="pixelshuffledirect",
    )  # fmt: skip
    torch.manual_seed(0)
    model = library.Swin2SRForImageSuperResolution(config).eval()
    return exported(model, library.Swin2SRImageProcessor(), tmp_path_factory.mktemp("upscaler"))


def test_swin2sr_is_the_same_function_on_both_engines(upscaler, parity):
    assert (upscaler.original.task, upscaler.original.image_size) == ("image-to-image", (16, 16))
    assert any("the processor pads images" in note for note in upscaler.original.notes)
    assert_parity(upscaler, SUPER, "reconstruction", parity)


def test_swin2sr_makes_the_pictures_of_transformers(upscaler, tmp_path):
    """Targets are what transformers' module makes of the pixels, rounded as its example does."""
    paths = scenes(tmp_path / "images", [(16, 16)] * IMAGES)
    (tmp_path / "targets").mkdir()
    for path in paths:
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None].float() / 255
        with torch.no_grad():
            made = upscaler.model(pixels).reconstruction[0].clamp(0, 1).numpy()
        rounded = (made * 255.0).round().astype(np.uint8).transpose(1, 2, 0)
        Image.fromarray(rounded).save(tmp_path / "targets" / path.name)
    adapter = make_adapter(setting_of(upscaler.original))
    choice = DataChoice(paths[0].parent, "targets", tmp_path / "targets", CALIBRATION, "all", 0)
    data = adapter.load(choice, skip_bad=False, progress=silent)
    answers = adapter.answers(OnnxRuntimeRunner(upscaler.graph, name="engine"), data, lambda count: None)
    found = adapter.compare(answers, answers, data)
    assert (found.metric, found.n, found.agreement) == ("SSIM", IMAGES - CALIBRATION, 100)
    assert found.value > 99.9
    assert found.psnr > 50  # a level here and there is rounded otherwise
    assert adapter.doubt(answers, data, found) is None
    titles = [title for title, _ in adapter.panels(data, 0, {"original": answers, "engine": answers})]
    assert titles == ["original", "engine", "label"]
    assert not adapter.changes(answers, answers, data).changed.any()

    told = replace(setting_of(upscaler.original), postprocess=ImageSpec(0.0, 0.05))
    other = make_adapter(told)
    clipped = other.answers(OnnxRuntimeRunner(upscaler.graph, name="engine"), data, lambda count: None)
    assert "0 is set as black and 0.05 as white" in other.doubt(clipped, data, found)

    Image.new("RGB", (33, 32)).save(tmp_path / "targets" / "0.png")
    for path in paths[1:]:
        Image.new("RGB", (33, 32)).save(tmp_path / "targets" / path.name)
    with pytest.raises(DataError, match="does not have the size of the model's output"):
        adapter.compare(answers, answers, adapter.load(choice, skip_bad=False, progress=silent))


def test_a_tensor_is_a_picture_only_where_it_is_asked_for():
    class Same(nn.Module):
        def forward(self, image):
            return image * 0.5

    made = from_module(Same(), image_size=(8, 8), task="image-to-image")
    assert (made.signature.task, made.signature.outputs[0].name) == ("image-to-image", "reconstruction")
    assert made.signature.postprocess == ImageSpec()
    assert from_module(Same(), image_size=(8, 8)).signature.task == "tensors"
    heat = from_module(Same(), image_size=(8, 8), task="keypoints")
    assert heat.signature.outputs[0].name == "heatmaps"
