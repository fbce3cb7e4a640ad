"""200 files of `torch.save` and of numpy: damaged archives, pickles that would run something, storages that lie.

What the pickles would run is harmless: it writes a file, and where that file is there afterwards, something was run.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib import format as npy

from tests.faults.malformed import bytewise, places
from tests.faults.malformed.kinds import Attempt, Damage, Kind, Table, in_turns
from tests.faults.seeds import BUILT_IN

FILE = "given/weights.pt"
NAMED = ("vitdeploy.model", BUILT_IN, FILE)
ALONE = ("vitdeploy.model", "", FILE, "2")
PT = Table()

# --- pickles by hand --------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def called(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def state(value: bytes) -> bytes:
    """A pickle of {"head.weight": value}."""
    return pickled(b"}" + text("head.weight") + value + b"s")


def storage(key: str = "0", kind: str = "FloatStorage", count: int = 4) -> bytes:
    """A persistent id as `torch.save` writes one."""
    return b"(" + text("storage") + named("torch", kind) + text(key) + text("cpu") + _number(count) + b"tQ"


def tensor(store: bytes, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    numbers = [b"(" + b"".join(map(_number, each)) + b"t" for each in (size, stride)]
    rest = _number(offset) + numbers[0] + numbers[1] + b"\x89" + called("collections", "OrderedDict")
    return called("torch._utils", "_rebuild_tensor_v2", store, rest)


def _number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return pickle.dumps(value, 2)[2:-1]


def archive(pickle_bytes: bytes, storages: dict[str, bytes] | None = None, **options: Any) -> bytes:
    """A file of `torch.save` with these parts."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as made:
        made.writestr("archive/data.pkl", pickle_bytes)
        made.writestr("archive/byteorder", "little")
        for key, content in (storages or {"0": np.ones(4, "<f4").tobytes()}).items():
            made.writestr(f"archive/data/{key}", content)
        made.writestr("archive/version", "3\n")
    return stream.getvalue()


def legacy(pickle_bytes: bytes) -> bytes:
    """As before version 1.6: magic number, version, system, object, keys of storages."""
    system = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    parts = [pickle.dumps(each, 2) for each in (0x1950A86A20F9469CFC6C, 1001, system)]
    return b"".join([*parts, pickle_bytes, pickle.dumps([], 2)])


def either(attempt: Attempt, pickle_bytes: bytes) -> bytes:
    """In one of the three ways in which a pickle comes."""
    return attempt.random.choice((archive, legacy, bytes))(pickle_bytes)


Change = Callable[[Attempt], bytes]


def case(name: str, *, must_refuse: bool = True) -> Callable[[Change], Change]:
    def added(change: Change) -> Change:
        @PT.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            attempt.write("weights.pt", change(attempt))

        return change

    return added


# --- bytes ------------------------------------------------------------------------------------------------------------


def _bytewise(name: str, mutate: bytewise.Mutation) -> None:
    @PT.add(f"{name}, in an archive, the old format or .npz")
    def make(attempt: Attempt) -> None:
        seeds = attempt.seeds
        whole = attempt.random.choice((seeds.pt, seeds.pt, seeds.legacy, seeds.npz))
        attempt.write("weights.pt", mutate(attempt.random, whole.read_bytes()))


for _name in ("cut short", "one bit", "some bytes", "a number at an edge", "a piece cut out", "a piece repeated"):
    _bytewise(_name, bytewise.MUTATIONS[_name])


# --- what would run something -----------------------------------------------------------------------------------------


def _runs(attempt: Attempt) -> tuple[bytes, ...]:
    mark = str(attempt.mark)
    write = f"open({mark!r}, 'w').close()"
    return (
        called("posix", "system", text(f"touch '{mark}'")),
        called("os", "system", text(f"touch '{mark}'")),
        called("builtins", "exec", text(write)),
        called("builtins", "eval", text(write)),
        called("subprocess", "check_call", b"(" + text("touch") + text(mark) + b"l"),
        called("builtins", "open", text(mark), text("w")),
        called("runpy", "_run_code", text(write), b"}"),
        called("torch.serialization", "load", text(mark)),
        called("torch", "load", text(mark)),
        called("webbrowser", "open", text(f"file://{mark}")),
        called("importlib", "import_module", text("antigravity")),
        called("pathlib", "Path.touch", called("pathlib", "Path", text(mark))),
        called("numpy", "savetxt", text(mark), b"]"),
        called("torch.hub", "download_url_to_file", text("file:///etc/hostname"), text(mark)),
        called("_io", "open_code", text(mark)),
        called("builtins", "getattr", named("os", "path"), text("__builtins__")),
    )


@case("a pickle that runs something")
def _execute(attempt):
    return either(attempt, state(attempt.random.choice(_runs(attempt))))


@case("a pickle that runs something, found through STACK_GLOBAL")
def _stack_global(attempt):
    run = text("posix") + text("system") + b"\x93(" + text(f"touch '{attempt.mark}'") + b"tR"
    return either(attempt, b"\x80\x04" + b"}" + text("k") + run + b"s.")


@case("a pickle that runs something while an object is built")
def _build(attempt):
    """BUILD calls `__setstate__`, or sets the attributes of what lies below."""
    holder = attempt.random.choice((called("collections", "OrderedDict"), named("torch", "Tensor"), b"}", b"]"))
    inner = attempt.random.choice(_runs(attempt))
    return either(attempt, state(holder + b"}" + text("__setstate__") + inner + b"sb"))


@case("a pickle that runs something behind plain weights")
def _behind(attempt):
    whole = attempt.seeds.pt.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as read:
        parts = {name: read.read(name) for name in read.namelist()}
    name = next(each for each in parts if each.endswith("data.pkl"))
    parts[name] = parts[name][:-1] + attempt.random.choice(_runs(attempt)) + b"0."
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        for each, content in parts.items():
            made.writestr(each, content)
    return stream.getvalue()


@case("a persistent id that names what runs something")
def _persistent(attempt):
    run = attempt.random.choice(_runs(attempt))
    return either(attempt, state(b"(" + text("storage") + run + text("0") + text("cpu") + _number(4) + b"tQ"))


@case("extension codes and text ids")
def _extensions(attempt):
    return either(
        attempt, state(attempt.random.choice((b"\x82\x01", b"\x83\xff\xff", b"\x84\xff\xff\xff\x7f", b"Px\n")))
    )


@case("arrays of Python objects")
def _objects(attempt):
    """A `.npy` of dtype object is a pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made, made.open("head.npy", "w") as file:
        npy.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
        file.write(pickled(attempt.random.choice(_runs(attempt))))
    return stream.getvalue()


# --- opcodes ----------------------------------------------------------------------------------------------------------


@case("sizes in opcodes that lie")
def _opcode_sizes(attempt):
    huge = attempt.random.choice((1 << 24, (1 << 31) - 1, (1 << 32) - 1))
    wide = attempt.random.choice((1 << 40, (1 << 63) - 1, (1 << 64) - 1))
    choices = (
        b"X" + struct.pack("<I", huge) + b"x",
        b"\x8d" + struct.pack("<Q", wide) + b"x",
        b"\x8e" + struct.pack("<Q", wide) + b"x",
        b"\x96" + struct.pack("<Q", wide) + b"x",
        b"B" + struct.pack("<I", huge) + b"x",
        b"\x8b" + struct.pack("<i", 1 << 30) + b"x",
        b"\x8b" + struct.pack("<i", -1),
        b"\x95" + struct.pack("<Q", wide),
        b"I" + b"9" * 100_000 + b"\n",
        b"L" + b"9" * 100_000 + b"L\n",
        b"F1e999999\n",
        b"r" + struct.pack("<I", huge) + b"N",
        b"Nr" + struct.pack("<I", huge),
        b"j" + struct.pack("<I", huge),
    )
    return either(attempt, state(attempt.random.choice(choices)))


@case("a deep pickle")
def _deep(attempt):
    depth = attempt.random.choice((100, 5000, 1_000_000))
    opening, closing = attempt.random.choice(((b"]", b"a"), (b"(", b"t"), (b"}" + text("k"), b"s")))
    return either(attempt, state(opening * depth + b"N" + closing * depth))


@case("a pickle that grows")
def _grows(attempt):
    """Each tuple holds the one before twice: few bytes, and 2^n leaves for who walks them."""
    body = b"N"
    for _ in range(attempt.random.choice((20, 60, 5000))):
        body += b"2\x86"
    return either(attempt, state(body))


@case("an unbalanced pickle")
def _unbalanced(attempt):
    body = attempt.random.choice(
        (b"", b"t", b"R", b"(((", b"s", b"0" * 50, b"u", b"2" * 1000, b"1", b"\x81", b"b", b"a")
    )
    ended = body + attempt.random.choice((b".", b"", b".."))
    return either(attempt, b"\x80\x02" + ended)


@case("opcodes and protocols that are none")
def _opcodes(attempt):
    start = attempt.random.choice((b"\x80\x02", b"\x80\xff", b"\x80\x00", b"", b"\x80"))
    return either(attempt, start + attempt.random.randbytes(attempt.random.choice((1, 30, 3000))) + b".")


@case("a plain value that is no state dict")
def _plain(attempt):
    values = (
        None,
        7,
        "text",
        [],
        {},
        {"a": 1},
        {1: 2},
        {"model": {}},
        [[[]]],
        b"x" * 100,
        {"state_dict": None},
        10**4000,
    )
    return either(attempt, pickle.dumps(attempt.random.choice(values), 2))


# --- storages ---------------------------------------------------------------------------------------------------------


def _lying(attempt: Attempt) -> bytes:
    big = attempt.random.choice((1 << 31, 1 << 40, (1 << 62) - 1, (1 << 63) - 1))
    return attempt.random.choice(
        (
            tensor(storage(), 0, (big,), (1,)),
            tensor(storage(), 0, (big, big), (0, 0)),
            tensor(storage(), big, (1,), (1,)),
            tensor(storage(), -1, (1,), (1,)),
            tensor(storage(), 0, (-1,), (1,)),
            tensor(storage(), 0, (4,), (-1,)),
            tensor(storage(), 0, (2, 2), (1 << 40, 1)),
            tensor(storage(), 0, (4, 4), (1,)),
            tensor(storage(count=big), 0, (4,), (1,)),
            tensor(storage(count=-1), 0, (4,), (1,)),
            tensor(storage(key="1"), 0, (4,), (1,)),
            tensor(storage(key="../data.pkl"), 0, (4,), (1,)),
            tensor(storage(key="../../../etc/passwd"), 0, (4,), (1,)),
            tensor(storage(key=""), 0, (4,), (1,)),
            tensor(storage(kind="DoubleStorage"), 0, (4,), (1,)),
            tensor(storage(kind="NoStorage"), 0, (4,), (1,)),
            tensor(storage(kind="Tensor"), 0, (4,), (1,)),
            tensor(text("no storage"), 0, (4,), (1,)),
        )
    )


@case("storages that lie")
def _storages(attempt):
    body = state(_lying(attempt))
    return archive(body) if attempt.random.random() < 0.8 else legacy(body)


@case("a weight that repeats one number very often")
def _expanded(attempt):
    """Strides of zero: four bytes stand for terabytes, for who copies them."""
    side = attempt.random.choice((1 << 10, 1 << 17, 1 << 20))
    return archive(state(tensor(storage(), 0, (side, side), (0, 0))))


@case("numbers of rare types")
def _types(attempt):
    kinds = ("ComplexFloatStorage", "QInt8Storage", "BoolStorage", "LongStorage", "HalfStorage", "ByteStorage")
    return archive(state(tensor(storage(kind=attempt.random.choice(kinds), count=2), 0, (2,), (1,))))


@case("weights in eight bits", must_refuse=False)
def _float8(attempt):
    import torch

    weights = torch.load(attempt.seeds.pt, weights_only=True)
    kind = attempt.random.choice((torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.complex64))
    stream = io.BytesIO()
    torch.save({key: value.to(kind) for key, value in weights.items()}, stream)
    return stream.getvalue()


@case("tensors of other kinds")
def _tensor_kinds(attempt):
    import torch

    odd = attempt.random.choice(
        (
            torch.ones(4).to_sparse(),
            torch.ones(4, device="meta"),
            torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            torch.tensor(float("nan")),
            torch.ones(0),
        )
    )
    stream = io.BytesIO()
    torch.save({"head.weight": odd, "head.bias": torch.ones(4)}, stream)
    return stream.getvalue()


# --- archives ---------------------------------------------------------------------------------------------------------


def _entries(data: bytes) -> list[int]:
    """Where the headers of its files are, in the central directory."""
    found, at = [], data.find(b"PK\x01\x02")
    while at >= 0:
        found.append(at)
        at = data.find(b"PK\x01\x02", at + 4)
    return found


def _patched(chance: random.Random, data: bytes, offset: int, kind: str, values: tuple[int, ...]) -> bytes:
    """A number of a file's entry changed."""
    at, size = chance.choice(_entries(data)) + offset, struct.calcsize(kind)
    return data[:at] + struct.pack("<" + kind, chance.choice(values)) + data[at + size :]


@case("an archive whose directory lies", must_refuse=False)
def _directory(attempt):
    """Version, flags, method, CRC-32, sizes, length of the name, offset: APPNOTE.TXT 4.3.12."""
    whole = attempt.random.choice((attempt.seeds.pt, attempt.seeds.npz)).read_bytes()
    fields = (
        (6, "H", (0, 45, 63, 99, 0xFFFF)),
        (8, "H", (1, 1 << 6, 1 << 11, 1 << 13, 0xFFFF)),
        (10, "H", (1, 8, 9, 12, 14, 93, 99)),
        (16, "I", (0, 0xFFFFFFFF)),
        (20, "I", (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)),
        (24, "I", (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)),
        (28, "H", (0, 1, 0xFFFF)),
        (30, "H", (1, 0xFFFF)),
        (42, "I", (1, 0x7FFFFFFF, 0xFFFFFFFF)),
    )
    return _patched(attempt.random, whole, *attempt.random.choice(fields))


@case("compressed by damaged LZMA, bzip2 or deflate")
def _compressed(attempt):
    method = attempt.random.choice((zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        for key in ("a.npy", "b.npy"):
            buffer = io.BytesIO()
            np.save(buffer, np.arange(1000, dtype=np.float32))
            made.writestr(key, buffer.getvalue())
    data = bytearray(stream.getvalue())
    for _ in range(attempt.random.choice((1, 20))):
        data[attempt.random.randrange(40, len(data) // 2)] ^= 0xFF
    return bytes(data)


@case("names that are no text")
def _names(attempt):
    data = archive(state(tensor(storage(), 0, (4,), (1,))))
    odd = attempt.random.choice((b"\xff" * 8, b"../../..", b"/archive", b"arch\0ive", b"C:\\archi"))
    return data.replace(b"archive/", odd)


@case("names of very many, doubled and missing files")
def _members(attempt):
    how = attempt.random.randrange(3)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        if how == 0:
            for index in range(attempt.random.choice((2000, 60_000))):
                made.writestr(f"k{index}.npy", b"")
        elif how == 1:
            made.writestr("archive/data.pkl", pickle.dumps({}, 2))
            made.writestr("archive/data.pkl ", pickle.dumps({}, 2))
        else:
            made.writestr("archive/version", "3\n")
    return stream.getvalue().replace(b"data.pkl ", b"data.pkl\0") if how == 1 else stream.getvalue()


@case("a bomb")
def _bomb(attempt):
    """Zeros, which deflate packs a thousandfold."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made:
        if attempt.random.random() < 0.5:
            with made.open("a.npy", "w") as file:
                npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (100 << 20,)})
                for _ in range(100):
                    file.write(bytes(4 << 20))
        else:
            with made.open("archive/data.pkl", "w") as file:
                for _ in range(100):
                    file.write(bytes(4 << 20))
    return stream.getvalue()


@case("arrays of numpy whose headers lie")
def _arrays(attempt):
    headers = (
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }",
        b"{'descr': '<f4', 'fortran_order': 1, 'shape': 4, }",
        b"{'descr': [('a', '<f4')] * 3, 'fortran_order': False, 'shape': (4,), }",
        b"{'descr': '<f4', 'shape': (4,), }",
        b"{" + b"(" * 5000 + b"}",
        b"__import__('os').system('true')",
        b"{'descr': '" + b"f4," * 3000 + b"', 'fortran_order': False, 'shape': (), }",
        b"\xff" * 64,
        b"",
    )
    header = attempt.random.choice(headers)
    version = attempt.random.choice((b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    length = struct.pack("<H" if version[0] == 1 else "<I", attempt.random.choice((len(header), 0xFFFF)))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("head.npy", b"\x93NUMPY" + version + length + header + bytes(16))
    return stream.getvalue()


@case("a program with its weights")
def _script(attempt):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps({}, 2))
        made.writestr("archive/constants.pkl", pickle.dumps((), 2))
        made.writestr("archive/code/__torch__.py", f"open({str(attempt.mark)!r}, 'w')")
        made.writestr("archive/version", "3\n")
    return stream.getvalue()


@PT.add("something else in its place", must_refuse=True)
def _place(attempt: Attempt) -> None:
    places.another(attempt.random, attempt.given / "weights.pt")


PT.append(
    Damage(
        "another kind of file",
        lambda attempt: attempt.write("weights.pt", bytewise.another_file(attempt.random, b"")) and None,
        must_refuse=True,
    )
)


def whole(attempt: Attempt) -> None:
    attempt.write("weights.pt", attempt.seeds.pt.read_bytes())


KIND = Kind(
    ".pt and .npz",
    full=200,
    damages=tuple(PT),
    words=in_turns(NAMED, ALONE),
    whole=whole,
    commands=(NAMED, ALONE),
)
