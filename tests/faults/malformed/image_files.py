"""300 image files: PNG, JPEG, WebP, GIF, BMP and TIFF whose structure lies, images of absurd sizes, other files."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator

from tests.faults.malformed import bytewise, places
from tests.faults.malformed.bundle_files import copied
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns
from tests.faults.seeds import FORMATS, encoded, picture

FILE = "given/image"
PREDICT = ("predict", "given/bundle", FILE, "--target", "onnxruntime-cpu")
LOAD = ("vitdeploy.load", "given/bundle", FILE, "onnxruntime-cpu")
IMAGES = Table()
Change = Callable[[random.Random], bytes]


def case(name: str, *, must_refuse: bool = False) -> Callable[[Change], Change]:
    """A class of files: chance -> the bytes."""

    def added(change: Change) -> Change:
        @IMAGES.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            copied(attempt)
            attempt.write("image", change(attempt.random))

        return change

    return added


def _bytewise(kind: str, names: tuple[str, ...]) -> None:
    @case(f"{kind}: {', '.join(names)}")
    def _any(chance: random.Random) -> bytes:
        return bytewise.MUTATIONS[chance.choice(names)](chance, encoded(kind))


for _kind in FORMATS:
    _bytewise(_kind, ("cut short", "cut short in its head", "a piece cut out"))
    _bytewise(_kind, ("one bit", "some bytes", "a number at an edge", "some bytes of its head"))


# --- PNG: W3C, Portable Network Graphics (Third Edition) -------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, content: bytes, *, length: int | None = None, crc: int | None = None) -> bytes:
    found = zlib.crc32(kind + content) if crc is None else crc
    return struct.pack(">I", len(content) if length is None else length) + kind + content + struct.pack(">I", found)


def chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(PNG)
    while at < len(data):
        size = struct.unpack_from(">I", data, at)[0]
        yield data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        at += size + 12


def png(
    width: int, height: int, bits: int = 8, kind: int = 2, *, extra: bytes = b"", data: bytes | None = None
) -> bytes:
    """A PNG of one colour; rows of zeros pack a thousandfold."""
    header = struct.pack(">2I5B", width, height, bits, kind, 0, 0, 0)
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(kind, 3)
    if data is None:
        packer = zlib.compressobj(1)
        row = bytes(1 + -(-width * channels * bits // 8))
        step = max(1, (1 << 20) // len(row))
        parts = [packer.compress(row * min(step, height - at)) for at in range(0, height, step)]
        data = b"".join([*parts, packer.flush()])
    return PNG + chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@case("png: a header that lies")
def _png_header(chance):
    width, height = chance.choice(
        ((0, 8), (8, 0), (1 << 31, 8), (8, (1 << 31) - 1), (1 << 16, 1 << 16), (4, 4), (99, 99))
    )
    body = dict(chunks(encoded("png")))[b"IDAT"]
    return png(width, height, data=body)


@case("png: depths and kinds that there are not")
def _png_kind(chance):
    return png(
        8,
        8,
        chance.choice((0, 1, 3, 5, 16, 255)),
        chance.choice((0, 1, 2, 3, 5, 6, 255)),
        data=zlib.compress(bytes(999)),
    )


@case("png: chunks that lie, in disorder, missing, doubled")
def _png_chunks(chance):
    parts = list(chunks(encoded("png")))
    how = chance.randrange(6)
    if how == 0:
        chance.shuffle(parts)
    elif how == 1:
        parts.remove(chance.choice(parts))
    elif how == 2:
        parts.insert(1, parts[0])
    elif how == 3:
        parts[1:1] = [(b"IDAT", b"")] * 5000
    elif how == 4:
        parts.insert(
            1, (chance.choice((b"xxxx", b"XXXX", b"\0\0\0\0", b"acTL", b"fcTL", b"PLTE")), chance.randbytes(26))
        )
    else:
        length = chance.choice((0, 1, 1 << 31, (1 << 32) - 1))
        return PNG + b"".join(chunk(kind, content) for kind, content in parts[:1]) + chunk(b"IDAT", b"x", length=length)
    wrong = chance.choice((None, 0))
    return PNG + b"".join(chunk(kind, content, crc=wrong) for kind, content in parts)


@case("png: text and profiles that expand")
def _png_bomb(chance):
    bomb = zlib.compress(bytes(chance.choice((1 << 20, 300 << 20))), 1)
    kind = chance.choice((b"zTXt", b"iCCP", b"iTXt"))
    prefix = b"k\0\0" if kind != b"iTXt" else b"k\0\1\0\0\0"
    return png(8, 8, extra=chunk(kind, prefix + bomb) * chance.choice((1, 3)))


@case("png: more pixels than the header says")
def _png_more(chance):
    return png(8, 8, data=zlib.compress(bytes(chance.choice((0, 7, 100_000, 200 << 20))), 1))


@case("png: palettes")
def _png_palette(chance):
    palette = chunk(b"PLTE", bytes(chance.choice((0, 1, 3, 4, 768, 3000)))) if chance.random() < 0.8 else b""
    return png(
        8, 8, chance.choice((1, 8)), 3, extra=palette + chunk(b"tRNS", bytes(999)), data=zlib.compress(b"\0\xff" * 99)
    )


@case("1 x 64,000,000 pixels and other long ones")
def _long(chance):
    width, height = chance.choice(((1, 64_000_000), (64_000_000, 1), (2, 32_000_000), (1, 1_000_000), (30_000_000, 2)))
    return png(width, height, kind=chance.choice((0, 2)))


@case("as many pixels as are allowed, and one more")
def _large(chance):
    side = chance.choice((7999, 8000, 8001))
    return png(8000, side, bits=chance.choice((1, 8)), kind=0)


@case("pixels by the gigabyte", must_refuse=True)
def _bomb(chance):
    side = chance.choice((8200, 20_000, 60_000))
    return png(side, side, bits=1, kind=0)


# --- JPEG: ITU-T T.81, annex B ----------------------------------------------------------------------------------------


def segments(data: bytes) -> list[tuple[int, int, int]]:
    """(marker, where it begins, where it ends) up to the first scan."""
    found, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        size = struct.unpack_from(">H", data, at + 2)[0]
        found.append((data[at + 1], at, at + 2 + size))
        at += 2 + size
        if found[-1][0] == 0xDA:
            break
    return found


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


@case("jpeg: sizes in its frame")
def _jpeg_size(chance):
    data = encoded("jpeg")
    start = next(begin for marker, begin, _ in segments(data) if marker in (0xC0, 0xC2))
    sizes = ((0, 24), (24, 0), (65535, 65535), (65535, 1), (1, 65535), (8000, 8000), (1000, 1000))
    return data[: start + 5] + struct.pack(">2H", *chance.choice(sizes)) + data[start + 9 :]


@case("jpeg: segments that lie, missing, doubled")
def _jpeg_segments(chance):
    data = encoded("jpeg")
    _, begin, end = chance.choice(segments(data))
    how = chance.randrange(4)
    if how == 0:
        return data[:begin] + data[end:]
    if how == 1:
        return data[:end] + data[begin:end] * chance.choice((1, 500)) + data[end:]
    if how == 2:
        return data[: begin + 2] + struct.pack(">H", chance.choice((0, 1, 2, 0xFFFF))) + data[begin + 4 :]
    return (
        data[: begin + 1]
        + bytes([chance.choice((0xC1, 0xC3, 0xC9, 0xCB, 0xD0, 0xDD, 0xFE, 0, 0xFF))])
        + data[begin + 2 :]
    )


@case("jpeg: very many scans")
def _jpeg_scans(chance):
    """Each goes through all blocks of a picture that is large: 'two hundred bytes a second'."""
    data = encoded("jpeg", picture(24), progressive=True)
    start = next(begin for marker, begin, _ in segments(data) if marker == 0xC2)
    large = data[: start + 5] + struct.pack(">2H", *chance.choice(((8000, 8000), (4000, 4000)))) + data[start + 9 :]
    scan = next(begin for marker, begin, _ in segments(data) if marker == 0xDA)
    return large[:scan] + large[scan:-2] * chance.choice((10, 500)) + large[-2:]


@case("jpeg: EXIF that lies")
def _jpeg_exif(chance):
    orientation = chance.choice((0, 1, 3, 6, 8, 9, 99, 0xFFFF))
    count, kind = chance.choice((1, 0, 1 << 31)), chance.choice((3, 4, 2, 99))
    entry = struct.pack(">2HI2H", 0x0112, kind, count, orientation, 0)
    following = chance.choice((0, 8, 1 << 31))  # the second: a list of entries that follows itself
    entries = entry * chance.choice((1, 1, 3000))
    exif = b"Exif\0\0MM\0*" + struct.pack(">IH", chance.choice((8, 8, 0, 1 << 31)), len(entries) // 12) + entries
    data = encoded("jpeg")
    return data[:2] + _segment(0xE1, (exif + struct.pack(">I", following))[:65_000]) + data[2:]


@case("jpeg: rare pixels")
def _jpeg_rare(chance):
    image = picture().convert(chance.choice(("CMYK", "L", "RGB")))
    options = {"quality": chance.choice((1, 100)), "icc_profile": b"x" * chance.choice((0, 70_000))}
    return encoded("jpeg", image, **options)


# --- GIF, WebP, BMP, TIFF ---------------------------------------------------------------------------------------------


@case("gif: sizes, frames and codes that lie")
def _gif(chance):
    data = encoded("gif")
    how = chance.randrange(4)
    if how == 0:
        return data[:6] + struct.pack("<2H", *chance.choice(((0, 0), (65535, 65535), (1, 65535), (4, 4)))) + data[10:]
    if how == 1:
        return data[:10] + bytes([chance.choice((0, 0x80, 0xFF))]) + data[11:]
    at = data.rfind(b"\x2c")
    if how == 2:
        return data[: at + 1] + struct.pack("<4H", *chance.choices((0, 1, 24, 65535), k=4)) + data[at + 9 :]
    code = data.find(b"\x08", at)
    return data[:code] + bytes([chance.choice((0, 1, 12, 13, 255))]) + data[code + 1 :]


@case("gif: very many frames")
def _gif_frames(chance):
    frames = [picture(8, seed) for seed in range(4)]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames * chance.choice((2, 100)))
    return stream.getvalue()


@case("webp: chunks and sizes that lie")
def _webp(chance):
    data = encoded("webp", lossless=chance.random() < 0.5)
    how = chance.randrange(3)
    if how == 0:
        return data[:4] + struct.pack("<I", chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF))) + data[8:]
    if how == 1:
        return data[:16] + struct.pack("<I", chance.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF))) + data[20:]
    extended = (
        b"VP8X" + struct.pack("<I", 10) + bytes([chance.choice((0, 2, 0x3E, 0xFF)), 0, 0, 0]) + b"\xff\xff\xff" * 2
    )
    body = extended + data[12:]
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


@case("bmp: headers that lie")
def _bmp(chance):
    data = encoded("bmp")
    offset, kind, values = chance.choice(
        (
            (2, "<I", (0, 0xFFFFFFFF)),
            (10, "<I", (0, 1, 14, 0x7FFFFFFF)),
            (14, "<I", (0, 12, 16, 64, 108, 124, 0x7FFFFFFF)),
            (18, "<i", (0, -1, 65_000, 0x7FFFFFFF)),
            (22, "<i", (0, -24, -(1 << 31), 65_000, 0x7FFFFFFF)),
            (26, "<H", (0, 2, 0xFFFF)),
            (28, "<H", (0, 1, 2, 4, 16, 32, 33)),
            (30, "<I", (1, 2, 3, 4, 5, 99)),
            (46, "<I", (1, 257, 0x7FFFFFFF)),
        )
    )
    return data[:offset] + struct.pack(kind, chance.choice(values)) + data[offset + struct.calcsize(kind) :]


def tiff(entries: list[tuple[int, int, int, int]], pixels: bytes = bytes(300), following: int = 0) -> bytes:
    """Little-endian: header, one list of entries (tag, kind, count, value), pixels. TIFF 6.0, section 2."""
    body = struct.pack("<H", len(entries)) + b"".join(struct.pack("<2H2I", *each) for each in entries)
    return b"II*\0" + struct.pack("<I", 8) + body + struct.pack("<I", following) + pixels


@case("tiff: entries that lie")
def _tiff(chance):
    whole = {256: 8, 257: 8, 258: 8, 259: 1, 262: 1, 273: 200, 277: 1, 278: 8, 279: 64}
    tag = chance.choice([*whole, 322, 323, 324, 317, 338, 339, 34377, 34675])
    whole[tag] = chance.choice((0, 1, 3, 5, 7, 8, 32, 34712, 65535, 1 << 24, (1 << 32) - 1))
    kinds = (chance.choice((1, 2, 3, 4, 5, 12, 13, 99)), 4)
    entries = [
        (key, kinds[key != tag], chance.choice((1, 1 << 28)) if key == tag else 1, value)
        for key, value in sorted(whole.items())
    ]
    return tiff(entries * chance.choice((1, 1, 1, 400)), following=chance.choice((0, 0, 8, 1 << 31)))


@case("tiff: compressions, and kinds of pixels")
def _tiff_kinds(chance):
    mode = chance.choice(("1", "L", "I;16", "F", "CMYK", "RGBA", "LAB"))
    image = picture().convert("L").convert(mode) if mode in ("1", "I;16", "F") else picture().convert("RGB")
    image = image if mode in ("1", "I;16", "F", "LAB") else image.convert(mode)
    compression = chance.choice((None, "tiff_lzw", "tiff_adobe_deflate", "packbits"))
    data = encoded("tiff", image, **({"compression": compression} if compression else {}))
    return bytewise.some_bytes(chance, data) if chance.random() < 0.5 else data


# --- others -----------------------------------------------------------------------------------------------------------


@case("files that are no images", must_refuse=True)
def _no_image(chance):
    others = (
        *bytewise.OTHER_FILES,
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/etc/passwd) (r) file\n",
        b"P6 8 8 255\n" + bytes(192),
        b"SIMPLE  =                    T" + b" " * 2850,
        b"\x00\x00\x00\x18ftypheic" + bytes(64),
        b"\x00\x00\x00\x18ftypavif" + bytes(64),
        b"icns" + bytes(64),
        b"\0\0\1\0\1\0" + bytes(64),
        b"8BPS\0\1" + bytes(64),
        b"/* XPM */\n",
        b"#define x_width 8\n#define x_height 8\n",
        b"GIF89a",
        PNG,
        b"\xff\xd8\xff\xd9",
        b"BM",
        b"II*\0",
        b"RIFF\0\0\0\0WEBP",
    )
    return chance.choice(others)


@case("two files in one")
def _polyglot(chance):
    return encoded(chance.choice(FORMATS)) + chance.choice(
        (b"PK\x05\x06" + bytes(18), encoded("png"), b"%PDF-1.7", bytes(9))
    )


@IMAGES.add("something else in its place", must_refuse=True)
def _place(attempt: Attempt) -> None:
    copied(attempt)
    places.another(attempt.random, attempt.given / "image")


@IMAGES.add("an odd name", must_refuse=True)
def _name(attempt: Attempt) -> None:
    copied(attempt)
    odd = [
        name
        for name in places.ODD_NAMES
        if "\0" not in name and "\ud800" not in name and name not in ("-rf", "/dev/stdin")
    ]
    name = attempt.random.choice(odd)
    attempt.words = (*attempt.words[:2], name, *attempt.words[3:])


def whole(attempt: Attempt) -> None:
    copied(attempt)
    attempt.write("image", attempt.seeds.image("png"))


KIND = Kind(
    "images",
    full=300,
    damages=tuple(IMAGES),
    words=in_turns(LOAD, PREDICT, LOAD),
    whole=whole,
    commands=(LOAD, PREDICT),
)
