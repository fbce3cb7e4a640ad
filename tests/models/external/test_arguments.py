"""Further arguments of a module's forward, bound to values: masks, sizes, features of texts, steps, switches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import vitdeploy as vd
from vitdeploy.errors import CheckpointError, InputError, VitdeployError
from vitdeploy.graph.io.files import get_metadata, load_graph
from vitdeploy.models.external.module import from_module
from vitdeploy.models.source import Source
from vitdeploy.pipeline.job import source_of
from vitdeploy.recipe.load import load_recipe, recipe_text
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.reference_model import find_reference_model

SIZE = (16, 24)
SPEC = PreprocessSpec(SIZE, SIZE, mean=(0.4,) * 3, std=(0.2,) * 3)
# Of an image: a mask, width and height, and features of six texts.
MASK = np.random.default_rng(3).integers(0, 2, (1, *SIZE)).astype(np.float32)
TEXTS = np.random.default_rng(4).normal(size=(6, 8)).astype(np.float32)


class Stem(nn.Module):
    def __init__(self, channels=3):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(channels, 8, 4, 4), nn.Linear(8, 6)

    def features(self, image):
        return torch.relu(self.stem(image)).mean(dim=(2, 3))


class Masked(Stem):
    """An inpainting model's way: the mask is a channel of the input."""

    def __init__(self):
        super().__init__(4)

    def forward(self, image, mask):
        return self.head(self.features(torch.cat([image * (1 - mask), mask], dim=1)))


class MaskFirst(Masked):
    def forward(self, mask, pixels):
        return super().forward(pixels, mask)


class Deployed(Stem):
    """A detector as RT-DETR's repository exports it: boxes scaled by the size of each original image."""

    def forward(self, images, orig_target_sizes):
        features = self.features(images)
        boxes = self.head(features)[:, None, :4].sigmoid() * orig_target_sizes.repeat(1, 2)[:, None]
        return {"labels_logits": self.head(features), "scaled": boxes}


class Resized(Stem):
    def forward(self, pixel_values: torch.Tensor, size: tuple[int, int], antialias: bool = True):
        resized = nn.functional.interpolate(pixel_values, size=size, mode="bilinear", antialias=antialias)
        return self.head(self.features(resized))


class Compared(Stem):
    """CLIP's way: cosines between the image's and all texts' features."""

    def forward(self, image, text_features, temperature: float = 1.0):
        image, text = (nn.functional.normalize(x, dim=-1) for x in (self.features(image), text_features))
        return image @ text.T / temperature


class Stepped(Stem):
    """A diffusion model's way: each image has its step, a whole number."""

    def __init__(self):
        super().__init__()
        self.steps = nn.Embedding(10, 8)

    def forward(self, image, step):
        return self.head(self.features(image) + self.steps(step))


class Undecided(Stem):
    """The softmax is over the numbers of a vector that all images share, or over the images."""

    def forward(self, image, weights):
        return self.head(self.features(image)) * weights.softmax(0)


CASES = {
    "mask": (Masked, {"mask": MASK}, lambda n: {"mask": torch.from_numpy(MASK).expand(n, 1, *SIZE)}),
    "mask with a batch axis": (
        Masked,
        {"mask": MASK[None]},
        lambda n: {"mask": torch.from_numpy(MASK).expand(n, 1, *SIZE)},
    ),
    "mask before the image": (
        MaskFirst,
        {"mask": torch.from_numpy(MASK)},
        lambda n: {"mask": torch.from_numpy(MASK).expand(n, 1, *SIZE)},
    ),
    "sizes of each image": (
        Deployed,
        {"orig_target_sizes": (640, 480)},
        lambda n: {"orig_target_sizes": torch.tensor([[640.0, 480.0]] * n)},
    ),
    "a size as numbers": (Resized, {"size": (32, 40)}, lambda n: {"size": (32, 40)}),
    "a size and a switch": (
        Resized,
        {"size": [8, 8], "antialias": 0},
        lambda n: {"size": (8, 8), "antialias": False},
    ),
    "features of texts": (Compared, {"text_features": TEXTS}, lambda n: {"text_features": torch.from_numpy(TEXTS)}),
    "features and a temperature": (
        Compared,
        {"text_features": TEXTS, "temperature": 0.07},
        lambda n: {"text_features": torch.from_numpy(TEXTS), "temperature": 0.07},
    ),
    "features of as many texts as a trial has images": (
        Compared,
        {"text_features": TEXTS[:5]},
        lambda n: {"text_features": torch.from_numpy(TEXTS[:5])},
    ),
    "a step": (Stepped, {"step": 7}, lambda n: {"step": torch.full((n,), 7)}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_graph_answers_as_the_module_with_the_value(case):
    kind, bind, arguments = CASES[case]
    module = kind().eval()
    read = vd.model(module, bind=bind, preprocess=SPEC, task="tensors")
    for name in bind:
        assert any(note.startswith(f"the input {name} is bound to ") for note in read.reference.notes)
    graph = vd.export(read, progress=False)
    assert [text.partition("=")[0] for text in get_metadata(load_graph(graph.file), "").bound] == list(bind)
    with vd.compile(graph, "onnxruntime-cpu", progress=False).load() as predictor:
        assert [tensor.name for tensor in predictor.runner.inputs] == ["image"]
        for count in (1, 3):
            pixels = np.random.default_rng(count).integers(0, 256, (count, *SIZE, 3), dtype=np.uint8)
            image = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.2
            with torch.no_grad():
                right = module(**{**arguments(count), **image_argument(module, image)})
            right = list(right.values()) if isinstance(right, dict) else [right]
            for answer, expected in zip(predictor.run(pixels).values(), right, strict=True):
                np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-4, atol=1e-4)


def image_argument(module, image):
    name = {"Deployed": "images", "Resized": "pixel_values", "MaskFirst": "pixels"}.get(type(module).__name__, "image")
    return {name: image}


def test_how_the_module_gets_the_value_is_told(tmp_path):
    np.save(tmp_path / "texts.npy", TEXTS.astype(np.float64))
    notes = vd.model(
        Compared(), bind={"text_features": tmp_path / "texts.npy", "temperature": 2}, preprocess=SPEC
    ).reference.notes
    told = "float32 [6, 8] for all images together"
    assert f"the input text_features is bound to texts.npy: {told}" in notes
    assert "the input temperature is bound to 2: float" in notes
    notes = vd.model(Masked(), bind={"mask": MASK}, preprocess=SPEC).reference.notes
    assert any(note.endswith(": float32 [batch, 1, 16, 24]") for note in notes)


def test_the_identity_follows_the_value(tmp_path):
    files = [tmp_path / name / "mask.npy" for name in "ab"]
    for file, mask in zip(files, (MASK, 1 - MASK), strict=True):
        file.parent.mkdir()
        np.save(file, mask)
    found = [vd.model(Masked(), bind={"mask": file}, preprocess=SPEC).reference.digests for file in (*files, files[0])]
    assert found[0] == found[2] and found[0]["mask=mask.npy"] != found[1]["mask=mask.npy"]
    assert found[0]["Masked"] != found[1]["Masked"]
    steps = [vd.model(Stepped(), bind={"step": step}, preprocess=SPEC).reference for step in (1, 2)]
    assert steps[0].identity() != steps[1].identity()


@pytest.mark.parametrize(
    ("kind", "bind", "error", "message", "found"),
    [
        (Masked, {}, CheckpointError, "Masked takes further inputs besides the image", "forward(image, mask)"),
        (Masked, {"maks": 1}, CheckpointError, "has no input 'maks' to bind", "forward(image, mask)"),
        (Masked, {"mask": 1, "image": 1}, CheckpointError, "all inputs of Masked are bound", "forward(image, mask)"),
        (
            Masked,
            {"mask": MASK[:, 1:]},
            CheckpointError,
            "does not run on images of 16x24 with the bound values",
            "mask as ",
        ),
        (Masked, {"mask": 1}, CheckpointError, "does not run on images of 16x24 with the bound values", "mask as int"),
        (
            Stepped,
            {"step": 7.5},
            CheckpointError,
            "does not run on images of 16x24 with the bound values",
            "step as float",
        ),
        (
            Stepped,
            {"step": 12},
            CheckpointError,
            "does not run on images of 16x24 with the bound values",
            "step as int",
        ),
        (
            Undecided,
            {"weights": np.arange(6.0)},
            CheckpointError,
            "is ambiguous: two readings give different outputs",
            "float32 [batch, 6], or ",
        ),
        (Masked, {"mask": "input"}, CheckpointError, "has no type and shape", "mask=input"),
        (Masked, {"mask": "input:float16:2"}, InputError, "invalid type or shape of the input mask", "float16"),
        (Masked, {"mask": "input:float32:2x"}, InputError, "invalid type or shape of the input mask", "2x"),
        (Masked, {"mask": "input:float32:8x8"}, CheckpointError, "Masked does not run on an image of 16x24", "24"),
        (Masked, {"mask": "a lot"}, InputError, "invalid value for the input mask", "a lot"),
        (Masked, {"mask": np.array(["a"])}, CheckpointError, "cannot be passed to a module", "<U1"),
        (Stem, {"mask": 1}, CheckpointError, "has no input 'mask' to bind", ""),
    ],
)
def test_what_does_not_fit_is_refused(kind, bind, error, message, found):
    with pytest.raises(error, match=message) as raised:
        vd.model(kind(), bind=bind, preprocess=SPEC)
    assert found in raised.value.found and raised.value.expected


def test_a_value_that_is_given_twice_is_refused():
    with pytest.raises(CheckpointError, match="the input step is bound twice") as raised:
        from_module(Stepped(), preprocess=SPEC, bind=["step=1", "step=2"])
    assert raised.value.found == "step=1, step=2"


def test_only_a_graph_or_a_module_of_the_users_own_has_further_inputs():
    with pytest.raises(VitdeployError, match="has no further inputs to bind"):
        find_reference_model(Source(model="vit_w32d2h2_patch8_32", bind=("mask=1",)))


def test_a_recipe_names_files_of_its_folder_and_is_written_elsewhere_with_them(tmp_path):
    np.save(tmp_path / "mask.npy", MASK)
    source = {"image_size": [16, 24], "bind": {"mask": "mask.npy", "size": [8, 8], "step": 2}}
    values = {"vitdeploy": 1, "name": "a", "source": source, "data": {"path": "images"}, "targets": ["onnxruntime-cpu"]}
    (tmp_path / "r.yaml").write_text(json.dumps(values), encoding="utf-8")
    recipe = load_recipe(tmp_path / "r.yaml", function="package.module:build")
    assert source_of(recipe).bind == (f"mask={tmp_path / 'mask.npy'}", "size=[8.0, 8.0]", "step=2.0")
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "r.yaml").write_text(recipe_text(recipe, tmp_path / "tuned", "Mine."), encoding="utf-8")
    again = load_recipe(tmp_path / "tuned" / "r.yaml", function="package.module:build").source.bind
    assert Path(again["mask"]).resolve() == tmp_path / "mask.npy" and again["size"] == (8, 8)
