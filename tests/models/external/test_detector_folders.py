"""Folders of transformers' detectors: which image size and which rule for objects they say, and what is refused."""

import json
import os

import onnx_ir as ir
import pytest
import torch
from torch import nn

from tests.models.external.detectors import DETECTORS, saved
from tests.references import reference
from vitdeploy.errors import CheckpointError, ExportError
from vitdeploy.exporter.parity import TIED, ask, check_graph, unproven_told
from vitdeploy.exporter.patches import lengths_as_sizes
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.models.external.module import described
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.export import ExportConfig, export
from vitdeploy.stages.reference_model import Overrides, find_reference_model, reference_runner

LIKE_ANOTHER = pytest.mark.skipif(
    "VITDEPLOY_TEST_DEPTH" not in os.environ, reason="much like RT-DETRv2; VITDEPLOY_TEST_DEPTH=1 runs it too"
)


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """An RF-DETR of patches of 8 in 2 x 2 windows, so of 16 pixels, without a file of its processor."""
    reference("transformers")
    return saved("RF-DETR", tmp_path_factory.mktemp("light"))


def test_without_a_processor_the_size_is_the_backbones_and_the_rest_its_classs(light):
    original = load_model(Source(f"hf:{light}"))
    assert original.signature.image_size == original.preprocess.crop == (64, 64)
    assert original.preprocess.mean == (0.485, 0.456, 0.406)
    assert original.signature.postprocess == PostprocessSpec("sigmoid")
    assert any("assuming the defaults of RfDetrImageProcessor" in note for note in original.notes)


def test_a_size_that_windows_do_not_divide_is_answered_with_the_nearest_that_they_do(light):
    with pytest.raises(CheckpointError, match="does not run on an image of 64x88") as caught:
        load_model(Source(f"hf:{light}", image_size=(64, 88)))
    assert caught.value.fix == "--image-size 64x80 or 80x96: the model runs at these sizes"


def test_fewer_tokens_than_queries_are_told_with_the_smallest_size(light, tmp_path):
    found = []
    for folder, size in ((light, (16, 16)), (saved("RT-DETR", tmp_path), (32, 32))):
        with pytest.raises(CheckpointError, match="has fewer tokens than queries") as caught:
            load_model(Source(f"hf:{folder}", image_size=size))
        found.append((caught.value.found, caught.value.fix.split()[1]))
    assert found == [("4 tokens for 12 queries", "32x32"), ("5 tokens for 12 queries", "56x56")]


def test_the_processors_size_counts_before_the_backbones(light, tmp_path):
    for file in light.iterdir():
        (tmp_path / file.name).symlink_to(file)
    processor = {"image_processor_type": "RfDetrImageProcessor", "size": {"height": 80, "width": 96}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert load_model(Source(f"hf:{tmp_path}")).signature.image_size == (80, 96)
    # Letterboxes are not made; nothing of it is left out silently.
    processor["size"] = {"max_height": 80, "max_width": 80}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match="does not support the checkpoint's preprocessing") as caught:
        load_model(Source(f"hf:{tmp_path}"))
    assert caught.value.found == "size {'max_height': 80, 'max_width': 80}"
    assert caught.value.expected == "a number, height and width, or shortest_edge"


def test_a_default_size_that_windows_do_not_divide_is_the_next_that_they_do(tmp_path):
    """RF-DETR's own default, 518 pixels in windows of 56, in small; its processor's short side is no whole window."""
    folder = saved(
        "RF-DETR", tmp_path, backbone_config=DETECTORS["RF-DETR"].config["backbone_config"] | {"image_size": 74}
    )
    processor = {"image_processor_type": "RfDetrImageProcessor", "size": {"shortest_edge": 90, "longest_edge": 150}}
    for _ in range(2):
        original = load_model(Source(f"hf:{folder}"))
        assert original.signature.image_size == original.preprocess.crop == (80, 80)
        assert "image size 80x80: the config's 74x74, rounded up to whole windows of 16 pixels" in original.notes
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    image = torch.randn(2, 3, 80, 80, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model = reference("transformers").RfDetrForObjectDetection.from_pretrained(folder).eval()
        assert torch.equal(original.module(image)[0], model(image).logits)
    assert described(model, "in memory", None).signature.image_size == (80, 80)


def test_a_size_that_only_a_backbone_says_is_taken(tmp_path):
    transformers = reference("transformers")
    backbone = {"model_type": "vitpose_backbone", "image_size": [64, 48], "out_indices": [1]}
    backbone |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.VitPoseForPoseEstimation(transformers.VitPoseConfig(num_labels=5, backbone_config=backbone))
    model.eval().save_pretrained(tmp_path)
    original = load_model(Source(f"hf:{tmp_path}"))
    assert (original.signature.task, original.signature.image_size) == ("keypoints", (64, 48))
    image = torch.randn(2, 3, 64, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(original.module(image), model(image).heatmaps)
    small = reference("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=5)
    wrapped = described(nn.Sequential(small), "in memory", None)
    assert wrapped.signature.image_size == (32, 32)
    assert wrapped.notes[0].startswith("the module does not declare its image size: using that of its parts 32x32")
    assert described(model, "in memory", None).signature.image_size == (64, 48)


def test_a_softmax_that_transformers_has_no_rule_for_is_asked_for(tmp_path):
    source = Source(f"hf:{saved('RT-DETR', tmp_path, use_focal_loss=False)}", image_size=(64, 96))
    with pytest.raises(CheckpointError, match=r"it is unknown how .* scores its objects") as caught:
        find_reference_model(source)
    assert caught.value.fix == "postprocess: {scores: softmax} or {scores: sigmoid} in a recipe"
    given = PostprocessSpec("softmax")
    assert find_reference_model(source, Overrides(postprocess=given)).postprocess == given


def test_masks_of_instances_are_not_taken_for_a_panoptic_map(light, tmp_path):
    transformers = reference("transformers")
    config = transformers.RfDetrConfig.from_pretrained(light)
    transformers.RfDetrForInstanceSegmentation(config).save_pretrained(tmp_path)
    found = load_model(Source(f"hf:{tmp_path}")).signature
    assert (found.task, found.postprocess) == ("instance-segmentation", InstanceSpec("sigmoid", enlarge="bilinear"))
    assert [(each.name, len(each.shape)) for each in found.outputs] == [("class_logits", 3), ("masks", 4)]
    with pytest.raises(CheckpointError, match="does not support the masks of") as caught:
        load_model(Source(f"hf:{tmp_path}", task="panoptic"))
    assert "ForObjectDetection" in caught.value.fix


def test_depth_of_zoedepth_is_refused_by_name(tmp_path):
    transformers = reference("transformers")
    config = transformers.ZoeDepthConfig().to_dict() | {"architectures": ["ZoeDepthForDepthEstimation"]}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="transformers' ZoeDepthForDepthEstimation is not supported") as caught:
        load_model(Source(f"hf:{tmp_path}"))
    assert "pads images by mirroring" in caught.value.found and "DPTForDepthEstimation" in caught.value.fix


@pytest.mark.parametrize(
    ("family", "name"), [("RT-DETRv2", "RTDetrV2"), pytest.param("DEIMv2", "Deimv2", marks=LIKE_ANOTHER)]
)
def test_queries_of_tied_scores_are_compared_for_the_same_choice(family, name, tmp_path):
    """With the library's own first weights all cells have one score. PyTorch and ONNX Runtime then take others."""
    transformers = reference("transformers")
    _, config, size, _ = DETECTORS[family]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForObjectDetection")(getattr(transformers, f"{name}Config")(**config))
    model.eval().save_pretrained(tmp_path)
    original = find_reference_model(Source(f"hf:{tmp_path}", image_size=size))
    export(original, ExportConfig("tied", 20, None, True), tmp_path)
    rows = json.loads((tmp_path / "export.json").read_text())["parity"]
    assert [(row["batch"], row["tied"]) for row in rows] == [(1, True), (2, True), (5, True)]
    assert max(row["max_relative_difference"] for row in rows) < 1e-5
    assert TIED in unproven_told(rows)
    with reference_runner(original.source) as runner:
        asked = ask(runner, original.images, None)
    graph = load_graph(tmp_path / "model.onnx")  # another function is refused as before
    head = next(each for name, each in graph.graph.initializers.items() if "decoder.class_embed.1" in name)
    head.const_value = ir.tensor(head.const_value.numpy() * 1.01)
    save_graph(graph, tmp_path / "other.onnx")
    with pytest.raises(ExportError, match="not the same function"):
        check_graph(tmp_path / "other.onnx", asked, original.images)


class Looping(nn.Module):
    def forward(self, image):
        rounds = 0
        while image.mean() > rounds:
            rounds += 1
        return image.mean((2, 3)) * rounds


def test_a_loop_that_depends_on_values_is_refused_with_its_line():
    with pytest.raises(ExportError, match="cannot be exported to ONNX") as caught:
        export_graph(
            Looping(), name="looping", preprocess=PreprocessSpec((8, 8), (8, 8)), image_size=(8, 8), opset=20,
            batch=None, in_graph=False,
        )  # fmt: skip
    assert "test_detector_folders.py, line" in caught.value.found
    assert "while image.mean() > rounds" in caught.value.found


def test_len_of_a_tensor_is_its_free_size():
    assert "len" not in globals()
    with lengths_as_sizes(Looping()):
        assert globals()["len"](torch.zeros(3, 2)) == 3
        assert globals()["len"]([1, 2]) == 2
    assert "len" not in globals()
