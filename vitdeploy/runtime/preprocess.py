"""From an image to the model's input: the numpy/Pillow reference implementation of PreprocessSpec.

Resize and centre crop follow torchvision's `Resize(int)` (short side, antialiased, long side truncated to whole
pixels), `Resize((height, width))` and `CenterCrop` on PIL images, as timm's evaluation transform composes them. They
run here; the cheap half (uint8 NHWC -> float, /255, mean, std, NCHW) usually runs inside the graph, and `normalise`
does the same for graphs without it.

The pixels are equal to those of torchvision, timm and transformers wherever these resize with Pillow (but transformers
rounds half of what is missing up, where an image is smaller than the crop). The processors of
transformers that resize tensors (the torchvision-backed ones) round otherwise: they differ by at most 1 grey level with
bilinear filters, by 2 with bicubic and Lanczos ones, and by more only where such a filter overshoots black or white
between its two passes (41 levels seen in white noise). Their nearest neighbour is another one.

Files are read as timm's and transformers' loaders read them, by Pillow's `convert`, which drops transparency (an image
with transparency that transformers 5 is handed open is laid on white instead). Two things differ. Of 16 bits the upper
8 are kept, where `convert` makes everything above 255 white. And images stand upright by their EXIF orientation as in
transformers, where timm leaves them lying.
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
# What makes an image of each orientation upright, of Pillow's `Transpose`.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
PNG = b"\x89PNG\r\n\x1a\n"
MAX_PIXELS = 64_000_000
# JPEG's largest. Each row of an image costs time and memory of its own: 1 x 64,000,000 pixels take gigabytes.
MAX_SIDE = 65_535
MAX_FILE_BYTES = 64 * 1024 * 1024
# What is read, and how such files are called. A .mpo begins with a JPEG.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
READ = "JPEG, PNG, WebP, BMP, TIFF, GIF or PPM"
_ENDINGS = "jpg jpeg jpe jfif mpo png apng webp bmp tif tiff gif pbm pgm ppm pnm"
SUFFIXES = frozenset(f".{ending}" for ending in _ENDINGS.split())
# Of a JPEG file. Encoders write about ten scans where it is progressive; each takes time for all blocks of the image,
# whatever few bytes it has. Source: libjpeg-turbo, Two Issues with the JPEG Standard.
MAX_SCANS, MAX_SEGMENTS = 50, 10_000
_SCAN, _END = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
# What other files begin with that are taken for images, from which byte on.
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
    "a path (str or Path), the bytes of an image file, a PIL image, or a uint8 array [height, width, channels] of "
    "numpy, RGB"
)


def decode(source: ImageSource, channels: int | None, name: str = "") -> Image.Image:
    """A decoded image in mode "RGB" (3 channels), "L" (1) or that of its file (None), upright by its EXIF orientation.

    `source` is a path, the bytes of a JPEG, PNG, WebP, BMP, TIFF, GIF or PPM file (the first frame or page is taken), a
    PIL image, or a uint8 array [height, width, channels], RGB. `name`: what messages call bytes.
    Broken metadata (EXIF, XMP, profiles, texts) is passed over: the image then lies as its pixels do.
    Size limits are checked from the header, before any pixel is decoded.

    Raises:
        MissingFileError: the path does not exist.
        ImageError: not a readable image, truncated, larger than 64 megapixels, 65,535 pixels a side or 64 MiB, or a
            JPEG file of more than 50 scans.
        TensorError: an array of another dtype or shape, or nothing that could be an image.
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
    """How an image lies: `size` is (width, height) of it upright, as `decode` gives it; `orientation` that of EXIF, 1
    to 8, by which it was turned."""

    size: tuple[int, int]
    orientation: int

    @property
    def stored(self) -> tuple[int, int]:
        """(width, height) of the pixels as the file has them."""
        return self.size[::-1] if self.orientation >= 5 else self.size


def image_frame(source: str | Path | bytes, name: str = "") -> Frame:
    """How the image of a path, or of the bytes of a file, lies: by its header, of a PNG by its pixels too, as its
    metadata may follow these.

    Raises:
        MissingFileError, ImageError: as `decode`.
    """
    from PIL import Image

    name = str(source) if isinstance(source, str | Path) else name or "the image bytes"
    if isinstance(source, str | Path):
        # Of what is whole no more is read than the header; what is not is read below, for `decode`'s own error.
        with contextlib.suppress(Exception), Image.open(source, formats=FORMATS) as image:
            check_decodable(image.width, image.height, name)
            return _frame(image)
    content = file_of(source)
    assert content is not None, "a path or bytes"
    return _read_image(content, _frame, name)


def _frame(image: Image.Image) -> Frame:
    turned = orientation_of(image)
    # Pillow's size of a TIFF is that before or after it is turned, by release; the tags are as they are.
    tags = getattr(image, "tag_v2", None)
    width, height = image.size if tags is None else (tags[256], tags[257])
    return Frame((height, width) if turned >= 5 else (width, height), turned)


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation of an open image, 1 to 8: 1 where nothing says it, or where what says it is broken."""
    if image.format == "PNG":
        image.load()  # metadata may follow the pixels; here, so that what is wrong with these is no fault of that
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # of the bytes of metadata, which are anybody's
        image.info.pop("xmp", None)  # which a TIFF would read again
        return 1
    return next((number for number in range(1, 9) if found == number), 1)


def in_rgb(image: ImageSource, channels: ChannelOrder) -> ImageSource:
    """The image as `decode` takes it, of an array whose channels are in this order, as those of `cv2.imread` are BGR.

    Raises:
        InputError: an order that is none, or "bgr" of anything but an array.
    """
    if channels == "rgb":
        return image
    if channels != "bgr":
        raise InputError("channels says the order of an array", found=repr(channels), expected='"rgb" or "bgr"')
    if not isinstance(image, np.ndarray):
        raise TensorError(
            'channels="bgr" is for arrays',
            found=runner.type_name(image),
            expected="a uint8 array [height, width, 3], such as cv2.imread gives",
            fix="leave channels out: files and PIL images say the order themselves",
        )
    return image[..., ::-1] if image.ndim == 3 and image.shape[2] == 3 else image


def file_of(source: object) -> bytes | bytearray | None:
    """What an image file holds, of a path or of the bytes themselves; None for what is no file.

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
        raise ImageError("the image bytes are too many", found=f"{size:,}", expected=f"at most {MAX_FILE_BYTES:,}")
    return bytes(source) if isinstance(source, memoryview) else source


def _no_image(value: object) -> TensorError:
    fix = ""
    if hasattr(value, "__dlpack__") or hasattr(value, "numpy"):
        fix = "pixels: tensor.numpy(force=True) as uint8 [height, width, channels]; what is normalised: predict_tensor"
    elif hasattr(value, "read"):
        fix = "give its bytes: file.read()"
    elif isinstance(value, list | tuple):
        fix = "several images: predict_batch"
    return TensorError("this is no image", found=runner.type_name(value), expected=ACCEPTED, fix=fix)


def _read_image(source: Image.Image | bytes | bytearray, read: Callable[[Image.Image], T], name: str) -> T:
    """What `read` finds in an open PIL image, which may not have read its file yet, or in the bytes of a file. A PNG
    that cannot be read is tried without its metadata."""
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
            fix="shrink it, or take it out of the folder",
        ) from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error ...
        bare = b"" if isinstance(source, Image.Image) else _without_metadata(source)
        if bare:
            return _read_image(bare, read, name)
        unknown = isinstance(error, UnidentifiedImageError)  # whose text names an object in memory
        raise ImageError(
            f"{name} cannot be read as an image",
            found=_kind_of(source) if unknown else str(error)[:200] or type(error).__name__,
            expected=f"a whole {READ} file",
            fix="replace it with one of these, or leave it out",
        ) from None


def _without_metadata(content: bytes | bytearray) -> bytes:
    """A PNG of its critical chunks alone, and of an EXIF chunk that is whole; b"" of another file, and of one that has
    no other chunks."""
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
    """Raise ImageError for an image without pixels, or one that takes more than is allowed to decode, of which only the
    header was read."""
    if min(width, height) < 1:
        raise ImageError(f"{name} has no pixels", found=f"{width}x{height}", expected="a width and a height above 0")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ImageError(
            f"{name} is too large to decode",
            found=f"{width}x{height} pixels",
            expected=f"at most {MAX_PIXELS:,} pixels, and {MAX_SIDE:,} a side",
            fix="shrink it, or take it out of the folder",
        )


def _kind_of(source: Image.Image | bytes | bytearray) -> str:
    """What Pillow does not know, in words."""
    start = source[:64] if isinstance(source, bytes | bytearray) else b""
    if not start and isinstance(source, bytes | bytearray):
        return "an empty file"
    named = next((name for at, magic, name in _OTHERS if start[at:].startswith(magic)), None)
    return named or "bytes of another kind, or a broken header"


def _to_mode(image: Image.Image, mode: str | None) -> Image.Image:
    """Upright, in `mode`: transparency is dropped, and of 16 bits the upper 8 are kept. None: as it is, but upright."""
    from PIL import Image

    turned = orientation_of(image)
    image.load()  # which turns a TIFF, of whatever release Pillow is
    upright = image if turned == 1 or hasattr(image, "tag_v2") else image.transpose(Image.Transpose(_TURNS[turned]))
    if mode is None:
        return upright
    if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow's own conversion to 8 bits clips, which leaves a white image.
        upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
    if upright.mode in ("I", "F"):  # 32 bits, of which nobody says what is white; Pillow would clip them at 255
        raise ValueError(f"pixels of 32 bits (mode {upright.mode})")
    if upright.mode == "P" and "transparency" in upright.info:
        upright = upright.convert("RGBA")
    return upright if upright.mode == mode else upright.convert(mode)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
    except (OSError, ValueError):  # ValueError: a NUL in the name
        raise MissingFileError(f"no image at {path}", fix="check the path") from None
    if not path.is_file() or size > MAX_FILE_BYTES:
        raise ImageError(
            f"{path} is not an image file of a sane size",
            found=f"{size:,} bytes",
            expected=f"a regular file of at most {MAX_FILE_BYTES:,} bytes",
            fix="shrink it, or take it out of the folder",
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(
            f"{path} cannot be read",
            found=error.strerror or str(error),
            expected="a file that this user may read",
            fix="look at its owner and rights, or take it out of the folder",
        ) from None


def check_scans(content: bytes | bytearray, name: str) -> None:
    """Raise ImageError for a JPEG file of more scans than an encoder writes; what is behind its end does not count."""
    if not content.startswith(b"\xff\xd8"):
        return
    if content.count(bytes([0xFF, _SCAN])) > MAX_SCANS and _scans(content) > MAX_SCANS:
        raise ImageError(
            f"{name} would take too long to decode",
            found=f"a JPEG file of more than {MAX_SCANS} scans",
            expected=f"at most {MAX_SCANS}; encoders write about ten",
            fix="save it again as a JPEG or PNG file, or take it out of the folder",
        )


def _scans(data: bytes | bytearray) -> int:
    """The scans of a JPEG file up to its end; MAX_SCANS + 1 where there are more of anything than is looked at."""
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

    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3)):
        raise TensorError(
            "an image array must be uint8 [height, width, channels] with 1 or 3 channels",
            found=f"{array.dtype} {list(array.shape)}",
            expected="uint8 [height, width, 3]",
        )
    if 0 in array.shape:
        raise TensorError("an image array must not be empty", found=str(list(array.shape)), expected="height, width > 0")
    squeezed = array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array
    return Image.fromarray(np.ascontiguousarray(squeezed)).convert(mode)


def resize_and_crop(image: Image.Image, spec: PreprocessSpec, box: topdown.Box | None = None) -> Pixels:
    """uint8 [crop height, crop width, channels]: resized as `spec.resize` says, then the centre crop; for a top-down
    model what is in `box`, or the whole image (`runtime.topdown`).

    An image smaller than the crop is padded with zeros around it, as torchvision's CenterCrop does.

    Raises:
        ImageError: so long and thin that resizing it would take more than 64 megapixels.
        InputError: no box, or one for a model that sees whole images.
    """
    from PIL import Image

    if spec.fit == "topdown":
        return topdown.cut_out(image, box, (spec.crop[1], spec.crop[0]))
    if box is not None:
        raise InputError(
            "a box is given, but the model sees whole images",
            found=f"images that are prepared with fit {spec.fit}",
            expected="a top-down model, such as one for key points",
            fix="leave the box out, or give the part of the image that is in it",
        )
    width, height = image.size
    size = resized_size(width, height, spec)
    if size != (width, height):
        if size[0] * size[1] > MAX_PIXELS:
            raise ImageError(
                "an image is too long and thin",
                found=f"{width}x{height} pixels, which resizing makes {size[0]}x{size[1]}",
                expected=f"at most {MAX_PIXELS:,} pixels",
                fix="crop it, or take it out of the folder",
            )
        image = image.resize(size, Image.Resampling[spec.interpolation.upper()])
    return crop_resized(image, spec)


def crop_resized(image: Image.Image, spec: PreprocessSpec) -> Pixels:
    """uint8 [crop height, crop width, channels] of an image that has been resized as `spec.resize` says."""
    pixels = np.asarray(image, dtype=np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return _padded(pixels, spec) if spec.fit == "longest-pad" else _centre_crop(pixels, spec)


def resized_size(width: int, height: int, spec: PreprocessSpec) -> tuple[int, int]:
    """(width, height) that an image is resized to.

    A long side is truncated to whole pixels as in torchvision, and so is what fits into a size, as in transformers'
    DonutImageProcessor; what covers a size is rounded as in timm's ResizeKeepRatio, and what is padded beside its
    longer side as in SAM's ResizeLongestSide.
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
    """(width, height) that just fits into a box of (height, width): the short side as the box's, and less of both where
    the long one does not fit. Truncated at both."""
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
    """Where the centre crop of a side begins, in its pixels; negative where that many are added before it.

    Half of what is missing is rounded down, as in torchvision's CenterCrop.
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
    """The pixels at the top left, and beside them `fill`, or the grey levels nearest to the mean. SAM pads what is
    normalised with 0; that is 0.5 / 255 / std off at most, which whole grey levels cannot be nearer."""
    filled = np.empty((*spec.crop, spec.channels), np.uint8)
    filled[:] = np.rint(255 * np.asarray(spec.statistics[0])).clip(0, 255) if spec.fill is None else spec.fill
    filled[: pixels.shape[0], : pixels.shape[1]] = pixels
    return filled


def load_pixels(source: ImageSource, spec: PreprocessSpec, box: topdown.Box | None = None) -> Pixels:
    """uint8 [crop height, crop width, channels] of any image source; errors as `decode` and `resize_and_crop`."""
    return load_image(source, spec, box)[0]


def load_image(
    source: ImageSource, spec: PreprocessSpec, box: topdown.Box | None = None, name: str = ""
) -> tuple[Pixels, tuple[int, int]]:
    """The pixels as `load_pixels`, and (width, height) of the upright image that they were made from. `name`: what
    messages call bytes."""
    image = decode(source, spec.channels, name)
    return resize_and_crop(image, spec, box), image.size


def normalise(pixels: Pixels, spec: PreprocessSpec) -> npt.NDArray[np.float32]:
    """float32 [batch, channels, height, width] of uint8 [batch, height, width, channels]: (x / 255 - mean) / std, the
    channels in the model's order."""
    mean = np.asarray(spec.mean, np.float32)
    std = np.asarray(spec.std, np.float32)
    ordered = pixels[..., ::-1] if spec.channel_order == "bgr" else pixels
    scaled = (ordered.astype(np.float32) / np.float32(255) - mean) / std
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def to_input(pixels: Sequence[Pixels] | Pixels, spec: PreprocessSpec, tensor: TensorSpec) -> npt.NDArray[Any]:
    """The array that a model's input tensor wants: uint8 NHWC as it is, or normalised float32 NCHW."""
    batch = np.ascontiguousarray(np.stack(list(pixels)))
    return batch if tensor.dtype == "uint8" else normalise(batch, spec)
