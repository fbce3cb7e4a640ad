"""Modules that are not ours: what a user's function may return, what is read from it, and every refusal."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_load_folders import SHAPE, VIT, difference, image, randomised
from tests.references import reference
from vitdeploy.errors import (
    CapabilityError,
    CheckpointError,
    MissingFileError,
    MissingPackageError,
    UnknownModelError,
    UserCodeError,
)
from vitdeploy.models.external import transformers
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source, library

HEAD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, channels=3):
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 4, 4)
        self.head = nn.Linear(8, 6)
    def tokens(self, image):
        return self.stem(image).flatten(2).transpose(1, 2)
    def forward(self, image):
"""
# Its parameters are called model.stem.weight and so on; a reader of checkpoints takes `model.` for a wrapper's prefix.
WRAPPED = "nn.Sequential(__import__('collections').OrderedDict(model=Model()))"
LOGITS = HEAD + "        return self.head(self.tokens(image).mean(1))\n"


@pytest.fixture
def function(tmp_path, monkeypatch, request):
    """Writes the user's module `own_<n>.py`, and gives the original of its function `build`."""
    name = f"own_{abs(hash(request.node.name))}"

    def load(code, build="Model()", image_size=(16, 24), reference=None):
        tail = f"\n\ndef build():\n    return {build}\n" if build else ""
        (tmp_path / f"{name}.py").write_text(code + tail)
        monkeypatch.syspath_prepend(tmp_path)
        return load_model(Source(function=reference or f"{name}:build", image_size=image_size))

    load.module = name
    return load


def test_a_function_that_returns_a_module_gives_a_classifier(function):
    original = function(LOGITS, "Model().half()")
    assert (original.family, original.signature.task, original.classes) == ("function", "classification", 6)
    assert original.signature.image_size == original.preprocess.crop == original.preprocess.resize == (16, 24)
    assert (original.preprocess.mean, original.preprocess.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert all(parameter.dtype == torch.float32 for parameter in original.module.parameters())
    assert not original.module.training
    assert any("returned a Model" in note for note in original.notes)
    assert any("assuming mean = std = 0.5" in note for note in original.notes)
    assert original.module(image((16, 24))).shape == (2, 6)


def test_a_module_that_does_not_say_its_image_size_is_run_at_224(function):
    original = function(LOGITS, image_size=None)
    assert original.signature.image_size == (224, 224)
    assert any("assuming 224x224" in note for note in original.notes)


def test_the_channels_are_those_of_the_first_convolution(function):
    assert function(LOGITS, "Model(1)").signature.channels == 1


def test_random_weights_are_the_same_in_every_process_and_the_users_own_stay(function):
    torch.manual_seed(5)
    first = function(LOGITS).module.state_dict()
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)
    second = function(LOGITS).module.state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_module_of_timm_brings_its_size_and_preprocessing(function):
    reference("timm")
    arguments = ", ".join(f"{key}={value}" for key, value in VIT.items())
    code = f"import timm\ndef build():\n    return timm.create_model('vit_base_patch16_clip_224', {arguments})\n"
    original = function(code, build=None, image_size=None)
    assert original.signature.image_size == original.preprocess.crop == (32, 32)
    assert original.preprocess.mean == (0.48145466, 0.4578275, 0.40821073)
    assert not any("assumed" in note for note in original.notes)


RETURNS = {
    "detector, tuple": ("(self.head(x), x[..., :4].sigmoid())", "detection", ["logits", "boxes"]),
    "detector, DETR's dict": ("{'pred_logits': x, 'pred_boxes': x[..., :4]}", "detection", ["logits", "boxes"]),
    "segmenter": ("(x, x[..., :4], x[..., None])", "panoptic", ["logits", "boxes", "masks"]),
    "dict of logits": ("{'logits': x.mean(1)}", "classification", ["logits"]),
    "one in a tuple": ("(x.mean(1),)", "classification", ["logits"]),
    "tokens": ("x", "features", ["features", "patch_features"]),
    "feature map": ("self.stem(image)[..., ::2, ::2].repeat(1, 8, 1, 1)", "features", ["features", "patch_features"]),
    "features and tokens": ("(x.mean(1), x[..., :7])", "features", ["features", "patch_features"]),
    "pooled and hidden": (
        "{'pooler_output': x.mean(1), 'last_hidden_state': x}",
        "features",
        ["features", "patch_features"],
    ),
}


@pytest.mark.parametrize("kind", RETURNS)
def test_what_a_module_returns_says_its_task(kind, function):
    returned, task, names = RETURNS[kind]
    original = function(HEAD + f"        x = self.tokens(image)\n        return {returned}\n")
    assert original.signature.task == task
    assert [tensor.name for tensor in original.signature.outputs] == names
    found = original.module(image((16, 24)))
    found = (found,) if isinstance(found, torch.Tensor) else found
    assert [tuple(tensor.shape[1:]) for tensor in found] == [tensor.shape[1:] for tensor in original.signature.outputs]
    detector = task in ("detection", "panoptic")
    assert (original.signature.postprocess is not None) == detector
    assert any("scored by sigmoid" in note for note in original.notes) == detector


def test_a_module_that_says_it_has_no_classes_gives_features(function):
    original = function(LOGITS + "    num_classes = 0\n")
    assert [tensor.name for tensor in original.signature.outputs] == ["features"]


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        ("None", "NoneType"),
        ("{'scores': 'many', 'n': 3}", "for 2 images: dict of scores str, n int"),
        ("[None] * 2", "for 2 images: list of NoneType, NoneType"),
        ("image.sum()", "for 2 images: float32 []"),
        ("self.tokens(image).mean(0)", "logits float32 [24, 8]"),
        ("[image, image[0], image, image]", "output_1 float32 [3, 16, 24]"),
        ("torch.fft.fft(image)", "for 2 images: complex64 [2, 3, 16, 24]"),
    ],
)
def test_what_no_task_is_made_of_is_refused(returned, found, function):
    with pytest.raises(CheckpointError, match="match no task of vitdeploy") as caught:
        function(HEAD + f"        return {returned}\n")
    assert found in caught.value.found


def test_a_forward_that_fails_is_answered_with_its_line(function):
    with pytest.raises(CheckpointError, match="does not run on an image of 16x24 with 3 channels") as caught:
        function(HEAD + "        return self.head(self.stem(image))  # forgot to pool\n")
    assert "forgot to pool" in caught.value.found
    assert ".py, line 13" in caught.value.found
    assert "--image-size" in caught.value.fix


def test_a_forward_that_takes_more_than_the_image_is_told_what_it_needs(function):
    with pytest.raises(CheckpointError, match="takes further inputs besides the image") as caught:
        function(LOGITS.replace("forward(self, image)", "forward(self, image, mask)"))
    assert (caught.value.found, caught.value.expected) == ("forward(image, mask)", "a value for mask")
    assert caught.value.fix.startswith("--bind mask=VALUE") and "takes only the image" in caught.value.fix


@pytest.mark.parametrize(
    ("build", "message", "found"),
    [
        ("Model", "did not return a model", "the class Model itself"),
        ("'a string'", "did not return a model", "str"),
        ("1 / 0", "failed", "ZeroDivisionError: division by zero (own_"),
        ("exit(3)", "failed", "SystemExit: 3"),
    ],
)
def test_a_function_that_gives_no_module_is_refused_with_its_line(build, message, found, function):
    with pytest.raises(UserCodeError, match=message) as caught:
        function("class Model: pass", build)
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import no_such_package_of_mine", "ModuleNotFoundError: No module named 'no_such_package_of_mine' (own_"),
        ("def build(:", "SyntaxError"),
        ("raise SystemExit('no')", "SystemExit: no"),
    ],
)
def test_a_module_that_cannot_be_imported_is_refused_with_its_line(code, found, function):
    with pytest.raises(UserCodeError, match="cannot be imported") as caught:
        function(code, build=None)
    assert found in caught.value.found


def test_a_module_that_is_not_there_is_refused(function):
    with pytest.raises(UserCodeError, match="no_such_module cannot be imported") as caught:
        function("", reference="no_such_module:build")
    assert caught.value.found == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_function_that_is_not_there_is_answered_with_those_that_are(function):
    with pytest.raises(UserCodeError, match="no function 'make'") as caught:
        function("", reference=f"{function.module}:make")
    assert (caught.value.found, caught.value.fix) == ("build", "")
    with pytest.raises(UserCodeError, match="no function 'biuld'") as caught:
        function("", reference=f"{function.module}:biuld")
    assert caught.value.fix == f"did you mean {function.module}:build?"


@pytest.mark.parametrize("reference", ["model", "model:", ":build"])
def test_a_reference_without_module_or_function_is_refused(reference, function):
    with pytest.raises(UserCodeError, match=f"'{reference}' does not name a function") as caught:
        function("", reference=reference)
    assert caught.value.fix == "for build() in my_model.py: --model my_model:build"


def test_a_file_instead_of_a_module_is_told_its_name(function):
    with pytest.raises(UserCodeError, match="cannot be imported") as caught:
        function("", reference=f"{function.module}.py:build")
    assert caught.value.fix == f"name it without .py: {function.module}:build"


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("build", ["Model()", WRAPPED, "Model().half()"])
def test_a_users_module_takes_the_weights_of_a_checkpoint(prefix, build, function, tmp_path):
    state = {name: torch.randn_like(t) for name, t in function(LOGITS, build).module.model.state_dict().items()}
    torch.save({"state_dict": {prefix + name: t for name, t in state.items()}, "epoch": 3}, tmp_path / "w.pt")
    original = load_model(
        Source(function=f"{function.module}:build", checkpoint=tmp_path / "w.pt", image_size=(16, 24))
    )
    found = original.module.model.state_dict()
    assert found.keys() == state.keys()
    tolerance = 1e-3 if "half" in build else 0  # the module's own dtype
    assert all(torch.allclose(found[name], state[name], rtol=tolerance, atol=tolerance) for name in state)
    assert "weights from w.pt" in original.notes


def test_a_checkpoint_that_does_not_fit_a_users_module_is_refused(function, tmp_path):
    function(LOGITS)
    save_file({"stem.weight": torch.ones(8, 3, 4, 4), "other": torch.ones(1)}, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w\.safetensors does not fit") as caught:
        load_model(Source(function=f"{function.module}:build", checkpoint=tmp_path / "w.safetensors"))
    assert "3 missing: stem.bias, head.weight, head.bias; 1 unexpected: other" in caught.value.found


SPECTRAL = LOGITS.replace("nn.Linear(8, 6)", "nn.utils.spectral_norm(nn.Linear(8, 6))")
PRUNED = f"""{LOGITS}
def pruned():
    model = Model()
    from torch.nn.utils import prune

    prune.l1_unstructured(model.head, "weight", 0.5)
    return model
"""


@pytest.mark.parametrize("kind", ["spectral norm", "pruned"])
def test_a_module_of_ones_own_may_have_tensors_of_any_kind(kind, function, tmp_path):
    code, build = (SPECTRAL, "Model()") if kind == "spectral norm" else (PRUNED, "pruned()")
    original = function(code, build)
    state = {name: tensor + 1 for name, tensor in original.module.model.state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    source = Source(function=f"{function.module}:build", checkpoint=tmp_path / "w.safetensors", image_size=(16, 24))
    found = load_model(source).module.model.state_dict()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_pruned_weights_that_do_not_fit_ones_own_module_are_named(function, tmp_path):
    function(LOGITS)
    pruned = {"head.weight_orig": torch.ones(6, 8), "head.weight_mask": torch.ones(6, 8), "stem.bias": torch.ones(8)}
    save_file(pruned, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="being pruned") as caught:
        load_model(Source(function=f"{function.module}:build", checkpoint=tmp_path / "w.safetensors"))
    assert caught.value.found == "1 of 3 tensors: head.weight_mask"


# --- libraries ---


def test_a_library_that_breaks_at_its_import_is_no_traceback(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "half_a_library.py").write_text("import no_such_package_of_theirs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CapabilityError, match="x needs the package broken_library, which is installed") as caught:
        library("broken_library", "x")
    assert "torchvision::nms" in caught.value.found
    with pytest.raises(MissingPackageError, match="needs the package no_such_package_of_theirs"):
        library("half_a_library", "x")


def test_arguments_that_timm_does_not_take_are_shown(tmp_path):
    reference("timm")
    config = {"architecture": "swinv2_tiny_window8_256", "model_args": {"no_such_argument": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="timm cannot build swinv2_tiny_window8_256") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert "no_such_argument" in caught.value.found


def test_a_config_does_not_name_another_file_of_weights(tmp_path):
    arguments = {key: value for key, value in VIT.items() if key != "init_values"}
    model = randomised(reference("timm").create_model("vit_base_patch16_rope_224", num_classes=5, **arguments))
    torch.save({"other": torch.ones(1)}, tmp_path / "other.pt")
    config = {"architecture": "vit_base_patch16_rope_224", "num_classes": 5, "pretrained_cfg": {}}
    arguments["checkpoint_path"] = str(tmp_path / "other.pt")
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_args": arguments}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    original = load_model(Source(model=f"hf:{tmp_path}"))
    assert original.family == "timm"
    with torch.no_grad():
        assert difference(original.module(image()), model(image())) < 1e-5


def msn_folder(path):
    library = reference("transformers")
    model = randomised(library.ViTMSNForImageClassification(library.ViTMSNConfig(**SHAPE, num_labels=5)))
    model.save_pretrained(path)
    return model


def test_weights_that_are_missing_are_never_random_numbers(tmp_path):
    msn_folder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state.pop("classifier.weight")
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="do not match the class ViTMSNFor") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert caught.value.found == "1 missing: classifier.weight"


def test_what_was_learned_under_the_name_of_something_computed_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers, "COMPUTED", re.compile(r"classifier\.weight"))
    test_weights_that_are_missing_are_never_random_numbers(tmp_path)


def test_a_class_that_transformers_does_not_have_is_named(tmp_path):
    msn_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ViTMSNForWeather"]}))
    with pytest.raises(UnknownModelError, match="has no class 'ViTMSNForWeather'"):
        load_model(Source(model=f"hf:{tmp_path}"))


def test_a_folder_that_transformers_cannot_load_is_refused_with_its_words(tmp_path):
    msn_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    with pytest.raises(CheckpointError, match="do not match the class ViTMSNFor") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert "37 with a different shape: classifier.weight [5, 32] (model: [5, 64])" in caught.value.found
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_act": "none"}))
    with pytest.raises(CheckpointError, match="transformers cannot load") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert caught.value.found


def test_weights_that_a_class_does_not_expect_are_refused(tmp_path):
    msn_folder(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    more = {f"vit.encoder.layer.{i}.gate.weight": torch.ones(1) for i in range(6)}
    save_file({**state, **more, "loss.scale": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="do not match the class ViTMSNFor") as caught:
        load_model(Source(model=f"hf:{tmp_path}"))
    assert caught.value.found == "6 unexpected: vit.layers.{0-5}.gate.weight"


def test_a_pooling_layer_without_weights_is_left_out(tmp_path):
    library = reference("transformers")
    config = library.YolosConfig(**SHAPE | {"image_size": [32, 32]}, num_detection_tokens=3)
    model = randomised(library.YolosModel(config, add_pooling_layer=False))
    model.save_pretrained(tmp_path)
    original = load_model(Source(model=f"hf:{tmp_path}"))
    assert "pooling layer removed: the checkpoint has no weights for it" in original.notes
    with torch.no_grad():
        assert difference(original.module(image())[0], model(image()).last_hidden_state[:, 0]) < 1e-5


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("form", ["safetensors", "pickled"])
def test_a_checkpoint_beside_a_config_of_transformers_own_is_read_with_it(form, named, tmp_path):
    model = msn_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    if form == "pickled":
        path = tmp_path / "epoch3.pt"
        torch.save({"state_dict": model.state_dict(), "epoch": 3}, path)
        (tmp_path / "model.safetensors").unlink()
    original = load_model(Source(model=f"hf:{tmp_path}" if named else None, checkpoint=path))
    assert original.family == "transformers"
    with torch.no_grad():
        assert difference(original.module(image()), model(image()).logits) < 1e-5


def test_a_folder_without_config_is_refused(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(MissingFileError, match=r"no config\.json in"):
        load_model(Source(model=f"hf:{tmp_path}"))


def test_a_module_of_transformers_is_adapted_from_a_function_too(function):
    library = reference("transformers")
    code = (
        "import transformers\ndef build():\n"
        f"    return transformers.ViTMSNForImageClassification(transformers.ViTMSNConfig(**{SHAPE}, num_labels=5))\n"
    )
    original = function(code, build=None, image_size=None)
    assert library is not None
    assert (original.signature.image_size, original.classes) == ((32, 32), 5)
    with torch.no_grad():
        assert difference(original.module(image()), original.module.model(image()).logits) == 0


def test_a_class_that_transformers_cannot_import_is_no_bug_of_ours(tmp_path, monkeypatch):
    def broken(name):
        raise ModuleNotFoundError(f"Could not import module {name!r}.") from RuntimeError("operator nms is missing")

    monkeypatch.setattr(
        transformers, "library", lambda *_: type("Broken", (), {"__getattr__": lambda _, name: broken(name)})()
    )
    config = {"model_type": "swinv2", "architectures": ["Swinv2ForImageClassification"]}
    with pytest.raises(CapabilityError, match="transformers' Swinv2ForImageClassification needs") as caught:
        transformers.from_transformers(tmp_path, config, None, (64, 64))
    assert caught.value.found == "RuntimeError: operator nms is missing"


def test_transformers_draws_no_bars_of_its_own(tmp_path, capfd):
    library = reference("transformers")
    library.utils.logging.enable_progress_bar()  # which models of other tests may have turned off
    config = library.ViTMSNConfig(**SHAPE)
    library.ViTMSNForImageClassification(config).save_pretrained(tmp_path)
    capfd.readouterr()
    load_model(Source(model=f"hf:{tmp_path}"))
    assert "Loading weights" not in "".join(capfd.readouterr())
    assert library.utils.logging.is_progress_bar_enabled()
