"""Foreground: mattes as the reference code enlarges them, metrics against other implementations, labels, outputs."""

from __future__ import annotations

import io

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage

import vitdeploy as vd
from tests.graph.small_graphs import Builder
from vitdeploy.errors import CheckpointError, DataError, GraphError
from vitdeploy.graph.io.files import import_graph
from vitdeploy.models.external.module import from_module
from vitdeploy.runtime.preprocess import load_pixels, normalise
from vitdeploy.runtime.tasks.foreground import (
    FOREGROUND,
    Foreground,
    ForegroundSpec,
    matte_of,
    region_iou,
)
from vitdeploy.runtime.tasks.task import OutputReading
from vitdeploy.spec import PreprocessSpec
from vitdeploy.tasks.adapter import Setting
from vitdeploy.tasks.foreground import (
    SAME_MASK,
    ForegroundAdapter,
    boundary_f,
    foreground_comparison,
    foreground_records,
    matte_error,
    read_mattes,
)

sklearn_metrics = pytest.importorskip("sklearn.metrics")

SPEC = PreprocessSpec((32, 32), (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3)
WIDE = PreprocessSpec((32, 32), (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3, fit="stretch")


def blob(seed, shape=(40, 56)):
    """A smooth matte, float32, and its mask above a half."""
    noise = np.random.default_rng(seed).normal(size=shape)
    smooth = ndimage.gaussian_filter(noise, 5)
    matte = (1 / (1 + np.exp(-40 * smooth))).astype(np.float32)
    return matte, matte > 0.5


# --- the answer on a device -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enlarge", ["alpha", "logits"])
@pytest.mark.parametrize("size", [(56, 40), (20, 90)])
def test_a_matte_is_enlarged_as_the_reference_code_does(enlarge, size):
    """BiRefNet: interpolate(sigmoid(x)); U-Nets: sigmoid(interpolate(x)); without aligned corners."""
    logits = np.random.default_rng(0).normal(0, 4, (1, 16, 16)).astype(np.float32)
    found = matte_of({"foreground": logits}, size, WIDE, ForegroundSpec(enlarge=enlarge))
    options = {"size": size[::-1], "mode": "bilinear", "align_corners": False}
    tensor = torch.from_numpy(logits)[None]
    expected = (
        F.interpolate(tensor.sigmoid(), **options) if enlarge == "alpha" else F.interpolate(tensor, **options).sigmoid()
    )
    np.testing.assert_allclose(found, expected[0, 0].numpy(), atol=1e-5)


def test_what_the_input_does_not_show_is_ground_in_all_pictures():
    """A middle crop of a wide image: not a number at both ends, 0 in the PNG, in no mask."""
    spec = PreprocessSpec(32, (32, 32), "bilinear", (0.5,) * 3, (0.5,) * 3)
    found = Foreground(
        matte_of({"foreground": np.full((32, 32), 9.0, np.float32)}, (64, 32), spec, ForegroundSpec()), 0.5
    )
    assert np.isnan(found.matte[:, :15]).all() and np.isfinite(found.matte[:, 16:48]).all()
    assert found.box == (16, 0, 48, 32) and found.share == 0.5
    levels = np.asarray(Image.open(io.BytesIO(found.png())))
    assert levels.dtype == np.uint8 and set(np.unique(levels)) == {0, 255}
    assert found.to_dict()["box"] == (16, 0, 48, 32)


def test_a_given_matte_is_clipped_and_kept():
    plane = np.array([[-0.02, 0.25], [0.75, 1.03]], np.float32)
    found = matte_of({"foreground": plane}, (2, 2), WIDE, ForegroundSpec("given"))
    np.testing.assert_array_equal(found, [[0, 0.25], [0.75, 1]])
    assert str(Foreground(found, 0.5)) == "foreground 50.0 % of the image, in 0, 1 to 2, 2"
    assert Foreground(found * 0, 0.5).box is None


def test_drawing_cuts_the_foreground_out():
    matte, _ = blob(1)
    image = Image.fromarray(np.random.default_rng(2).integers(0, 256, (*matte.shape, 3), np.uint8))
    files = FOREGROUND.draw(image, Foreground(matte, 0.5))
    cut, grey = (Image.open(io.BytesIO(files[end])) for end in (".png", ".matte.png"))
    assert (cut.mode, grey.mode) == ("RGBA", "L")
    assert np.array_equal(np.asarray(cut)[..., :3], np.asarray(image))
    assert np.array_equal(np.asarray(cut)[..., 3], np.asarray(grey))
    np.testing.assert_allclose(np.asarray(grey) / 255, matte, atol=0.5 / 255 + 1e-6)


def test_masks_of_one_region_do_not_make_models_the_same():
    """Foreground nearly everywhere: an IoU of 0.9 of the foreground alone says nothing, the ground tells."""
    reading = OutputReading((32, 32), WIDE, ForegroundSpec("given"))
    same = lambda a, b: FOREGROUND.same({"foreground": a}, {"foreground": b}, reading)  # noqa: E731
    ours, theirs = np.ones((2, 32, 32), np.float32)
    ours[:5, :5], theirs[-5:, -5:] = 0, 0
    assert region_iou(ours > 0.5, theirs > 0.5) == 0 and not same(ours, theirs) and same(ours, ours)
    dim = np.full((32, 32), 0.1, np.float32)
    assert region_iou(dim > 0.5, dim > 0.5) is None and same(dim, dim + 0.01) and not same(dim, dim + 0.2)


def test_a_matte_that_is_given_has_no_logits_to_enlarge():
    with pytest.raises(ValueError, match="needs alpha: sigmoid"):
        ForegroundSpec("given", "logits")


# --- metrics ----------------------------------------------------------------------------------------------------------


def davis_boundary_f(ours, theirs, reach):
    """By the definition: boundaries dilated by a disk; written apart from the code under test."""
    edges = []
    for mask in (ours, theirs):
        padded = np.pad(mask, ((0, 1), (0, 1)), mode="edge")
        edges.append((mask != padded[:-1, 1:]) | (mask != padded[1:, :-1]) | (mask != padded[1:, 1:]))
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    disk = rows**2 + columns**2 <= reach**2
    wide = [ndimage.binary_dilation(each, disk) for each in edges]
    precision, recall = (float((a & b).sum() / a.sum()) for a, b in zip(edges, wide[::-1], strict=True))
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.parametrize("seed", range(6))
def test_errors_are_those_of_other_implementations(seed):
    shape = (40, 56) if seed % 2 else (300, 260)
    (matte, mask), (truth, labels) = blob(seed, shape), blob(seed + 100 * (seed > 2), shape)
    truth = np.clip(truth + np.random.default_rng(seed).normal(0, 0.1, shape), 0, 1).astype(np.float32)
    labels = truth > 0.5
    found = matte_error(matte, truth, 0.5)
    assert found.iou == pytest.approx(sklearn_metrics.jaccard_score(labels.ravel(), mask.ravel()))
    assert found.mae == pytest.approx(sklearn_metrics.mean_absolute_error(truth.ravel(), matte.ravel()), abs=1e-6)
    reach = int(np.ceil(0.008 * np.hypot(*shape)))
    assert found.boundary_f == pytest.approx(davis_boundary_f(mask, labels, reach))


def test_images_without_foreground():
    nothing, some = np.zeros((20, 20), np.float32), blob(0, (20, 20))[0]
    assert matte_error(nothing, nothing, 0.5) == (1.0, 0.0, 1.0)
    assert matte_error(some, nothing, 0.5)[::2] == matte_error(nothing, some, 0.5)[::2] == (0.0, 0.0)
    unseen = np.full((20, 20), np.nan, np.float32)
    assert matte_error(unseen, nothing, 0.5) == (1.0, 0.0, 1.0)
    assert boundary_f(np.ones((9, 9), bool), np.ones((9, 9), bool)) == 1.0


def test_the_interval_of_a_drop_is_paired_and_no_wider_for_equal_errors():
    masks = [blob(seed)[1] for seed in range(40)]
    errors = [matte_error(*(blob(seed + apart)[0] for apart in (0, 500)), 0.5) for seed in range(40)]
    same = foreground_comparison(foreground_records(masks, masks, [(each, each) for each in errors]), max_difference=0)
    assert (same.drop, same.mae_ci95, same.boundary_f_drop_ci95) == (0, (0, 0), (0, 0))
    worse = [(each._replace(iou=each.iou / 2, mae=each.mae + 0.1), each) for each in errors]
    found = foreground_comparison(foreground_records(masks, masks, worse), max_difference=0)
    assert found.value == pytest.approx(found.reference_value / 2) and found.drop_ci95[0] > 0
    assert found.mae_ci95 == pytest.approx((0.1, 0.1)) and found.reference_mae == pytest.approx(found.mae - 0.1)


def test_agreement_counts_masks_that_prove_something():
    """Images that are all ground on both sides are no evidence; where one side is not, the masks differ."""
    empty, (_, some), (_, other) = np.zeros((40, 56), bool), blob(3), blob(4)
    find = lambda ours, theirs: foreground_comparison(foreground_records(ours, theirs, None), max_difference=0)  # noqa: E731
    found = find([empty, some, some, empty], [empty, some, other, some])
    assert (found.masks, found.agreement) == (3, pytest.approx(100 / 3))
    nothing = find([empty] * 9, [empty] * 9)
    assert (nothing.masks, nothing.agreement, nothing.agreement_ci95) == (0, 100.0, (0.0, 100.0))
    full = np.ones((40, 56), bool)
    assert find([full] * 9, [full] * 9).masks == 0
    shifted = np.roll(some, 1, axis=1)
    assert (find([shifted], [some]).agreement == 100) == (region_iou(shifted, some) >= SAME_MASK)


# --- labels -----------------------------------------------------------------------------------------------------------


def labelled(tmp_path, **files):
    """A set of labels of 6x4 pixels, each an image of Pillow or an array."""
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for name, label in files.items():
        Image.new("RGB", (6, 4)).save(tmp_path / "images" / f"{name}.jpg")
        (label if isinstance(label, Image.Image) else Image.fromarray(label)).save(tmp_path / "labels" / f"{name}.png")
    return read_mattes(tmp_path / "images", tmp_path / "labels")


def grey(*values):
    return np.resize(np.array(values, np.uint8), (4, 6))


@pytest.mark.parametrize("white", [1, 255])
def test_masks_of_either_white_are_the_same(white, tmp_path):
    found = labelled(tmp_path, a=grey(0, white), b=grey(0))
    assert [np.unique(each.load()).tolist() for each in found.annotations.values()] == [[0, 1], [0]]
    assert not found.warnings


def test_mattes_palettes_bits_and_alpha_channels(tmp_path):
    palette = Image.fromarray(grey(0, 255)).convert("P")
    palette.putdata(grey(0, 255).ravel().tolist())
    alpha = Image.merge("RGBA", [Image.fromarray(grey(9))] * 3 + [Image.fromarray(grey(*range(0, 240, 20), 255))])
    found = labelled(
        tmp_path, a=grey(*range(0, 250, 25)), b=palette, c=Image.fromarray(grey(0, 255)).convert("1"), d=alpha
    )
    loaded = [each.load() for each in found.annotations.values()]
    np.testing.assert_array_equal(loaded[0], grey(*range(0, 250, 25)) / np.float32(255))
    for each in loaded[1:3]:
        np.testing.assert_array_equal(each, grey(0, 1))
    np.testing.assert_array_equal(loaded[3], grey(*range(0, 240, 20), 255) / np.float32(255))


@pytest.mark.parametrize(
    ("files", "found", "fix"),
    [
        ({"a": np.resize(np.array([0, 65535], np.uint16), (4, 6))}, "16 or more bits", "as uint8"),
        ({"a": Image.new("RGB", (6, 4))}, "mode RGB", "convert('L')"),
        ({"a": grey(0, 1), "b": grey(0, 255)}, "a.png with only 0 and 1, others up to 255", "0 to 255"),
        ({"a": grey(0, 1, 2)}, "values up to 2", "0 to 255"),
        ({"a": Image.new("RGBA", (6, 4), (1, 2, 3, 255))}, "with alpha 255 everywhere", "one 8-bit channel"),
        ({"a": np.zeros((5, 6), np.uint8)}, "6x5", ""),
    ],
)
def test_labels_of_no_certain_scale_are_refused(files, found, fix, tmp_path):
    with pytest.raises(DataError) as refused:
        labelled(tmp_path, **files)
    assert found in str(refused.value.found) and fix in str(refused.value.fix or "")


def test_few_values_between_black_and_white_are_doubted(tmp_path):
    """A map of classes with 255 for none, or a trimap, is no matte."""
    assert "15 of 255 parts" in labelled(tmp_path, a=grey(0, 15, 255)).warnings[0]


# --- which outputs are of the task ------------------------------------------------------------------------------------


def exported(path, *names, sigmoid=False, resize=False):
    """A graph whose outputs are maps of a channel, of these names."""
    b = Builder(0)
    outputs = []
    for name in names:
        weight, sizes = b.constant(b.random(1, 3, 4, 4), f"{name}.w"), np.array([1, 1, 2, 2], np.float32)
        value = b.op("Conv", "image", weight, kernel_shape=[4, 4], strides=[4, 4])
        value = b.op("Sigmoid", value) if sigmoid else value
        outputs.append(b.op("Resize", value, "", b.constant(sizes, f"{name}.s"), mode="linear") if resize else value)
    model = b.model({"image": ["batch", 3, 32, 32]}, *outputs)
    for value, name in zip(model.graph.outputs, names, strict=True):
        value.name = name
    ir.save(model, path)
    return path


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_graph_that_names_its_matte_is_recognised(sigmoid, resize, tmp_path):
    found = import_graph(exported(tmp_path / "m.onnx", "alpha", sigmoid=sigmoid, resize=resize))
    assert found.task == "foreground" and [each.name for each in found.model.graph.outputs] == ["foreground"]
    assert found.postprocess == ForegroundSpec("given" if sigmoid else "sigmoid")
    assert any("is assumed to be" in note and "alpha:" in note for note in found.notes)


def test_a_graph_that_does_not_is_asked_about(tmp_path):
    file = exported(tmp_path / "m.onnx", "output")
    found = import_graph(file)
    assert found.task == "tensors" and any("foreground" in note for note in found.notes)
    asked = import_graph(file, task="foreground")
    assert (asked.task, asked.postprocess) == ("foreground", ForegroundSpec())


@pytest.mark.parametrize("names", [("d0", "d1"), ("alpha", "matte")])
def test_which_of_several_masks_is_meant_is_never_guessed(names, tmp_path):
    with pytest.raises(GraphError) as refused:
        import_graph(exported(tmp_path / "m.onnx", *names), task="foreground")
    assert refused.value.message.endswith("cannot be used for the task foreground")


class Maps(torch.nn.Module):
    """Maps of one channel of these sides, as segmentation code returns them."""

    image_size = 32

    def __init__(self, *sides, end=torch.nn.Identity(), wrap=list, axes=4):  # noqa: B008
        super().__init__()
        self.sides, self.end, self.wrap, self.axes = sides, end, wrap, axes
        self.head = torch.nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, image):
        maps = [self.end(F.adaptive_avg_pool2d(self.head(image), side)) for side in self.sides]
        maps = [each if self.axes == 4 else each[:, 0] for each in maps]
        return self.wrap(maps)


@pytest.mark.parametrize("axes", [3, 4])
def test_of_side_outputs_the_largest_map_is_the_answer(axes):
    found = from_module(Maps(4, 8, 32, axes=axes), task="foreground", preprocess=SPEC)
    [output] = found.signature.outputs
    assert (output.name, output.shape[-2:]) == ("foreground", (32, 32))
    assert any("left out" in note for note in found.signature.notes)


def test_side_outputs_of_one_size_are_refused():
    with pytest.raises(CheckpointError) as refused:
        from_module(Maps(32, 32, wrap=tuple), task="foreground", preprocess=SPEC)
    assert "wrap it in a module" in refused.value.fix


@pytest.mark.parametrize("end", [torch.nn.Identity(), torch.nn.Sigmoid()])
def test_a_module_s_numbers_say_whether_they_are_a_matte(end):
    found = from_module(Maps(32, end=end, wrap=lambda maps: maps[0]), task="foreground", preprocess=SPEC)
    assert found.signature.postprocess.alpha == ("given" if isinstance(end, torch.nn.Sigmoid) else "sigmoid")
    assert found.preprocess.fit == SPEC.fit


def test_names_of_a_mapping_are_certain():
    found = from_module(Maps(8, 32, wrap=lambda maps: {"hidden": maps[0], "alphas": maps[1]}), preprocess=SPEC)
    assert found.signature.task == "foreground"


def test_logits_that_are_read_as_a_matte_are_doubted():
    adapter = ForegroundAdapter(Setting("foreground", SPEC, ForegroundSpec("given")))
    found = foreground_comparison(foreground_records([blob(0)[1]], [blob(0)[1]], None), max_difference=0)
    told = adapter.doubt_counted(found, [{"low": -8.0, "high": 9.0}, {"low": 0.0, "high": 1.0}], [], None)
    assert "alpha: sigmoid" in told
    assert adapter.doubt_counted(found, [{"low": -0.01, "high": 1.02}], [], None) is None
    other = ForegroundAdapter(Setting("foreground", SPEC, ForegroundSpec()))
    assert "alpha: given" in other.doubt_counted(found, [{"low": 0.0, "high": 1.0}], [], None)


# --- modules as people write them, up to the answer in an app ---------------------------------------------------------


def block(before, after):
    convolution = torch.nn.Conv2d(before, after, 3, padding=1, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(after), torch.nn.ReLU(inplace=True))


class UNet(torch.nn.Module):
    """As of milesial/Pytorch-UNet with one class: logits at the size of the input."""

    def __init__(self):
        super().__init__()
        self.inc, self.down1 = block(3, 8), torch.nn.Sequential(torch.nn.MaxPool2d(2), block(8, 16))
        self.up1, self.conv = torch.nn.ConvTranspose2d(16, 8, 2, stride=2), block(16, 8)
        self.outc = torch.nn.Conv2d(8, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        return self.outc(self.conv(torch.cat([x1, self.up1(self.down1(x1))], dim=1)))


class BiRefNet(torch.nn.Module):
    """As of ZhengPeng7/BiRefNet: tokens of an image, a decoder from coarse to fine, and a list of logits, coarse to
    fine, of which its code takes the last: `model(x)[-1].sigmoid()`."""

    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 24, 4, 4)
        self.blocks = torch.nn.TransformerEncoderLayer(24, 2, 48, 0.0, "gelu", batch_first=True, norm_first=True)
        self.decode = torch.nn.ModuleList([block(24, 16), block(16, 12), block(12, 8)])
        self.spvn = torch.nn.ModuleList([torch.nn.Conv2d(width, 1, 1) for width in (16, 12)])
        self.refine, self.conv_out1 = block(3, 8), torch.nn.Conv2d(8, 1, 1)

    def forward(self, x):
        p = self.patches(x)
        p = self.blocks(p.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(p.shape)
        outs = []
        for decode, head in zip(self.decode, [*self.spvn, None], strict=True):
            p = decode(p)
            if head is not None:
                outs.append(head(p))
                p = F.interpolate(p, scale_factor=2, mode="bilinear", align_corners=True)
        outs.append(self.conv_out1(p + self.refine(x)))
        return outs


def settled(module):
    """Weights and statistics of no special value: a mask with figure and ground."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_var.fill_(2.0)
    module.eval()
    with torch.no_grad():
        image = torch.rand(4, 3, 32, 32)
        head = module.outc if isinstance(module, UNet) else module.conv_out1
        result = module(image)
        head.bias -= (result if torch.is_tensor(result) else result[-1]).median()
    return module


def as_unets_do(module, image, size):
    output = F.interpolate(module(image), size[::-1], mode="bilinear")
    return torch.sigmoid(output)


def as_birefnet_does(module, image, size):
    return F.interpolate(module(image)[-1].sigmoid(), size[::-1], mode="bilinear")


@pytest.mark.parametrize(
    ("kind", "spec", "reference"),
    [(UNet, ForegroundSpec(enlarge="logits"), as_unets_do), (BiRefNet, ForegroundSpec(), as_birefnet_does)],
)
def test_an_app_answers_as_the_code_of_the_module(kind, spec, reference):
    module = settled(kind())
    read = vd.model(module, preprocess=WIDE, task="foreground", postprocess=spec)
    exported = vd.export(read, progress=False)
    image = Image.fromarray(np.random.default_rng(5).integers(0, 256, (5, 7, 3), np.uint8)).resize((70, 50))
    pixels = torch.from_numpy(normalise(load_pixels(image, WIDE)[None], WIDE))
    with torch.no_grad():
        expected = reference(module, pixels, image.size)[0, 0].numpy()
    assert 0.05 < (expected > 0.5).mean() < 0.95
    for target in ("openvino-cpu", "onnxruntime-cpu"):
        with vd.compile(exported, target, progress=False).load() as predictor:
            found = predictor.predict(image)
        np.testing.assert_allclose(found.matte, expected, atol=1e-4)
