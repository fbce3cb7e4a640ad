"""Zero-shot classifiers: logits against transformers' CLIPModel and SiglipModel, and text that does not fit."""

import math

import numpy as np
import pytest
import torch

from tests.references import reference
from vitdeploy.errors import CheckpointError, MissingFileError
from vitdeploy.models.families import vit
from vitdeploy.models.family import Hints, LoadedModel, Signature
from vitdeploy.models.keys import vit_transformers
from vitdeploy.models.towers import ZERO_SHOT_SCALE as SCALE
from vitdeploy.models.towers import with_text_features
from vitdeploy.spec import PreprocessSpec, TensorSpec

CLASSES, PROJECTION = 9, 24
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TOWERS = {"vision_config": {**VISION, "image_size": 32, "patch_size": 8}, "text_config": {**VISION, "vocab_size": 40}}


def randomised(model):
    """Seeded noise in every parameter, so that nothing is left at 0 or 1."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def clip(scale=SCALE):
    transformers = reference("transformers")
    torch.manual_seed(2)  # for what stays of its own initial weights
    model = randomised(transformers.CLIPModel(transformers.CLIPConfig(**TOWERS, projection_dim=PROJECTION)))
    model.logit_scale.data.fill_(math.log(scale))
    return model


def siglip():
    transformers = reference("transformers")
    torch.manual_seed(2)  # for what stays of its own initial weights
    model = randomised(transformers.SiglipModel(transformers.SiglipConfig(**TOWERS)))
    model.logit_scale.data.fill_(math.log(7.0))
    model.logit_bias.data.fill_(-2.5)
    return model


@torch.no_grad()
def answers(model):
    """Images, the text features of nine made-up class names, and transformers' own logits."""
    torch.manual_seed(4)
    images, tokens = torch.randn(6, 3, 32, 32), torch.randint(3, 39, (CLASSES, 7))
    features = model.get_text_features(input_ids=tokens)
    features = features if isinstance(features, torch.Tensor) else features.pooler_output
    return images, features.numpy(), model(input_ids=tokens, pixel_values=images).logits_per_image


def tower(model):
    """Our own image encoder with that model's weights."""
    found = vit_transformers.recognise(model.state_dict(), Hints(config=model.config.to_dict()))
    module = vit.FAMILY.build(found.config)
    module.load_state_dict(found.state)
    signature = vit.describe(found.config)
    return LoadedModel("tower", "vit", module.eval(), signature, vit.preprocess(found.config), labels=("a", "b"))


@torch.no_grad()
def logits_of(original, features, images, tmp_path):
    path = tmp_path / "text.npy"
    np.save(path, features)
    found = with_text_features(original, path)
    assert found.signature.task == "classification"
    assert found.signature.outputs == (TensorSpec("logits", "float32", ("batch", CLASSES)),)
    assert found.labels == ()
    return found.module(images)


def test_logits_are_clips(tmp_path):
    model = clip()
    images, features, theirs = answers(model)
    found = logits_of(tower(model), features, images, tmp_path)
    assert theirs.argmax(1).unique().numel() > 1
    assert (found - theirs).abs().max() / theirs.abs().max() < 1e-5
    torch.testing.assert_close(found.softmax(1), theirs.softmax(1), rtol=0, atol=1e-4)


def test_another_scale_changes_no_order(tmp_path):
    model = clip(scale=20.0)
    images, features, theirs = answers(model)
    found = logits_of(tower(model), features, images, tmp_path)
    assert (found / SCALE * 20.0 - theirs).abs().max() / theirs.abs().max() < 1e-5
    assert torch.equal(found.argsort(1), theirs.argsort(1))


def test_the_order_of_classes_is_siglips(tmp_path):
    model = siglip()
    images, features, theirs = answers(model)
    found = logits_of(tower(model), features, images, tmp_path)
    assert torch.equal(found.argsort(1), theirs.argsort(1))
    probabilities = (7.0 * found / SCALE - 2.5).sigmoid()
    torch.testing.assert_close(probabilities, theirs.sigmoid(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["float16", "float64"])
@pytest.mark.parametrize("length", [1.0, 1e-3])
def test_the_length_and_type_of_text_features_do_not_matter(tmp_path, kind, length):
    model = clip()
    images, features, theirs = answers(model)
    found = logits_of(tower(model), (length * features).astype(kind), images, tmp_path)
    # Half precision rounds the features by 5e-4 of their length (and by more where they become subnormal).
    assert (found - theirs).abs().max() / theirs.abs().max() < (1e-2 if kind == "float16" else 1e-5)


# --- what does not fit ------------------------------------------------------------------------------------------------


def features_of(width=4, task="features"):
    """A model whose features are its input."""
    outputs = (TensorSpec("features", "float32", ("batch", width)),)
    half = (0.5,) * 3
    spec = PreprocessSpec(8, (8, 8), mean=half, std=half)
    return LoadedModel("model", "vit", torch.nn.Identity(), Signature(task, (8, 8), 3, outputs), spec)


def saved(tmp_path, array):
    path = tmp_path / "text.npy"
    np.save(path, array)
    return path


def test_the_file_must_be_there(tmp_path):
    with pytest.raises(MissingFileError, match="no text features at"):
        with_text_features(features_of(), tmp_path / "absent.npy")


@pytest.mark.parametrize(
    ("task", "shape"), [("sequence", ("batch", 4)), ("detection", ("batch", 10, 4)), ("features", ("batch", 8, 4))]
)
def test_a_model_without_image_features_takes_no_text(tmp_path, task, shape):
    model = features_of(task=task)
    signature = Signature(task, (8, 8), 3, (TensorSpec("logits", "float32", shape),))
    model = LoadedModel("model", "vit", model.module, signature, model.preprocess)
    with pytest.raises(CheckpointError, match="text features need a model with image features") as caught:
        with_text_features(model, saved(tmp_path, np.ones((3, 4), np.float32)))
    assert task in caught.value.found


HEADER = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 4), }".ljust(127) + b"\n"
)


@pytest.mark.parametrize("data", [b"", b"1,2,3", HEADER + b"\0" * 64], ids=["empty", "text", "promises too much"])
def test_another_file_is_refused(tmp_path, data):
    path = tmp_path / "text.npy"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"text\.npy is not a \.npy file"):
        with_text_features(features_of(), path)


def test_an_archive_is_refused(tmp_path):
    np.savez(tmp_path / "text.npz", text=np.ones((3, 4), np.float32))
    with pytest.raises(CheckpointError, match=r"is not a \.npy file") as caught:
        with_text_features(features_of(), tmp_path / "text.npz")
    assert caught.value.found == "an .npz archive"


def test_an_array_that_holds_objects_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a \.npy file"):
        with_text_features(features_of(), saved(tmp_path, np.array([{}, {}])))


@pytest.mark.parametrize(
    "array",
    [
        np.ones((3, 5), np.float32),
        np.ones(4, np.float32),
        np.ones((1, 3, 4), np.float32),
        np.ones((0, 4), np.float32),
        np.ones((3, 4), np.int64),
        np.full((3, 4), np.nan, np.float32),
        np.full((3, 4), np.inf, np.float32),
        np.eye(3, 4, k=1, dtype=np.float32) * [[1], [1], [0]],
    ],
    ids=["width", "vector", "three axes", "no class", "integers", "NaN", "infinity", "a row of zeros"],
)
def test_a_matrix_that_does_not_fit_is_refused(tmp_path, array):
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        with_text_features(features_of(), saved(tmp_path, array))
    assert str(list(array.shape)) in caught.value.found
    assert "[classes, 4]" in caught.value.expected
