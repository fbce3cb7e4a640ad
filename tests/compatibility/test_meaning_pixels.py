"""docs/results/compatibility/pixels.md: what a model takes as pixels, by what its files say."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import yaml
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import nn

import vitdeploy as vd
from tests.command_line import command_line
from tests.compatibility_page import Page
from tests.references import reference
from vitdeploy.cli.options import as_keys
from vitdeploy.errors import CheckpointError, InputError, TensorError
from vitdeploy.graph.io.files import admitted_metadata
from vitdeploy.models.load import load_model
from vitdeploy.pipeline.job import overrides_of, source_of
from vitdeploy.recipe.load import load_recipe
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.spec import PreprocessSpec
from vitdeploy.stages.reference_model import find_reference_model, from_request, reference_runner, to_request

SIDE, CLASSES = 32, 5
TARGETS = ("onnxruntime-cpu", "openvino-cpu")
RNG = np.random.default_rng(0)
CONV = (RNG.normal(size=(6, 3, 8, 8)) * 0.2).astype(np.float32)
HEAD = RNG.normal(size=(6, CLASSES)).astype(np.float32)
PICTURE = RNG.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
MEAN, STD = np.float32([123.675, 116.28, 103.53]), np.float32([58.395, 57.12, 57.375])
CAFFE = np.float32([103.939, 116.779, 123.68])
N = helper.make_node
TRANSPOSED = N("Transpose", ["w"], ["y"], perm=[0, 3, 1, 2])
THREE = [N("Sub", [f"p{i}", f"m{i}"], [f"s{i}"]) for i in range(3)]
# What a graph does with its input x before its first convolution, which reads y; and the pixels that it means.
GRAPHS = {
    "x / 255": ([N("Div", ["x", "k"], ["y"])], {"k": 255.0}, "pixels 0..255"),
    "(x - mean) / std, ImageNet's times 255": (
        [N("Sub", ["x", "m"], ["z"]), N("Div", ["z", "s"], ["y"])],
        {"m": MEAN.reshape(1, 3, 1, 1), "s": STD.reshape(1, 3, 1, 1)},
        "pixels 0..255",
    ),
    "Keras, NHWC: x / 127.5 - 1": (
        [N("Mul", ["x", "k"], ["z"]), N("Sub", ["z", "o"], ["w"]), TRANSPOSED],
        {"k": 1 / 127.5, "o": 1.0},
        "pixels 0..255",
    ),
    "a normalization layer with means above 1": (
        [N("BatchNormalization", ["x", "one", "zero", "m", "v"], ["y"])],
        {"one": np.ones(3), "zero": np.zeros(3), "m": MEAN, "v": STD**2},
        "pixels 0..255",
    ),
    "channels split, shifted, joined in reverse": (
        [
            N("Clip", ["x", "low", "high"], ["x1"]),
            N("Split", ["x1"], ["p0", "p1", "p2"], axis=1, num_outputs=3),
            *THREE,
            N("Concat", ["s2", "s1", "s0"], ["z"], axis=1),
            N("Div", ["z", "k"], ["y"]),
        ],
        {"low": 0.0, "high": 255.0, "m0": 123.7, "m1": 116.8, "m2": 103.9, "k": 60.0},
        "pixels 0..255",
    ),
    "ImageNet's means in BGR order": (
        [N("Sub", ["x", "m"], ["y"])],
        {"m": CAFFE.reshape(1, 3, 1, 1)},
        "pixels 0..255, channels BGR",
    ),
    "2 x - 1": ([N("Mul", ["x", "k"], ["z"]), N("Sub", ["z", "o"], ["y"])], {"k": 2.0, "o": 1.0}, "mean 0, std 1"),
    "x / 2 + 1 / 2": ([N("Mul", ["x", "k"], ["z"]), N("Add", ["z", "k"], ["y"])], {"k": 0.5}, "mean 0.5, std 0.5"),
    "0.458 x - 0.03 (not recognised)": (
        [N("Mul", ["x", "k"], ["z"]), N("Sub", ["z", "o"], ["y"])],
        {"k": 0.458, "o": 0.03},
        "mean 0, std 1 is assumed",
    ),
    "nothing": ([N("Identity", ["x"], ["y"])], {}, "mean 0, std 1 is assumed"),
}
# All are read; these are exported, compiled and asked, too.
ASKED = ("Keras, NHWC: x / 127.5 - 1", "ImageNet's means in BGR order")
CASES = {
    "a module: x / 255, in place": "pixels 0..255",
    "a module: (x - 0.485) / 0.229": "mean 0, std 1",
    "a module without scaling": "mean 0.5, std 0.5 is assumed",
    "a preprocessing that contradicts the graph": "the given preprocessing, with a warning",
    "MobileViT, `do_flip_channel_order`": "mean 0, std 1, channels BGR",
    'an OpenCV array, `channels="bgr"`': "the answer of the RGB array",
    "an unknown processor, with `preprocess` in the recipe": "the recipe's preprocessing",
    "timm's crop mode border, with `preprocess` in the recipe": "the recipe's preprocessing",
    "`--model`, with `preprocess.crop` in the recipe": "the recipe's size",
    "`--model` without a convolution, with one mean in the recipe": "grey images",
    "a module that returns class maps": "the whole image",
    "a module that returns boxes": "the whole image",
}
PAGE = Page(
    "pixels",
    """# Pixels

The pixel values that a model gets. Files and options decide; without them, vitdeploy reads the first operators of the
graph or module. An assumption is a note. `tests/compatibility/test_meaning_pixels.py` writes this page.
""",
    ("first operators or given files", "the model gets"),
    (*GRAPHS, *CASES),
)


@pytest.fixture
def row(request):
    """Compare the page's row with what was found."""
    write = request.config.getoption("--write-compatibility")
    return lambda name, found: PAGE.check((name, found), write=write)


def write_graph(path, nodes, constants):
    last = TRANSPOSED in nodes
    image = helper.make_tensor_value_info(
        "x", TensorProto.FLOAT, ["b", SIDE, SIDE, 3] if last else ["b", 3, SIDE, SIDE]
    )
    rest = [N("Conv", ["y", "W"], ["c"], strides=[8, 8]), N("Relu", ["c"], ["r"])]
    rest += [N("GlobalAveragePool", ["r"], ["p"]), N("Flatten", ["p"], ["f"]), N("MatMul", ["f", "H"], ["logits"])]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", CLASSES])
    arrays = {**constants, "W": CONV, "H": HEAD}
    tensors = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph([*nodes, *rest], "graph", [image], [logits], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path, last


def shares(logits):
    exponents = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return exponents / exponents.sum()


def assert_answers(graph, picture, logits, target=TARGETS):
    """Engines of both runtimes give the shares that the model itself gives for the picture."""
    for each in target:
        with vd.load(vd.compile(graph, each, progress=False).folder) as predictor:
            found = predictor.predict(picture, top=CLASSES)
            for channels, array in (("rgb", picture), ("bgr", picture[..., ::-1])):
                assert predictor.predict(array, top=CLASSES, channels=channels).top == found.top
        by_class = dict(zip((part.index for part in found.top), (part.score for part in found.top), strict=True))
        np.testing.assert_allclose([by_class[i] for i in range(CLASSES)], shares(logits), atol=1e-4)


def told(spec, notes):
    assumed = any(("assumed" in note or "assuming" in note) and "the rest" not in note for note in notes)
    return f"{spec.normalisation}{' is assumed' if assumed else ''}"


# --- a model that scales its own pixels -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_gets_the_pixels_that_its_first_operators_scale(name, tmp_path, row):
    nodes, constants, expected = GRAPHS[name]
    path, last = write_graph(tmp_path / "model.onnx", nodes, constants)
    model = vd.model(path)
    assert told(model.preprocess, model.reference.notes) == expected
    row(name, expected)
    if name not in ASKED:
        return
    # What it answers itself for those pixels.
    pixels = PICTURE[..., ::-1] if "BGR" in expected else PICTURE
    image = pixels if last else pixels.transpose(2, 0, 1)
    session = onnxruntime.InferenceSession(path)
    [logits] = session.run(None, {"x": np.ascontiguousarray(image[None], np.float32)})[0]
    graph = vd.export(model, progress=False)
    assert_answers(graph, PICTURE, logits)
    assert any(
        "first operators" in note for note in json.loads((graph.folder / "export.json").read_text())["model"]["notes"]
    )


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.conv, self.head = scale, nn.Conv2d(3, 6, 8, 8), nn.Linear(6, CLASSES)

    def forward(self, image):
        return self.head(self.conv(self.scale(image)).relu().mean((2, 3)))


def in_place(image):
    image /= 255
    return image


def imagenet(image):
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) / 255 for values in (MEAN, STD))
    return (image - mean) / std


@pytest.mark.parametrize(
    ("name", "scale"), zip(CASES, (in_place, imagenet, nn.Identity()), strict=False), ids=("255", "imagenet", "none")
)
def test_a_module_gets_the_pixels_that_it_scales(name, scale, row):
    module = Scaled(scale).eval()
    model = vd.model(module, image_size=SIDE)
    assert told(model.preprocess, model.reference.notes) == CASES[name]
    row(name, CASES[name])
    if scale is in_place:
        with torch.no_grad():
            logits = module(torch.from_numpy(PICTURE.transpose(2, 0, 1)[None].astype(np.float32)))[0]
        assert_answers(vd.export(model, progress=False), PICTURE, logits.numpy())


def test_what_is_given_counts_and_a_contradiction_is_told(tmp_path, row):
    nodes, constants, _ = GRAPHS["x / 255"]
    path, _ = write_graph(tmp_path / "model.onnx", nodes, constants)
    unit = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.0,) * 3, (1.0,) * 3)
    model = vd.model(path, preprocess=unit)
    assert model.preprocess == unit and "results are wrong unless" in model.reference.notes[-1]
    raw = PreprocessSpec((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.0,) * 3, (0.00392157,) * 3)
    assert "first operators" not in str(vd.model(path, preprocess=raw).reference.notes)
    twice = vd.model(Scaled(imagenet), preprocess=PreprocessSpec(SIDE, (SIDE, SIDE)))
    assert "the preprocessing gives it -1..1" in twice.reference.notes[-1]
    row("a preprocessing that contradicts the graph", "the given preprocessing, with a warning")


# --- the order of channels --------------------------------------------------------------------------------------------


def test_mobilevit_gets_bgr_as_its_processor_gives_it(tmp_path, row):
    transformers = reference("transformers")
    from transformers.models.mobilevit.image_processing_pil_mobilevit import MobileViTImageProcessorPil

    torch.manual_seed(0)
    sizes = {"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32], "image_size": 64}
    config = transformers.MobileViTConfig(**sizes, num_attention_heads=2, num_labels=CLASSES)
    model = transformers.MobileViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    processor = MobileViTImageProcessorPil(size={"shortest_edge": 72}, crop_size={"height": 64, "width": 64})
    settings = {**processor.to_dict(), "image_processor_type": "MobileViTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    original = vd.model(f"hf:{tmp_path}")
    row("MobileViT, `do_flip_channel_order`", original.preprocess.normalisation)
    colours = np.linspace([250, 40, 0], [30, 200, 10], 90).astype(np.uint8)
    picture = np.tile(colours[None], (80, 1, 1))
    inputs = processor(images=Image.fromarray(picture), return_tensors="pt")
    prepared = normalise(load_pixels(picture, original.preprocess)[None], original.preprocess)
    np.testing.assert_allclose(prepared, inputs["pixel_values"], atol=1e-6)
    with torch.no_grad(), reference_runner(original.source) as runner:
        np.testing.assert_allclose(runner.infer({"image": prepared})["logits"], model(**inputs).logits, atol=1e-5)
    settings["do_flip_channel_order"] = False
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert vd.model(f"hf:{tmp_path}").preprocess.channel_order == "rgb"


def test_the_order_is_that_of_an_array_alone(small_bundle, row):
    with vd.load(small_bundle) as predictor:
        grey, colour = PICTURE[..., :1], PICTURE
        assert predictor.predict(grey, channels="bgr") == predictor.predict(grey)
        assert predictor.predict(colour[..., ::-1], channels="bgr") == predictor.predict(colour)
        [streamed] = predictor.stream([colour[..., ::-1]], channels="bgr")
        assert [streamed] == predictor.predict_batch([colour[..., ::-1]], channels="bgr") == [predictor.predict(colour)]
        with pytest.raises(TensorError, match="applies only to arrays") as caught:
            predictor.predict(Image.fromarray(colour), channels="bgr")
        assert "omit channels" in caught.value.fix
        with pytest.raises(InputError, match='must be "rgb" or "bgr"'):
            predictor.predict(colour, channels="BGR")
    row('an OpenCV array, `channels="bgr"`', "the answer of the RGB array")


# --- a fix that is typed as it is printed -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number in range(12):
        Image.fromarray(RNG.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / f"{number}.png")
    return folder


def recipe(path: Path, images: Path, source: dict[str, object], preprocess: dict[str, object] | None) -> None:
    data = {"path": str(images), "labels": "none", "calibration": {"images": 4}, "evaluation": {"images": 8}}
    sections = {"vitdeploy": 1, "name": "mine", "source": source, "data": data, "targets": ["onnxruntime-cpu"]}
    sections |= {"precision": "fp32", "budget": {"min_agreement": 1}}
    given = {"preprocess": preprocess} if preprocess is not None else {}
    path.write_text(json.dumps({**sections, **given}), encoding="utf-8")


def plain(side: int, channels: int = 3, **others: object) -> dict[str, object]:
    return {"resize": [side, side], "crop": side, "mean": [0.5] * channels, "std": [0.25] * channels, **others}


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_preprocess_of_a_recipe_replaces_what_files_say(library, images, tmp_path, row):
    """The message's fix, as it is printed: what is read, exported and measured is prepared by it."""
    installed = reference(library)
    torch.manual_seed(0)
    if library == "transformers":
        name = "an unknown processor, with `preprocess` in the recipe"
        sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": SIDE, "num_labels": CLASSES}
        model = installed.ConvNextForImageClassification(installed.ConvNextConfig(**sizes))
        model.save_pretrained(tmp_path / "model")
        settings = {"image_processor_type": "OwnImageProcessor"}
        (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    else:
        name = "timm's crop mode border, with `preprocess` in the recipe"
        model = installed.create_model("resnet10t", num_classes=CLASSES)
        (tmp_path / "model").mkdir()
        reference("safetensors.torch").save_file(model.state_dict(), tmp_path / "model" / "model.safetensors")
        config = {"architecture": "resnet10t", "num_classes": CLASSES, "pretrained_cfg": {"crop_mode": "border"}}
        (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store") as run:
        refused = run("export", "hf:model", "-o", "out")
        assert refused.returncode == 2 and "set preprocess: in a recipe" in refused.stderr
        recipe(tmp_path / "mine.yaml", images, {"model": "hf:model"}, plain(SIDE, channel_order="bgr"))
        loaded = load_recipe(Path("mine.yaml"))
        original = find_reference_model(source_of(loaded), overrides_of(loaded))
        if library == "transformers":
            assert run("export", "mine.yaml", "-o", "out").returncode == 0
            assert admitted_metadata(tmp_path / "out" / "model.onnx").preprocess == original.preprocess
        measured = load_model(from_request(to_request(original.source)))
    preprocess = original.preprocess
    assert measured.preprocess == preprocess
    assert (preprocess.crop, preprocess.std, preprocess.channel_order) == ((SIDE, SIDE), (0.25,) * 3, "bgr")
    row(name, "the recipe's preprocessing")


MODULES = """
import torch
import yaml
from torch import nn

class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.proj, self.head, self.positions = nn.Conv2d(3, 8, 7, 7), nn.Linear(8, 5), nn.Parameter(torch.randn(16, 8))

    def forward(self, image):
        tokens = self.proj(image).flatten(2).transpose(1, 2)
        return self.head((tokens + self.positions).relu().mean(1))

def grey():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 5))
"""


def test_size_and_channels_of_a_recipe_are_those_of_a_module_of_ones_own(images, tmp_path, row, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "pixel_models.py").write_text(MODULES, encoding="utf-8")
    with command_line(tmp_path, tmp_path / "store") as run:
        recipe(tmp_path / "crop.yaml", images, {}, plain(28))
        crop = run("export", "crop.yaml", "--model", "pixel_models:Patches", "-o", "crop", "--json").document
        recipe(tmp_path / "grey.yaml", images, {}, plain(28, 1))
        grey = run("export", "grey.yaml", "--model", "pixel_models:grey", "-o", "grey", "--json").document
        assert (crop["model"]["image_size"], grey["model"]["image_size"], grey["model"]["channels"]) == (
            [28] * 2,
            [28] * 2,
            1,
        )
        # The size is wrong: `run` names the key of the recipe that is right, and takes it so.
        recipe(tmp_path / "wrong.yaml", images, {}, plain(35))
        refused = run("run", "wrong.yaml", "--model", "pixel_models:Patches", "-o", "out")
        assert refused.returncode == 2 and "--image-size" not in refused.stderr
        assert "--set 'source.image_size=[28, 28]'" in refused.stderr
        fixed = ("--set", "source.image_size=[28, 28]", "--dry-run")
        assert run("run", "wrong.yaml", "--model", "pixel_models:Patches", *fixed).returncode == 0
        # The number of channels is wrong: the fix names the one that works.
        recipe(tmp_path / "colour.yaml", images, {"image_size": 28}, None)
        refused = run("run", "colour.yaml", "--model", "pixel_models:grey", "-o", "grey-out")
        assert refused.returncode == 2
        told = re.search(r"preprocess: (\{.*?\}) in a recipe", refused.stderr)[1]
        assert yaml.safe_load(told) == {"resize": 28, "crop": [28, 28], "mean": [0.5], "std": [0.5]}
    row("`--model`, with `preprocess.crop` in the recipe", "the recipe's size")
    row("`--model` without a convolution, with one mean in the recipe", "grey images")


@pytest.mark.parametrize(
    ("fix", "keys"),
    [
        (
            "--image-size 28x28 or 35x42: it runs",
            "--set 'source.image_size=[28, 28]' or --set 'source.image_size=[35, 42]': it runs",
        ),
        ("--image-size HEIGHTxWIDTH, --heads N", "--set 'source.image_size=[HEIGHT, WIDTH]', --set source.heads=N"),
        ("--labels FILE, or --labels none", "--set source.labels=FILE, or --set data.labels=none"),
        ("leave --image-size out", "leave source.image_size out"),
        ("choose another --image-size", "choose another source.image_size"),
    ],
)
def test_a_command_of_a_recipe_names_its_keys(fix, keys):
    assert (as_keys(fix, "run"), as_keys(fix, "export")) == (keys, fix)


def test_a_preprocessing_of_another_size_is_refused_where_sizes_are_said_twice():
    with pytest.raises(CheckpointError, match="does not fit"):
        vd.model(Scaled(nn.Identity()), preprocess=PreprocessSpec(SIDE, (SIDE, SIDE)), image_size=64)


# --- all of the image -------------------------------------------------------------------------------------------------


class Bright(nn.Module):
    """Maps of two classes, dark and bright; perfect for pictures that are one of these everywhere."""

    def forward(self, image):
        grey = image.mean(1, keepdim=True)
        return torch.cat([-grey, grey], 1) * 10


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 8, 8)

    def forward(self, image):
        rows = self.conv(image).flatten(2).transpose(1, 2)
        return {"pred_logits": rows[..., :3], "pred_boxes": rows.sigmoid()}


def test_a_module_whose_answers_lie_in_the_image_sees_all_of_it(row):
    wide = np.zeros((40, 100, 3), np.uint8)
    wide[:, :25] = 255  # of which nothing is left where the middle is cut out
    model = vd.model(Bright(), image_size=SIDE, task="segmentation")
    graph = vd.export(model, progress=False)
    with vd.load(vd.compile(graph, "onnxruntime-cpu", progress=False).folder) as predictor:
        found = predictor.predict(wide).map
    assert found.min() == 0 and (found == (wide[..., 0] > 0)).mean() > 0.98
    boxes = vd.model(Boxes(), image_size=SIDE)
    whole = {model.preprocess.resize, boxes.preprocess.resize}
    assert (boxes.task, whole) == ("detection", {(SIDE, SIDE)})
    assert vd.model(Scaled(nn.Identity()), image_size=SIDE).preprocess.resize == SIDE  # as classifiers are trained
    told = vd.model(Bright(), task="segmentation", preprocess=PreprocessSpec(SIDE, (SIDE, SIDE)))
    assert told.preprocess.resize == SIDE
    row("a module that returns class maps", "the whole image")
    row("a module that returns boxes", "the whole image")
