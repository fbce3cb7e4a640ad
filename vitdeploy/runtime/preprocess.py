"""Prepare an image for a model: the numpy/Pillow reference implementation of PreprocessSpec.

Resize and centre crop follow torchvision's `Resize(int)` (short side, antialiased, long side truncated to whole
pixels), `Resize((height, width))` and `CenterCrop` on PIL images, as timm's evaluation transform composes them. They
run here; the cheap half (uint8 NHWC -> float, /255, mean, std, NCHW) usually runs inside the graph, and `normalise`
does it for graphs without it.

The pixels equal those of torchvision, timm and transformers if these resize with Pillow (except that transformers
rounds the padding up if an image is smaller than the crop). The torchvision-backed processors of transformers resize
tensors and round differently: by at most 1 grey level with bilinear filters, 2 with bicubic and Lanczos ones, and more
only where such a filter overshoots black or white between its two passes (41 levels seen in white noise). Their
nearest-neighbour filter picks other pixels.

Files are read as by timm's and transformers' loaders, with Pillow's `convert`, which drops transparency (transformers 5
puts an already open image with transparency on white instead). Two things differ: 16-bit images keep their upper 8
bits, where `convert` turns everything above 255 white; and images are rotated upright by their EXIF orientation, as in
transformers but not in timm.
"""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import ImageError, InputError, MissingFileError, TensorError
from vitdeploy.runtime import runner, topdown
from vitdeploy.spec import ChannelOrder, CropRounding, PreprocessSpec, TensorSpec

if TYPE_CHECKING:
    from PIL import Image

ORIENTATION = 0x0112  # of EXIF
# Pillow's `Transpose` that makes an image of each orientation upright.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
PNG = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 64_000_000
# JPEG's limit. Each row of an image costs extra time and memory: 1 x 64,000,000 pixels take gigabytes.
MAX_SIDE = 65_535
MAX_FILE_BYTES = 64 * 1024 * 1024
# Supported formats and file endings. A .mpo begins with a JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
READ = "JPEG, PNG, WebP, BMP, TIFF, GIF or PPM"
_ENDINGS = "jpg jpeg jpe jfif mpo png apng webp bmp tif tiff gif pbm pgm ppm pnm"
SUFFIXES = frozenset(f".{ending}" for ending in _ENDINGS.split())
# Limits for a JPEG file. Encoders write about ten scans for a progressive file; each scan, however small, takes time
# for all blocks of the image. Source: libjpeg-turbo, Two Issues with the JPEG Standard.
MAX_SCANS, MAX_SEGMENTS = 50, 10_000
_SCAN, _END = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
# Offset and signature of files that are often mistaken for images.
_OTHERS = (
    (4, b"ftyphei", "a HEIC image"),
    (4, b"ftypmif1", "a HEIC image"),
    (4, b"ftypavif", "an AVIF image"),
    (0, b"%PDF", "a PDF document"),
    (0, b"<svg", "an SVG drawing"),
    (0, b"<?xml", "an XML document"),
    (0, b"<!DOCTYPE", "an HTML page"),
    (0, b"<html", "an HTML page"),
    (0, b"version https://git-lfs", "a git-lfs pointer, not the image (git lfs pull)"),
    (0, b"PK\x03\x04", "a zip archive"),
)

T = TypeVar("T")
Pixels = npt.NDArray[np.uint8]
ImageSource = Union[str, Path, bytes, bytearray, memoryview, "Image.Image", Pixels]
ACCEPTED = (
    "a path (str or Path), the bytes of an image file, a PIL image, or a uint8 array of numpy: [height, width, 3] in "
    "RGB, or grey, [height, width] or [height, width, 1]"
)


def decode(source: ImageSource, channels: int | None, name: str = "") -> Image.Image:
    """Return a decoded image in mode "RGB" (3 channels), "L" (1) or its file's mode (None), upright by its EXIF
    orientation.

    `source` is a path, the bytes of a JPEG, PNG, WebP, BMP, TIFF, GIF or PPM file (its first frame or page), a PIL
    image, or a uint8 array [height, width, channels], RGB. `name`: the name of bytes in messages. Broken metadata
    (EXIF, XMP, profiles, texts) is ignored: the image is then not rotated. Size limits are checked from the header,
    before any pixel is decoded.

    Raises:
        MissingFileError: the path does not exist.
        ImageError: not a readable image, truncated, larger than 64 megapixels, 65,535 pixels a side or 64 MiB, or a
            JPEG file of more than 50 scans.
        TensorError: an array of the wrong dtype or shape, or an unsupported type.
    """
    from PIL import Image

    mode = {1: "L", 3: "RGB", None: None}[channels]
    if isinstance(source, np.ndarray):
        return _from_array(source, mode or "RGB")
    if isinstance(source, Image.Image):
        return _read_image(source, lambda image: _to_mode(image, mode), "the PIL image")
    content = file_of(source)
    if content is None:
        raise _no_image(source)
    name = str(source) if isinstance(source, str | Path) else name or "the image bytes"
    check_scans(content, name)
    return _read_image(content, lambda image: _to_mode(image, mode), name)


@dataclass(frozen=True)
class Frame:
    """The size and orientation of an image: `size` is its upright (width, height), as from `decode`; `orientation` its
    EXIF orientation, 1 to 8."""

    size: tuple[int, int]
    orientation: int

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) of the pixels as stored in the file."""
        return self.size[::-1] if self.orientation >= 5 else self.size


def image_frame(source: str | Path | bytes, name: str = "") -> Frame:
    """Return the frame of an image file, from its header; a PNG is read completely, because metadata may follow the
    pixels.

    Raises:
        MissingFileError, ImageError: as `decode`.
    """
    from PIL import Image

    name = str(source) if isinstance(source, str | Path) else name or "the image bytes"
    if isinstance(source, str | Path):
        # For an intact file only the header is read; a broken one is read below, for the same error as `decode`.
        with contextlib.suppress(Exception), Image.open(source, formats=FORMATS) as image:
            check_decodable(image.width, image.height, name)
            return _frame(image)
    content = file_of(source)
    assert content is not None, "a path or bytes"
    return _read_image(content, _frame, name)


def _frame(image: Image.Image) -> Frame:
    turned = orientation_of(image)
    # Pillow's size of a TIFF is before or after rotation, depending on the release; the tags are not.
    tags = getattr(image, "tag_v2", None)
    width, height = image.size if tags is None else (tags[256], tags[257])
    return Frame((height, width) if turned >= 5 else (width, height), turned)


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an open image, 1 to 8; 1 if it is missing or broken."""
    if image.format == "PNG":
        image.load()  # metadata may follow the pixels; load first, so that errors of the pixels are raised here
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # from untrusted metadata
        image.info.pop("xmp", None)  # a TIFF would read it again
        return 1
    return next((number for number in range(1, 9) if found == number), 1)


def in_rgb(image: ImageSource, channels: ChannelOrder) -> ImageSource:
    """Return the image as `decode` takes it: a BGR array, such as from `cv2.imread`, becomes RGB.

    Raises:
        InputError: an unknown channel order, or "bgr" for something other than an array.
    """
    if channels == "rgb":
        return image
    if channels != "bgr":
        raise InputError('channels must be "rgb" or "bgr"', found=repr(channels), expected='"rgb" or "bgr"')
    if not isinstance(image, np.ndarray):
        raise TensorError(
            'channels="bgr" applies only to arrays',
            found=runner.type_name(image),
            expected="a uint8 array [height, width, 3], such as from cv2.imread",
            fix="omit channels: files and PIL images record their channel order",
        )
    return image[..., ::-1] if image.ndim == 3 and image.shape[2] == 3 else image


def file_of(source: object) -> bytes | bytearray | None:
    """Return the bytes of an image file, from a path or the bytes themselves; None for other sources.

    Raises:
        MissingFileError: the path does not exist.
        ImageError: larger than 64 MiB, or not readable.
    """
    if isinstance(source, str | Path):
        return _read(Path(source))
    if not isinstance(source, bytes | bytearray | memoryview):
        return None
    size = memoryview(source).nbytes
    if size > MAX_FILE_BYTES:
        raise ImageError("the image file is too large", found=f"{size:,} bytes", expected=f"at most {MAX_FILE_BYTES:,}")
    return bytes(source) if isinstance(source, memoryview) else source


def _no_image(value: object) -> TensorError:
    fix = ""
    if hasattr(value, "__dlpack__") or hasattr(value, "numpy"):
        fix = "pass tensor.numpy(force=True) as uint8 [height, width, channels]; for normalised input, predict_tensor"
    elif hasattr(value, "read"):
        fix = "pass its bytes: file.read()"
    elif isinstance(value, list | tuple):
        fix = "for several images, use predict_batch"
    return TensorError("not an image", found=runner.type_name(value), expected=ACCEPTED, fix=fix)


def _read_image(source: Image.Image | bytes | bytearray, read: Callable[[Image.Image], T], name: str) -> T:
    """Return the result of `read` on a PIL image (possibly not loaded yet) or the bytes of a file. A PNG that cannot be
    read is tried again without its metadata."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = source if isinstance(source, Image.Image) else Image.open(io.BytesIO(source), formats=FORMATS)
        check_decodable(*image.size, name)
        return read(image)
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{name} is too large to decode",
            found=str(error),
            expected=f"at most {MAX_PIXELS:,} pixels",
            fix="make it smaller, or remove it from the folder",
        ) from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error ...
        bare = b"" if isinstance(source, Image.Image) else _without_metadata(source)
        if bare:
            return _read_image(bare, read, name)
        unknown = isinstance(error, UnidentifiedImageError)  # its text only names an object in memory
        raise ImageError(
            f"{name} cannot be read as an image",
            found=_kind_of(source) if unknown else str(error)[:200] or type(error).__name__,
            expected=f"an intact {READ} file",
            fix="convert it to one of these formats, or remove it",
        ) from None


def _without_metadata(content: bytes | bytearray) -> bytes:
    """Return a PNG reduced to its critical chunks and an intact EXIF chunk; b"" for another file, or one without other
    chunks."""
    if not content.startswith(PNG):
        return b""
    kept, at = [PNG], len(PNG)
    while at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        kind, checksum = content[at + 4 : at + 8], content[end - 4 : end]
        whole = zlib.crc32(content[at + 4 : end - 4]).to_bytes(4, "big") == checksum
        if kind[:1].isupper() or (kind == b"eXIf" and whole):
            kept.append(bytes(content[at:end]))
        at = end
    bare = b"".join(kept)
    return bare if len(bare) < len(content) else b""


def check_decodable(width: int, height: int, name: str) -> None:
    """Raise ImageError for an image without pixels, or one above the size limits, by its header."""
    if min(width, height) < 1:
        raise ImageError(f"{name} has no pixels", found=f"{width}x{height}", expected="a width and a height above 0")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ImageError(
            f"{name} is too large to decode",
            found=f"{width}x{height} pixels",
            expected=f"at most {MAX_PIXELS:,} pixels, and {MAX_SIDE:,} per side",
            fix="make it smaller, or remove it from the folder",
        )


def _kind_of(source: Image.Image | bytes | bytearray) -> str:
    """A description of a file that Pillow does not recognise."""
    start = source[:64] if isinstance(source, bytes | bytearray) else b""
    if not start and isinstance(source, bytes | bytearray):
        return "an empty file"
    named = next((name for at, magic, name in _OTHERS if start[at:].startswith(magic)), None)
    return named or "an unknown format, or a broken header"


def _to_mode(image: Image.Image, mode: str | None) -> Image.Image:
    """Return the image upright and in `mode`: transparency is dropped, and 16-bit images keep their upper 8 bits. None
    keeps the mode."""
    from PIL import Image

    turned = orientation_of(image)
    image.load()  # also rotates a TIFF, in every Pillow release
    upright = image if turned == 1 or hasattr(image, "tag_v2") else image.transpose(Image.Transpose(_TURNS[turned]))
    if mode is None:
        return upright
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow's own conversion to 8 bits clips, which leaves a white image.
        upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
    if upright.mode in ("I", "F"):  # 32 bits without a defined white; Pillow would clip at 255
        raise ValueError(f"32-bit pixels (mode {upright.mode})")
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    return upright if upright.mode == mode else upright.convert(mode)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
    except (OSError, ValueError):  # ValueError: a NUL in the name
        raise MissingFileError(f"no image at {path}", fix="check the path or pattern") from None
    if not path.is_file() or size > MAX_FILE_BYTES:
        raise ImageError(
            f"{path} is not a regular file, or too large",
            found=f"{size:,} bytes",
            expected=f"a regular file of at most {MAX_FILE_BYTES:,} bytes",
            fix="make it smaller, or remove it from the folder",
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(
            f"{path} cannot be read",
            found=error.strerror or str(error),
            expected="a file that this user may read",
            fix="check its owner and permissions, or remove it from the folder",
        ) from None


def check_scans(content: bytes | bytearray, name: str) -> None:
    """Raise ImageError for a JPEG file with more scans than any encoder writes; bytes after its end are ignored."""
    if not content.startswith(b"\xff\xd8"):
        return
    if content.count(bytes([0xFF, _SCAN])) > MAX_SCANS and _scans(content) > MAX_SCANS:
        raise ImageError(
            f"{name} would take too long to decode",
            found=f"a JPEG file with more than {MAX_SCANS} scans",
            expected=f"at most {MAX_SCANS} scans (encoders write about ten)",
            fix="save it again as a JPEG or PNG file, or remove it from the folder",
        )


def _scans(data: bytes | bytearray) -> int:
    """The number of scans of a JPEG file up to its end; MAX_SCANS + 1 if it exceeds MAX_SEGMENTS segments."""
    found, at = 0, 2
    for _ in range(MAX_SEGMENTS):
        marker = _MARKER.search(data, at)
        if marker is None or marker[0][1] == _END or found > MAX_SCANS:
            return found
        found += marker[0][1] == _SCAN
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return MAX_SCANS + 1


def _from_array(array: npt.NDArray[Any], mode: str) -> Image.Image:
    from PIL import Image

    shape = array.shape
    if array.dtype != np.uint8 or len(shape) not in (2, 3) or (*shape, 1)[2] not in (1, 3) or 0 in shape:
        raise TensorError(
            "not an image array",
            found=f"{array.dtype} {list(shape)}",
            expected="uint8 [height, width, 3] in RGB, or grey: [height, width] or [height, width, 1]; not empty",
        )
    squeezed = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(squeezed)).convert(mode)


def resize_and_crop(image: Image.Image, spec: PreprocessSpec, box: topdown.Box | None = None) -> Pixels:
    """Return uint8 [crop height, crop width, channels]: the image resized by `spec.resize`, then centre-cropped; for a
    top-down model the content of `box`, or the whole image (`runtime.topdown`).

    An image smaller than the crop is padded with zeros around it, as torchvision's CenterCrop does.

    Raises:
        ImageError: resizing a long, thin image would take more than 64 megapixels.
        InputError: an invalid box, or a box for a model that takes whole images.
    """
    from PIL import Image

    if spec.fit == "topdown":
        return topdown.cut_out(image, box, (spec.crop[1], spec.crop[0]))
    if box is not None:
        raise InputError(
            "this model takes whole images, not boxes",
            found=f"preprocessing with fit {spec.fit}",
            expected="a top-down model, such as one for key points",
            fix="omit the box, or pass the cropped part of the image",
        )
    width, height = image.size
    size = resized_size(width, height, spec)
    if size != (width, height):
        if size[0] * size[1] > MAX_PIXELS:
            raise ImageError(
                "the image is too long and thin",
                found=f"{width}x{height} pixels, resized to {size[0]}x{size[1]}",
                expected=f"at most {MAX_PIXELS:,} pixels",
                fix="crop it, or remove it from the folder",
            )
        image = image.resize(size, Image.Resampling[spec.interpolation.upper()])
    return crop_resized(image, spec)


def crop_resized(image: Image.Image, spec: PreprocessSpec) -> Pixels:
    """Return uint8 [crop height, crop width, channels] of an image already resized by `spec.resize`."""
    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return _padded(pixels, spec) if spec.fit == "longest-pad" else _centre_crop(pixels, spec)


def resized_size(width: int, height: int, spec: PreprocessSpec) -> tuple[int, int]:
    """Return the (width, height) that an image is resized to.

    A long side is truncated to whole pixels as in torchvision, and "contain" as in transformers' DonutImageProcessor; a
    size that covers the crop is rounded as in timm's ResizeKeepRatio, and "longest-pad" as in SAM's ResizeLongestSide.
    """
    resize = spec.resize
    if not isinstance(resize, int):
        if spec.fit == "stretch":
            return resize[1], resize[0]
        if spec.fit == "longest-pad":
            scale = min(resize[0] / height, resize[1] / width)
            return max(1, int(width * scale + 0.5)), max(1, int(height * scale + 0.5))
        if spec.fit == "contain":
            return _contained(width, height, resize)
        ratio = min(height / resize[0], width / resize[1])
        return round(width / ratio), round(height / ratio)
    long = int(resize * max(width, height) / min(width, height))
    return (resize, long) if width <= height else (long, resize)


def _contained(width: int, height: int, box: tuple[int, int]) -> tuple[int, int]:
    """The largest (width, height) that fits into a box of (height, width): the short side is the box's, and both shrink
    if the long side does not fit. Both steps truncate."""
    short = min(box)
    long = int(short * max(width, height) / min(width, height))
    wide, high = (short, long) if width <= height else (long, short)
    if wide <= box[1] and high <= box[0]:
        return wide, high
    most = min(wide, box[1]), min(high, box[0])
    return (
        (max(1, int(wide * most[1] / high)), most[1]) if high > wide else (most[0], max(1, int(high * most[0] / wide)))
    )


def crop_start(side: int, crop: int, rounding: CropRounding) -> int:
    """Return where the centre crop of a side begins, in pixels; negative if padding comes before it.

    Half of the padding is rounded down, as in torchvision's CenterCrop.
    """
    if side < crop:
        return -((crop - side) // 2)
    return round((side - crop) / 2) if rounding == "even" else (side - crop) // 2


def _centre_crop(pixels: Pixels, spec: PreprocessSpec) -> Pixels:
    height, width, channels = pixels.shape
    crop_height, crop_width = spec.crop
    top = crop_start(height, crop_height, spec.crop_rounding)
    left = crop_start(width, crop_width, spec.crop_rounding)
    inside = pixels[max(0, top) : top + crop_height, max(0, left) : left + crop_width]
    if inside.shape[:2] == (crop_height, crop_width):
        return inside
    padded = np.zeros((crop_height, crop_width, channels), np.uint8)
    top, left = max(0, -top), max(0, -left)
    padded[top : top + inside.shape[0], left : left + inside.shape[1]] = inside
    return padded


def _padded(pixels: Pixels, spec: PreprocessSpec) -> Pixels:
    """The pixels at the top left, padded with `fill` or the grey levels nearest to the mean. SAM pads with 0 after
    normalisation; the difference is at most 0.5 / 255 / std, the least that whole grey levels allow."""
    filled = np.empty((*spec.crop, spec.channels), np.uint8)
    filled[:] = np.rint(255 * np.asarray(spec.statistics[0])).clip(0, 255) if spec.fill is None else spec.fill
    filled[: pixels.shape[0], : pixels.shape[1]] = pixels
    return filled


def load_pixels(source: ImageSource, spec: PreprocessSpec, box: topdown.Box | None = None) -> Pixels:
    """Return uint8 [crop height, crop width, channels] for any image source; errors as `decode` and
    `resize_and_crop`."""
    return load_image(source, spec, box)[0]


def load_image(
    source: ImageSource, spec: PreprocessSpec, box: topdown.Box | None = None, name: str = ""
) -> tuple[Pixels, tuple[int, int]]:
    """Return the pixels as `load_pixels`, and (width, height) of the upright original. `name`: the name of bytes in
    messages."""
    image = decode(source, spec.channels, name)
    return resize_and_crop(image, spec, box), image.size


def normalise(pixels: Pixels, spec: PreprocessSpec) -> npt.NDArray[np.float32]:
    """Return float32 [batch, channels, height, width] from uint8 [batch, height, width, channels]: (x / 255 - mean) /
    std, with the channels in the model's order."""
    mean = np.asarray(spec.mean, np.float32)
    std = np.asarray(spec.std, np.float32)
    ordered = pixels[..., ::-1] if spec.channel_order == "bgr" else pixels
    scaled = (ordered.astype(np.float32) / np.float32(255) - mean) / std
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def to_input(pixels: Sequence[Pixels] | Pixels, spec: PreprocessSpec, tensor: TensorSpec) -> npt.NDArray[Any]:
    """Return the array for a model's input tensor: uint8 NHWC unchanged, or normalised float32 NCHW."""
    batch = np.ascontiguousarray(np.stack(list(pixels)))
    return batch if tensor.dtype == "uint8" else normalise(batch, spec)
