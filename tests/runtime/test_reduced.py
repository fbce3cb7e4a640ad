"""JPEG files decoded at a part of their size: how near they come to the reference, and what is left to it."""

import io

import numpy as np
import pytest
from PIL import Image

from vitdeploy.errors import ImageError, InputError, MissingFileError
from vitdeploy.runtime import load
from vitdeploy.runtime.geometry import OVERSAMPLING, decode_reduced, resize_reduced
from vitdeploy.runtime.preprocess import load_pixels
from vitdeploy.spec import PreprocessSpec
from vitdeploy.workflows.placement import compile_bundle

HALF = (0.5, 0.5, 0.5)
SPEC = PreprocessSpec(36, (32, 32), "bicubic", HALF, HALF)
ORIENTATION = 0x0112


def photograph(width, height, seed=0):
    """Shapes with edges and shades, as a photograph has them: noise alone would be gone in any reduced image."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    image = np.zeros((height, width, 3))
    for _ in range(12):
        (cx, cy, radius), colour = random.uniform(0.1, 0.9, 3), random.uniform(0, 255, 3)
        image[(x - cx) ** 2 + (y - cy) ** 2 < (radius / 3) ** 2] = colour
    image += 40 * np.sin(2 * np.pi * (3 * x + 2 * y))[:, :, None]
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(640, 480), (479, 641), (333, 1000), (97, 71), (2000, 1501)])
@pytest.mark.parametrize("fit", ["stretch", "longest-pad"])
def test_reduced_pixels_are_near_those_of_the_reference(size, fit):
    resize = (32, 32) if fit == "longest-pad" else 36
    spec = PreprocessSpec(resize, (32, 32), "bicubic", HALF, HALF, fit=fit)
    content = jpeg(photograph(*size, seed=size[0]))
    reduced = decode_reduced(content, spec)
    apart = np.abs(resize_reduced(reduced, spec).astype(int) - load_pixels(content, spec)) if reduced else None
    if apart is None:
        assert min(size) < 2 * OVERSAMPLING * 32
    else:
        assert reduced.size == size
        assert max(reduced.image.size) <= (max(size) + 1) // 2
        assert apart.mean() < 1.5  # a shift by half a pixel is several times as much: see below
        assert np.percentile(apart, 99) < 12


def test_a_shift_by_half_a_pixel_would_be_seen():
    content = jpeg(photograph(640, 480))
    reduced = decode_reduced(content, SPEC)
    reference = load_pixels(content, SPEC).astype(int)
    near = np.abs(resize_reduced(reduced, SPEC) - reference).mean()
    moved = np.roll(np.asarray(reduced.image), 2, axis=1)  # of four times as many pixels as the resized one has
    shifted = type(reduced)(Image.fromarray(moved), reduced.covered, reduced.size)
    assert np.abs(resize_reduced(shifted, SPEC) - reference).mean() > 3 * near


def test_what_is_left_to_the_reference(tmp_path):
    large = photograph(640, 480)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    png = io.BytesIO()
    large.save(png, "PNG")
    others = {
        "small": jpeg(large.resize((80, 60))),
        "grey": jpeg(large.convert("L")),
        "CMYK": jpeg(large.convert("CMYK")),
        "on its side": jpeg(large, exif=exif),
        "PNG": png.getvalue(),
        "broken": jpeg(large)[:2000],
        "no image": b"GIF89a",
        "no file": np.asarray(large),
    }
    assert {name for name, source in others.items() if decode_reduced(source, SPEC) is not None} == set()
    assert decode_reduced(jpeg(large), PreprocessSpec(36, (32, 32), "bicubic", (0.5,), (0.5,))) is None
    of_boxes = PreprocessSpec((32, 32), (32, 32), "bilinear", HALF, HALF, fit="topdown")
    assert decode_reduced(jpeg(large), of_boxes) is None
    assert decode_reduced(jpeg(large), SPEC).size == large.size
    with pytest.raises(MissingFileError):
        decode_reduced(tmp_path / "absent.jpg", SPEC)


def test_a_predictor_decodes_so_where_it_is_asked_to(small_bundle):
    content = jpeg(photograph(640, 480))
    with load(small_bundle, reduced=True) as reducing, load(small_bundle) as reference:
        reducing.preprocess = reference.preprocess = SPEC  # in colour; nothing is run
        tensor, size = reducing.prepare(content)
        other, _ = reference.prepare(content)
        assert size == (640, 480)
        assert not np.array_equal(tensor, other)
        assert np.abs(tensor.astype(int) - other).mean() < 2
        with pytest.raises(ImageError, match="the image bytes cannot be read"):
            reducing.predict(content[:2000])


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["openvino-cpu", "onnxruntime-cpu"])
def test_runs_at_once_give_the_same_answers(small_export, tmp_path, digits, target):
    (tmp_path / "bundle").mkdir()
    compile_bundle(small_export / "model.onnx", target, None, None, tmp_path / "bundle")
    images = sorted((digits / "evaluation").rglob("*.png"))[:40]
    with load(tmp_path / "bundle") as alone, load(tmp_path / "bundle", streams=2) as together:
        assert (alone.runner.at_once, together.runner.at_once) == (1, 2)
        expected = [alone.predict(image) for image in images]
        found = list(together.stream(images, in_flight=4))
    assert [each.label for each in found] == [each.label for each in expected]
    scores = [[one.score for one in each.top] for each in found]
    np.testing.assert_allclose(scores, [[one.score for one in each.top] for each in expected], atol=1e-5)


@pytest.mark.parametrize("streams", [0, -1, 1.5, "2", None])
def test_streams_are_a_whole_number_from_one_on(small_bundle, streams):
    with pytest.raises(InputError, match="streams must be a positive integer"):
        load(small_bundle, streams=streams)
