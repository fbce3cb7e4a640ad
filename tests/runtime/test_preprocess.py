"""From an image to the model's input, against the definition written out with Pillow and torch."""

import io
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from vitdeploy.errors import ImageError, MissingFileError, TensorError
from vitdeploy.runtime.predictor import require_several
from vitdeploy.runtime.preprocess import Frame, decode, image_frame, load_pixels, normalise, resize_and_crop, to_input
from vitdeploy.spec import PreprocessSpec, TensorSpec

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
SPEC = PreprocessSpec(16, (16, 16))


def noise(width, height, channels=3, seed=0):
    shape = (height, width, 3) if channels == 3 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def file_bytes(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_with_header(width, height):
    """A PNG file that says in its header how large it is, and has next to no pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def resize_then_centre_crop(image, side, crop, resampling):
    """torchvision's Resize(side) and CenterCrop(crop) as they are defined, with Pillow's own operations."""
    width, height = image.size
    size = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    resized = image.resize(size, resampling) if size != image.size else image
    width, height = size
    crop_height, crop_width = crop
    if crop_width > width or crop_height > height:
        canvas = Image.new(image.mode, (max(width, crop_width), max(height, crop_height)))
        canvas.paste(resized, (max(0, (crop_width - width) // 2), max(0, (crop_height - height) // 2)))
        resized, (width, height) = canvas, canvas.size
    left, top = round((width - crop_width) / 2.0), round((height - crop_height) / 2.0)
    return np.asarray(resized.crop((left, top, left + crop_width, top + crop_height)))


def rejected(source, channels=3):
    with pytest.raises(ImageError) as caught:
        decode(source, channels)
    assert caught.value.exit_code == 2
    return str(caught.value)


# --- resize and crop --------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 40),
    st.tuples(st.integers(1, 48), st.integers(1, 48)),
    st.sampled_from(sorted(RESAMPLING)),
    st.sampled_from([1, 3]),
)
def test_resize_and_crop_is_resize_then_centre_crop(width, height, side, crop, interpolation, channels):
    image = noise(width, height, channels)
    spec = PreprocessSpec(side, crop, interpolation, (0.5,) * channels, (0.5,) * channels)
    expected = resize_then_centre_crop(image, side, crop, RESAMPLING[interpolation])
    assert np.array_equal(resize_and_crop(image, spec), expected.reshape(*crop, channels))


@pytest.mark.parametrize(("width", "height"), [(8, 8), (8, 40), (40, 8), (1, 1)])
def test_an_image_smaller_than_the_crop_gets_a_black_border(width, height):
    spec = PreprocessSpec(min(width, height), (20, 20))
    pixels = resize_and_crop(Image.new("RGB", (width, height), "white"), spec)
    rows, columns = min(height, 20), min(width, 20)
    top, left = (20 - rows) // 2, (20 - columns) // 2
    expected = np.zeros((20, 20, 3), np.uint8)
    expected[top : top + rows, left : left + columns] = 255
    assert np.array_equal(pixels, expected)


def test_an_image_of_the_right_size_is_not_touched():
    image = noise(16, 16)
    assert np.array_equal(resize_and_crop(image, SPEC), np.asarray(image))


def test_making_an_image_smaller_averages():
    checkerboard = np.indices((64, 64)).sum(axis=0) % 2 * np.uint8(255)
    pixels = resize_and_crop(Image.fromarray(checkerboard.astype(np.uint8)), PreprocessSpec(8, (8, 8), "bilinear"))
    assert abs(pixels[2:-2, 2:-2].astype(int) - 127).max() <= 2


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_a_thin_image_does_not_take_all_memory(size):
    with pytest.raises(ImageError, match="too long and thin"):
        resize_and_crop(Image.new("RGB", size), PreprocessSpec(256, (224, 224)))


# --- sources ----------------------------------------------------------------------------------------------------------


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    image = noise(30, 20)
    data = file_bytes(image)
    path = tmp_path / "image.png"
    path.write_bytes(data)
    expected = load_pixels(image, SPEC)
    for source in (path, str(path), data, Image.open(path), np.asarray(image), np.asfortranarray(np.asarray(image))):
        assert np.array_equal(load_pixels(source, SPEC), expected)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95}), ("BMP", {}), ("TIFF", {}), ("GIF", {})),
        ("PPM", {}),
    ],
)
def test_every_format_is_read_whatever_the_file_is_called(tmp_path, kind, options):
    image = Image.new("RGB", (20, 20), (200, 100, 50))
    path = tmp_path / "image.txt"
    path.write_bytes(file_bytes(image, kind, **options))
    assert abs(np.asarray(decode(path, 3)).astype(int) - np.asarray(image)).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP"])
def test_of_several_frames_the_first_is_taken(kind):
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("white", "black")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_bytes(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.asarray(decode(data, 3)).min() == 255


def test_other_formats_are_refused():
    assert "JPEG, PNG, WebP, BMP, TIFF, GIF or PPM" in rejected(file_bytes(noise(8, 8), "TGA"))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"),
        (b"\0\0\0\x20ftypheic\0\0", "a HEIC image"),
        (b"\0\0\0\x20ftypavif\0\0", "an AVIF image"),
        (b"%PDF-1.7", "a PDF document"),
        (b"<!DOCTYPE html>", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1", "a git-lfs pointer"),
    ],
)
def test_what_cannot_be_read_is_named(data, found):
    assert found in rejected(data)


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused_as_nobody_says_what_is_white(dtype):
    ramp = np.linspace(0, 1, 100).reshape(10, 10).astype(dtype)
    assert "32-bit pixels" in rejected(file_bytes(Image.fromarray(ramp), "TIFF"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_a_png_becomes_grey_or_rgb(mode, channels):
    image = Image.new("I;16", (20, 10), 128 << 8) if mode == "I;16" else Image.new("L", (20, 10), 255).convert(mode)
    decoded = decode(file_bytes(image), channels)
    assert decoded.mode == {1: "L", 3: "RGB"}[channels]
    assert set(np.unique(decoded)) == ({128} if mode == "I;16" else {255})


def test_sixteen_bits_keep_the_upper_eight():
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for source in (file_bytes(Image.fromarray(ramp)), Image.fromarray(ramp)):
        assert np.array_equal(np.asarray(decode(source, 1)), (ramp >> 8).astype(np.uint8))


def test_transparency_is_dropped():
    image = noise(8, 8).convert("RGBA")
    image.putalpha(0)
    assert np.array_equal(np.asarray(decode(file_bytes(image), 3)), np.asarray(image)[:, :, :3])


def test_a_palette_with_transparency_is_read_without_a_warning():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([255, 0, 0, 0, 255, 0])
    decoded = decode(file_bytes(image, transparency=b"\x00\x80"), 3)
    assert (np.asarray(decoded) == [0, 255, 0]).all()


def test_cmyk_becomes_rgb():
    decoded = decode(file_bytes(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"), 3)
    assert np.abs(np.asarray(decoded).astype(int) - [255, 0, 0]).max() <= 3


TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@pytest.mark.parametrize("orientation", [0, 1, *TURNS, 9, 300])
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        *(("PNG", "RGB", {}), ("JPEG", "RGB", {}), ("WEBP", "RGB", {"lossless": True}), ("TIFF", "RGB", {})),
        *(("TIFF", "L", {}), ("TIFF", "RGB", {"compression": "tiff_lzw"}), ("PNG", "I;16", {})),
    ],
)
def test_an_image_stands_upright_and_its_header_says_that_size(tmp_path, kind, mode, options, orientation):
    image = noise(12, 7, 3 if mode == "RGB" else 1)
    image = image.convert("I").point(lambda value: 256 * value).convert("I;16") if mode == "I;16" else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    if options.get("compression") and not 1 <= orientation <= 8:
        options = {}  # libtiff writes no other numbers
    data = file_bytes(image, kind, exif=exif, **options)
    path = tmp_path / "image"
    path.write_bytes(data)
    turn = TURNS.get(orientation)
    stored = decode(file_bytes(image, kind, **options), 3)
    expected = np.asarray(stored if turn is None else stored.transpose(turn))
    for source in (data, path, Image.open(io.BytesIO(data))):
        assert np.array_equal(np.asarray(decode(source, 3)), expected)
    frame = image_frame(path)
    assert frame == image_frame(data)
    assert (frame.size, frame.stored) == (expected.shape[1::-1], (12, 7))
    assert frame.orientation == (1 if turn is None else orientation)
    assert decode(path, None).size == frame.size


def broken_metadata():
    """Files of the same pixels with metadata that is broken, by what is wrong with it."""
    image = noise(12, 7)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, tag, form, value in (("XMP", 700, 3, 1), ("EXIF", 0x8769, 4, 99_999), ("GPS", 0x8825, 4, 7)):
        tags = ImageFileDirectory_v2()
        tags.tagtype[tag] = form
        tags[tag] = value
        yield f"TIFF {name}", "TIFF", file_bytes(image, "TIFF", tiffinfo=tags)
    for kind in ("PNG", "WEBP", "JPEG"):
        options = {"lossless": True} if kind == "WEBP" else {}
        yield f"{kind} EXIF", kind, file_bytes(image, kind, exif=b"Exif\0\0no TIFF at all", **options)
        yield f"{kind} EXIF cut off", kind, file_bytes(image, kind, exif=b"Exif\0\0II*\0", **options)
        yield f"{kind} XMP", kind, file_bytes(image, kind, xmp=b"<\xff tiff:Orientation=", **options)
    for name, text in (("hexadecimal", "\nexif\n 10\nzz"), ("short", "\nexif\n 10\n4578696600004949")):
        info = PngInfo()
        info.add_text("Raw profile type exif", text)
        yield f"raw profile {name}", "PNG", file_bytes(image, pnginfo=info)
    for name, content in (
        (b"iCCP", b"a\0\7zz"),
        (b"zTXt", b"key\0\7zz"),
        (b"pHYs", b"1"),
        (b"gAMA", b""),
        (b"acTL", b""),
    ):
        info = PngInfo()
        info.add(name, content)
        yield f"{name.decode()} chunk", "PNG", file_bytes(image, pnginfo=info)
    late = PngInfo()
    late.add(b"zTXt", b"key\0\7zz", after_idat=True)
    yield "chunk after the pixels", "PNG", file_bytes(image, pnginfo=late)
    data = bytearray(file_bytes(image, exif=turned))
    data[data.index(b"eXIf") + 6] ^= 255
    yield "checksum", "PNG", bytes(data)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(("kind", "data"), [pytest.param(*rest, id=name) for name, *rest in broken_metadata()])
def test_broken_metadata_does_not_break_an_image(tmp_path, kind, data):
    path = tmp_path / "image"
    path.write_bytes(data)
    whole = file_bytes(noise(12, 7), kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert np.array_equal(np.asarray(decode(path, 3)), np.asarray(decode(whole, 3)))
    assert image_frame(path) == Frame((12, 7), 1)


def test_a_turned_png_with_another_broken_chunk_is_turned():
    info, turned = PngInfo(), Image.Exif()
    info.add(b"iCCP", b"a\0\7zz")
    turned[0x0112] = 6
    assert decode(file_bytes(noise(12, 7), pnginfo=info, exif=turned), 3).size == (7, 12)


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    data = file_bytes(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert np.asarray(decode(data, 3))[0, 0].tolist() == [255, 0, 0]


# --- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xd8\xff",
        b"<!DOCTYPE html><html><body>404</body></html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        b"\x89PNG\r\n\x1a\n",
        png_with_header(8, 8),
    ],
    ids=["no bytes", "jpeg mark", "html", "lfs pointer", "png mark", "png without pixels"],
)
def test_a_file_that_is_no_image_is_named(tmp_path, data):
    path = tmp_path / "cat.jpg"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"cat\.jpg cannot be read"):
        image_frame(path)
    text = rejected(path)
    assert "cat.jpg cannot be read as an image" in text
    assert "fix:" in text


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_truncated_image_is_refused(kind):
    data = file_bytes(noise(64, 64), kind)
    assert "cannot be read" in rejected(data[: len(data) // 2])


def test_a_truncated_image_that_the_caller_opened_is_refused():
    data = file_bytes(noise(64, 64), "JPEG")
    assert "cannot be read" in rejected(Image.open(io.BytesIO(data[: len(data) // 2])))


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "TIFF", "PPM"]), st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_damaged_bytes_raise_nothing_but_image_errors(kind, position, damage):
    data = bytearray(file_bytes(noise(16, 16), kind))
    position %= len(data)
    data[position : position + len(damage)] = damage
    try:
        assert decode(bytes(data), 3).mode == "RGB"
    except ImageError as error:
        assert error.code == "VD2302"


@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size):
    with pytest.raises(ImageError, match="the PIL image has no pixels") as caught:
        decode(Image.new("RGB", size), 3)
    assert caught.value.found == f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("size", [(8001, 8000), (10_000, 10_000), (100_000, 100_000), (2**31 - 1, 1)])
def test_a_bomb_is_refused_by_its_header(size):
    text = rejected(png_with_header(*size))
    assert "VD2302" in text
    assert "too large to decode" in text or "bomb" in text.lower() or "exceeds limit" in text


@pytest.mark.parametrize("size", [(1, 64_000_000), (64_000_000, 1), (65_536, 8)])
def test_an_image_of_more_rows_than_any_is_refused_by_its_header(size):
    text = rejected(png_with_header(*size))
    assert f"{size[0]}x{size[1]} pixels" in text and "65,535 per side" in text


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda data: memoryview(data + bytes(8))[: len(data)]])
def test_a_file_may_be_in_any_bytes(kind):
    data = file_bytes(noise(16, 16))
    assert decode(kind(data), 3).tobytes() == decode(data, 3).tobytes()
    every_second = memoryview(bytes(byte for each in data for byte in (each, 0)))[::2]
    assert decode(every_second, 3).tobytes() == decode(data, 3).tobytes()
    with pytest.raises(TensorError, match="expected several images"):
        require_several(kind(data))


def test_an_open_image_that_is_too_large_is_refused():
    assert "8001x8000" in rejected(Image.open(io.BytesIO(png_with_header(8001, 8000))))


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024 + 1)
    assert "67,108,865 bytes" in rejected(path)


@pytest.mark.parametrize("name", ["absent.png", "no\0name.png", "a" * 5000])
def test_a_path_that_is_not_there_is_said_to_be_absent(tmp_path, name):
    with pytest.raises(MissingFileError):
        decode(str(tmp_path / name), 3)


def test_a_folder_is_no_image(tmp_path):
    assert "a regular file" in rejected(tmp_path)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8, 8, 3), "float32"),
        ((8, 8, 3), "int64"),
        ((8, 8, 3), "uint16"),
        ((8, 8, 4), "uint8"),
        ((3, 8, 8), "uint8"),
        ((1, 8, 8, 3), "uint8"),
        ((8,), "uint8"),
        ((), "uint8"),
        ((0, 8, 3), "uint8"),
        ((8, 0), "uint8"),
    ],
)
def test_another_array_is_refused(shape, dtype):
    with pytest.raises(TensorError) as caught:
        decode(np.zeros(shape, dtype), 3)
    assert str(list(shape)) in caught.value.found
    for accepted in ("[height, width, 3]", "[height, width]", "[height, width, 1]"):
        assert accepted in caught.value.expected


@pytest.mark.parametrize("shape", [(8, 9), (8, 9, 1), (8, 9, 3)])
@pytest.mark.parametrize("channels", [1, 3])
def test_grey_and_rgb_arrays_are_taken(shape, channels):
    decoded = decode(np.full(shape, 200, np.uint8), channels)
    assert decoded.size == (9, 8)
    assert set(np.unique(decoded)) == {200}


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,), (0.5,))])
def test_normalise_is_what_torch_computes(mean, std):
    torch = pytest.importorskip("torch", reason="pip install 'vitdeploy[export]'")
    pixels = np.arange(2 * 16 * 8 * len(mean)).astype(np.uint8).reshape(2, 16, 8, len(mean))
    tensor = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32).div(255)
    expected = (tensor - torch.tensor(mean).view(1, -1, 1, 1)) / torch.tensor(std).view(1, -1, 1, 1)
    found = normalise(pixels, PreprocessSpec(16, (16, 8), mean=mean, std=std))
    assert found.dtype == np.float32
    assert found.flags.c_contiguous
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-6)


def test_black_and_white_become_the_ends_of_the_range():
    pixels = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)
    found = normalise(pixels, PreprocessSpec(2, (1, 2), mean=(0.5,), std=(0.25,)))
    assert found.ravel().tolist() == [-2.0, 2.0]
    assert math.isclose(found.sum(), 0)


def test_the_input_is_pixels_or_numbers_as_the_model_wants():
    pixels = [np.full((16, 16, 3), value, np.uint8) for value in (0, 255)]
    raw = to_input(pixels, SPEC, TensorSpec("image", "uint8", (2, 16, 16, 3)))
    numbers = to_input(pixels, SPEC, TensorSpec("image", "float32", (2, 3, 16, 16)))
    assert (raw.dtype, raw.shape) == (np.uint8, (2, 16, 16, 3))
    assert (numbers.dtype, numbers.shape) == (np.float32, (2, 3, 16, 16))
    assert np.array_equal(numbers, normalise(raw, SPEC))


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded():
    stream = io.BytesIO()
    Image.fromarray(np.arange(24 * 24 * 3, dtype=np.uint8).reshape(24, 24, 3)).save(stream, "JPEG", progressive=True)
    whole = stream.getvalue()
    scan = whole.index(b"\xff\xda")
    many = whole[:scan] + whole[scan:-2] * 10 + whole[-2:]
    for content in (many, bytearray(many), memoryview(many)):
        with pytest.raises(ImageError, match="too long to decode") as caught:
            decode(content, 3)
        assert "more than 50 scans" in caught.value.found
    behind = whole + b"\xff\xda\x00\x02" * 100  # as cameras put a film there
    assert np.array_equal(np.asarray(decode(behind, 3)), np.asarray(decode(whole, 3)))
