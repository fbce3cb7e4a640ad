"""Modules in memory, as others write them: what is read from them, every refusal, and by what stored work is found."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.references import reference
from vitdeploy.errors import CheckpointError, UserCodeError
from vitdeploy.exporter.torch_onnx import export_graph
from vitdeploy.graph.io.files import serialised
from vitdeploy.models.external.module import from_module, identity_in_memory
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.spec import PreprocessSpec

SIZE = (32, 48)


class Plain(nn.Module):
    """A convolutional stem before PyTorch's own encoder."""

    def __init__(self, classes=6, factor=1.0):
        super().__init__()
        self.factor = factor
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.BatchNorm2d(16), nn.ReLU())
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, classes)

    def forward(self, image):
        tokens = self.stem(image).flatten(2).transpose(1, 2)
        return self.factor * self.head(self.encoder(tokens).mean(dim=1))


class TwoHeads(nn.Module):
    """A classifier that gives what it was trained with, too."""

    def __init__(self, kind="dict"):
        super().__init__()
        self.kind = kind
        self.stem = nn.Conv2d(1, 8, 8, 8)
        self.head, self.age = nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, image):
        features = self.stem(image).mean(dim=(2, 3))
        both = {"logits": self.head(features), "age": self.age(features)}
        return both if self.kind == "dict" else tuple(both.values()) if self.kind == "tuple" else features


def spec(size=SIZE, channels=3):
    return PreprocessSpec(size, size, mean=(0.4,) * channels, std=(0.2,) * channels)


def plain(**arguments):
    torch.manual_seed(0)
    return Plain(**arguments)


def check_export(original):
    """The graph answers as the module does."""
    signature = original.signature
    graph = export_graph(
        original.module,
        name="own",
        preprocess=original.preprocess,
        image_size=signature.image_size,
        opset=20,
        batch=None,
        in_graph=False,
        task=signature.task,
        outputs=[output.name for output in signature.outputs],
    )
    image = torch.randn(3, signature.channels, *signature.image_size)
    with OnnxRuntimeRunner(serialised(graph), name="own") as runner:
        found = runner.infer({"image": image.numpy()})
    expected = original.module(image)
    torch.testing.assert_close(torch.from_numpy(found[signature.outputs[0].name]), expected, rtol=1e-3, atol=1e-5)


def test_a_module_is_copied_with_all_that_is_given_of_it():
    module = plain().half().train()
    labels = [f"class {number}" for number in range(6)]
    original = from_module(module, name="mine", preprocess=spec(), labels=labels)
    assert (original.name, original.family, original.labels) == ("mine", "module", tuple(labels))
    assert (original.signature.task, original.signature.image_size, original.preprocess) == (
        "classification",
        SIZE,
        spec(),
    )
    assert original.notes == ()
    assert module.training and module.head.weight.dtype == torch.float16
    assert not original.module.training and original.module(torch.zeros(2, 3, *SIZE)).dtype == torch.float32
    check_export(original)


def test_what_is_not_given_is_assumed_and_told():
    original = from_module(plain())
    assert (original.name, original.signature.image_size) == ("Plain", (224, 224))
    assert [note.partition(":")[0] for note in original.notes] == [
        "the module does not declare its image size",
        "the module does not declare its preprocessing",
    ]


def test_a_module_of_timm_says_size_and_preprocessing():
    timm = reference("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7)
    original = from_module(model)
    assert (original.signature.image_size, original.classes) == ((64, 64), 7)
    assert original.preprocess.mean == (0.5, 0.5, 0.5) and original.preprocess.resize == 71
    assert identity_in_memory(original) == identity_in_memory(from_module(copy.deepcopy(model)))
    check_export(original)
    pooled = from_module(timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, num_classes=0))
    assert (pooled.signature.task, pooled.signature.outputs[0].name) == ("features", "features")


def test_of_two_heads_all_are_kept_unless_one_is_asked_for():
    kept = from_module(TwoHeads(), preprocess=spec(channels=1))
    assert kept.signature.task == "tensors" and "in addition to logits the model has age" in kept.signature.notes[0]
    assert [output.name for output in kept.signature.outputs] == ["logits", "age"]
    original = from_module(TwoHeads(), preprocess=spec(channels=1), labels=list("abcde"), task="classification")
    assert [(output.name, output.shape) for output in original.signature.outputs] == [("logits", ("batch", 5))]
    assert original.signature.notes == ("outputs: left out, and not compared: age",)
    check_export(original)
    several = from_module(TwoHeads("tuple"), preprocess=spec(channels=1))
    assert several.signature.task == "tensors"
    assert [output.name for output in several.signature.outputs] == ["output_0", "output_1"]


def test_one_output_is_features_where_the_task_says_so():
    original = from_module(TwoHeads("features"), preprocess=spec(channels=1), task="features")
    assert (original.signature.task, original.signature.outputs[0].name) == ("features", "features")
    assert from_module(TwoHeads("features"), preprocess=spec(channels=1)).signature.task == "classification"


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserCodeError, match="is not a model") as raised:
        from_module(Plain)
    assert raised.value.found == "the class Plain itself"
    with pytest.raises(CheckpointError, match="the labels do not fit Plain") as raised:
        from_module(plain(), preprocess=spec(), labels=["one"])
    assert (raised.value.found, raised.value.expected) == ("1 labels", "one per class: 6")
    with pytest.raises(CheckpointError, match="the labels do not fit") as raised:
        from_module(TwoHeads("features"), preprocess=spec(channels=1), task="features", labels=["one"])
    assert raised.value.expected == "no labels: the model has no classes"
    with pytest.raises(CheckpointError, match="cannot be used for the task") as raised:
        from_module(plain(), preprocess=spec(), task="detection")
    assert raised.value.found == "classification: logits ['batch', 6]"
    with pytest.raises(CheckpointError, match="the preprocessing does not fit Plain") as raised:
        from_module(plain(), preprocess=spec(), image_size=(32, 32))
    assert raised.value.found == "crop 32x48"
    with pytest.raises(CheckpointError, match="does not run on an image"):
        from_module(plain(), preprocess=spec(channels=1))
    module = plain()
    module.cached = module.head.weight * 2
    with pytest.raises(UserCodeError, match="cannot be copied"):
        from_module(module, preprocess=spec())


@pytest.mark.parametrize("train", [False, True])
def test_the_identity_follows_weights_and_code(train):
    module = plain().train(train)
    same = identity_in_memory(from_module(module, preprocess=spec()))
    assert same == identity_in_memory(from_module(plain(), preprocess=spec()))
    assert same != identity_in_memory(from_module(plain(factor=1 + 1e-6), preprocess=spec()))
    with torch.no_grad():
        module.head.bias[0] += 1e-6
    assert same != identity_in_memory(from_module(module, preprocess=spec()))


def test_a_module_that_cannot_be_traced_has_an_identity_too():
    class Branching(Plain):
        def forward(self, image):
            return super().forward(image if image.sum() > 1e9 else image * 2)

    torch.manual_seed(0)
    original = from_module(Branching(), preprocess=spec())
    assert identity_in_memory(original) == identity_in_memory(original) != identity_in_memory(from_module(plain()))


def test_answers_for_every_pixel_are_taken_where_they_are_asked_for():
    torch.manual_seed(0)
    maps, plane = (nn.Sequential(nn.Conv2d(3, channels, 8, 8)) for channels in (6, 1))
    assert from_module(maps, preprocess=spec()).signature.task == "tensors"
    found = from_module(maps, preprocess=spec(), task="segmentation").signature
    assert (found.postprocess, found.outputs[0].shape) == (SegmentationSpec(), ("batch", 6, 4, 6))
    depth = from_module(plane, preprocess=spec(), task="depth").signature
    assert (depth.postprocess, depth.outputs[0].name) == (DepthSpec(), "depth") and "inverse" in depth.notes[0]
    with pytest.raises(CheckpointError, match="cannot be used for the task"):
        from_module(plane, preprocess=spec(), task="segmentation")
