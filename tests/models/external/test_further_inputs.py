"""Arguments of a module's forward that each image brings: a mask, a size, an embedding of a text, a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import vitdeploy as vd
from tests.models.external.test_arguments import SIZE, SPEC, Deployed, Masked, MaskFirst, Stem, Stepped, image_argument
from vitdeploy.errors import ExportError, InputError
from vitdeploy.graph.io.files import get_metadata, load_graph


class Keyword(Stem):
    """Answers in pixels of the original image, whose size is passed by its name."""

    def forward(self, image, *, size):
        return self.head(self.features(image))[:, :2].sigmoid() * size


class Named(Stem):
    """Whether the image shows what a text, which is embedded elsewhere, says."""

    def forward(self, image, text, scale: float = 2.0):
        return self.head(self.features(image) * text) * scale


class Gated(Stem):
    def forward(self, image, step, on):
        return self.head(self.features(image)) * torch.where(on, step.float(), -1.0)[:, None]


class Deaf(Stem):
    def forward(self, image, mask):
        return self.head(self.features(image)) + 0 * mask.mean(dim=(1, 2, 3))[:, None]


CASES = {
    "a mask": (Masked, {"mask": "input:float32:1x16x24"}),
    "a mask before the image": (MaskFirst, {"mask": "input:float32:1x16x24"}),
    "the size of each image": (Deployed, {"orig_target_sizes": "input:float32:2"}),
    "a size by its name alone": (Keyword, {"size": "input:float32:2"}),
    "an embedding, and a constant": (Named, {"text": "input:float32:8", "scale": 3}),
    "a step": (Stepped, {"step": "input:int64"}),
    "two of them": (Gated, {"step": "input:int32", "on": "input:bool"}),
}


def drawn(tensors, seed):
    """Values of one image."""
    random, found = np.random.default_rng(seed), {}
    for tensor in tensors:
        whole = random.integers(0, 2 if tensor.dtype == "bool" else 10, tensor.shape[1:])
        values = random.random(tensor.shape[1:]) if tensor.dtype == "float32" else whole
        found[tensor.name] = np.asarray(values, tensor.dtype)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino-cpu"])
def test_the_engine_answers_as_the_module_for_what_each_image_brings(case, target):
    kind, bind = CASES[case]
    module = kind().eval()
    read = vd.model(module, bind=bind, preprocess=SPEC, task="tensors")
    inputs = [name for name, value in bind.items() if isinstance(value, str)]
    for name in inputs:
        assert any(note.startswith(f"each image brings the input {name}: ") for note in read.reference.notes)
    graph = vd.export(read, progress=False)
    assert [text.partition("=")[0] for text in get_metadata(load_graph(graph.file), "").bound] == [
        name for name in bind if name not in inputs
    ]
    with vd.compile(graph, target, batch=2, progress=False).load() as predictor:
        assert [tensor.name for tensor in predictor.inputs] == inputs
        pixels = np.random.default_rng(1).integers(0, 256, (3, *SIZE, 3), dtype=np.uint8)
        brought = [drawn(predictor.inputs, seed) for seed in range(3)]
        image = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.2
        given = {name: torch.from_numpy(np.stack([each[name] for each in brought])) for name in inputs}
        constants = {name: value for name, value in bind.items() if name not in inputs}
        with torch.no_grad():
            right = module(**given, **constants, **image_argument(module, image))
        right = list(right.values()) if isinstance(right, dict) else [right]
        together = predictor.outputs(list(pixels), brought)
        for answer, expected in zip(together.values(), right, strict=True):
            np.testing.assert_allclose(answer, expected.numpy(), rtol=1e-4, atol=1e-4)
        ours = [predictor.predict_with(each, more) for each, more in zip(pixels, brought, strict=True)]
        others = [
            predictor.predict_with(each, more) for each, more in zip(pixels, brought[1:] + brought[:1], strict=True)
        ]
        assert [each.to_dict() for each in ours] != [each.to_dict() for each in others]
        with pytest.raises(InputError, match="which takes an image, ") as refused:
            predictor.predict(pixels[0])
        with pytest.raises(InputError, match="extra inputs must be given for each image"):
            predictor.outputs(list(pixels), brought[:1])
        assert f"predict_with(image, {{'{inputs[0]}': ...}})" in refused.value.fix


def test_the_graph_itself_says_what_images_bring():
    read = vd.model(Masked(), bind={"mask": "input:float32:1x16x24"}, preprocess=SPEC)
    for pixels in (True, False):
        graph = vd.export(read, preprocess_in_graph=pixels, progress=False)
        again = vd.model(graph.file).reference
        assert [str(each) for each in again.inputs] == ["mask: float32[batch, 1, 16, 24]"]
        assert again.inputs == read.reference.inputs and again.digests != read.reference.digests


def test_an_input_that_changes_nothing_is_refused():
    with pytest.raises(ExportError, match="the outputs do not depend on the per-image input mask") as refused:
        vd.export(vd.model(Deaf(), bind={"mask": "input:float32:1x16x24"}, preprocess=SPEC), progress=False)
    assert "--bind mask=VALUE" in refused.value.fix


def test_models_without_such_inputs_have_none():
    read = vd.model(nn.Sequential(nn.Flatten(), nn.Linear(16 * 24 * 3, 6)), preprocess=SPEC)
    assert read.reference.inputs == ()


class Embedded(Stem):
    """One vector of an image and a text, and what it was computed of."""

    def forward(self, image, text):
        return self.features(image) * text


def test_other_tasks_take_inputs_too():
    module = Embedded().eval()
    read = vd.model(module, bind={"text": "input:float32:8"}, preprocess=SPEC, task="embedding")
    with vd.compile(vd.export(read, progress=False), "onnxruntime-cpu", progress=False).load() as predictor:
        pixels, text = np.full((*SIZE, 3), 90, np.uint8), np.random.default_rng(0).random(8, np.float32)
        found = predictor.predict_with(pixels, {"text": text})
        image = (torch.from_numpy(pixels[None]).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.2
        with torch.no_grad():
            right = module(image, torch.from_numpy(text[None]))[0].numpy()
        np.testing.assert_allclose(found.vector, right / np.linalg.norm(right), rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match="which takes an image, text"):
            predictor.predict(pixels)
