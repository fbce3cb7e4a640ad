"""400 bundles: folders whose manifest or files were changed, and packed files that `bundle pack` did not write."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.malformed import bytewise, places, trees
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns
from tests.faults.sandbox import Words
from tests.faults.seeds import relisted

FOLDER, PACKED, IMAGE = "given/bundle", "given/bundle.vitb", "given/image.png"
INSPECT = ("inspect", FOLDER)
VERIFY = ("bundle", "verify", FOLDER)
LOAD = ("vitdeploy.load", FOLDER, IMAGE)
PREDICT = ("predict", FOLDER, IMAGE)
PACK = ("bundle", "pack", FOLDER, "-o", "out")
UNPACK = ("bundle", "unpack", PACKED, "-o", "out")
VERIFY_PACKED = ("bundle", "verify", PACKED)
FOLDERS = Table()
ARCHIVES = Table()
MANIFEST = "manifest.json"


def copied(attempt: Attempt) -> tuple[Path, Any]:
    """A bundle and an image; its manifest."""
    folder = attempt.given / "bundle"
    shutil.copytree(attempt.seeds.bundle, folder)
    attempt.write("image.png", attempt.seeds.image("png"))
    return folder, json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def written(folder: Path, document: Any) -> None:
    content = document if isinstance(document, bytes | str) else json.dumps(document)
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    (folder / MANIFEST).write_bytes(data)


def manifest(
    name: str, *, must_refuse: bool = False, words: tuple[Words, ...] = ()
) -> Callable[[trees.Change], trees.Change]:
    """A class of damage to the manifest: (chance, document) -> another, or text. `words`: what is to notice it."""

    def added(change: trees.Change) -> trees.Change:
        @FOLDERS.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            folder, document = copied(attempt)
            written(folder, change(attempt.random, document))
            attempt.words = attempt.random.choice(words) if words else attempt.words

        return change

    return added


trees.add_each(lambda name: manifest(f"manifest: {name}"))


@manifest("another format", must_refuse=True)
def _format(chance, document):
    return {**document, "format": chance.choice((0, 2, -1, 10**30, "1", None, 1.5, True, []))}


@manifest("another task")
def _task(chance, document):
    tasks = (
        "detection",
        "segmentation",
        "zero-shot",
        "sequence",
        "depth",
        "tensors",
        "",
        None,
        "\x1b",
        "image-to-text",
    )
    return {**document, "task": chance.choice(tasks)}


@manifest("preprocessing of absurd sizes", must_refuse=True)
def _preprocess(chance, document):
    key, value = chance.choice(
        (
            ("crop", [1 << 20, 1 << 20]),
            ("crop", [0, 8]),
            ("crop", [-8, 8]),
            ("crop", 8),
            ("resize", 1 << 40),
            ("resize", 0),
            ("resize", [8, 8, 8]),
            ("mean", [0.5] * 2),
            ("std", [0, 0, 0]),
            ("std", [-1, 1, 1]),
            ("mean", ["0.5"] * 3),
            ("interpolation", "cubist"),
            ("fit", "none"),
        )
    )
    return {**document, "preprocess": {**document["preprocess"], key: value}}


@manifest("an image of another size than the engine takes")
def _other_size(chance, document):
    side = chance.choice((7, 16, 8192))
    return {
        **document,
        "preprocess": {**document["preprocess"], "crop": [side, side], "resize": chance.choice((1, 8192))},
    }


@manifest("a mean or a deviation that is no number")
def _no_number(chance, document):
    """JSON has none, and Python's reader takes them."""
    text = json.dumps(document)
    return text.replace(
        "0.5", chance.choice(("NaN", "Infinity", "-Infinity", "1e999", "5e-324")), chance.choice((1, 6))
    )


@manifest("paths that lead outside", must_refuse=True)
def _outside(chance, document):
    name = chance.choice(
        ("../image.png", "/etc/passwd", "C:x", "..\\x", "a/../../image.png", "./model.onnx", "", ".", "..")
    )
    how = chance.randrange(4)
    if how == 0:
        document["files"][0]["path"] = name
    elif how == 1:
        document["labels"] = name
    elif how == 2:
        document["engines"][0]["files"][0] = document["engines"][0]["graph"] = name
    else:
        document["golden"]["inputs"] = name
    return document


@manifest("paths outside, listed as well", must_refuse=True)
def _listed(chance, document):
    name = chance.choice(("../image.png", "/etc/passwd", "engines/../../image.png"))
    document["files"].append({"path": name, "bytes": 1, "sha256": "0" * 64})
    document["labels"] = name
    return document


@manifest("odd names of files", must_refuse=True)
def _odd(chance, document):
    chance.choice(document["files"])["path"] = chance.choice(places.ODD_NAMES)
    return document


@manifest("digests and sizes that lie", must_refuse=True, words=(INSPECT, VERIFY, PACK))
def _digest(chance, document):
    entry = chance.choice(document["files"])
    if chance.random() < 0.5:
        digest = entry["sha256"]
        entry["sha256"] = chance.choice(
            ("0" * 64, digest[:-1] + "0g"[digest[-1] == "0"], digest[:-1], "", "sha256:" + digest)
        )
    else:
        entry["bytes"] = chance.choice((0, entry["bytes"] + 1, -1, 1 << 62, 10**30, str(entry["bytes"]), None))
    return document


@manifest("a file listed twice, or very many", must_refuse=True)
def _many(chance, document):
    entry = document["files"][0]
    if chance.random() < 0.5:
        document["files"].append(entry)
    else:
        document["files"] += [{**entry, "path": f"f{i}"} for i in range(chance.choice((10_000, 30_000)))]
    return document


@manifest("options of a runtime that name files", must_refuse=True)
def _options(chance, document):
    options = chance.choice(
        (
            {"CACHE_DIR": "../cache"},
            {"ep.context_file_path": "/etc/x"},
            {"session.register_custom_ops": "x.so"},
            {"LOG_LEVEL": "\x1b[2J"},
            {"": ""},
            {"INFERENCE_PRECISION_HINT": ["f32"]},
        )
    )
    chance.choice(document["engines"])["options"] = options
    return document


@manifest("values of options")
def _option_values(chance, document):
    value = chance.choice(("", "f64", "\x1b[2J", "x" * 100_000, "dynamic", "undefined"))
    for engine in document["engines"]:
        engine["options"] = {"INFERENCE_PRECISION_HINT": value, "EXECUTION_MODE_HINT": value}
    return document


@manifest("engines: none, very many, of other targets")
def _engines(chance, document):
    how = chance.randrange(4)
    if how == 0:
        document["engines"] = []
    elif how == 1:
        document["engines"] *= 2000
    elif how == 2:
        for engine in document["engines"]:
            engine["target"] = chance.choice(("tensorrt", "openvino-gpu", "none", "\x1b", "onnxruntime-cpu", ""))
    else:
        document["engines"].reverse()
        document["engines"][0]["batch"] = chance.choice((0, -1, 1 << 40, 10**6, 8))
    return document


@manifest("inputs and outputs that the engine does not have")
def _tensors(chance, document):
    engine = chance.choice(document["engines"])
    side = chance.choice(("inputs", "outputs"))
    engine[side] = chance.choice(
        (
            [],
            engine[side] * 2,
            [{**engine[side][0], "name": "other"}],
            [{**engine[side][0], "dtype": "float128"}],
            [{**engine[side][0], "shape": [1 << 40]}],
            [{**engine[side][0], "shape": [1, 0, -1]}],
            [{**engine[side][0], "shape": ["batch", 3, 1 << 20, 1 << 20]}],
        )
    )
    return document


@manifest("parts and flows")
def _parts(chance, document):
    engine = document["engines"][0]
    part = {**engine, "part": chance.choice(("encoder", "decoder_step", "image", "", "\x1b"))}
    engine["parts"] = [part] * chance.choice((1, 2, 500))
    if chance.random() < 0.5:
        for _ in range(chance.choice((2, 200))):
            part = {**engine, "parts": [part]}
        engine["parts"] = [part]
    return document


@manifest("golden answers of another tolerance")
def _tolerance(chance, document):
    for each in document["golden"]["engines"].values():
        each["tolerance"] = chance.choice((-1, 0, 1e-30, 1e308, 10**30, "1"))
        each["least_same"] = chance.choice((-1, 99, 10**30, 0.5))
    return document


@manifest("image sizes in the bundle", must_refuse=True)
def _sizes(chance, document):
    sizes = (["../x"], ["8x8"], ["0x0"], ["99999999x1"], ["8x8"] * 5000, [8], "8x8", [None], ["8X8"], ["8x8\n"])
    return {**document, "sizes": chance.choice(sizes)}


# --- files ------------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


@FOLDERS.add("a file changed", must_refuse=True)
def _file(attempt: Attempt) -> None:
    folder, _ = copied(attempt)
    path = attempt.random.choice(_files(folder))
    mutate = attempt.random.choice((bytewise.one_bit, bytewise.truncated, bytewise.trailing, bytewise.put_in))
    path.write_bytes(mutate(attempt.random, path.read_bytes()))
    attempt.words = attempt.random.choice((INSPECT, VERIFY, PACK))


@FOLDERS.add("a file gone, or something else in its place", must_refuse=True)
def _place(attempt: Attempt) -> None:
    folder, _ = copied(attempt)
    path = attempt.random.choice(_files(folder))
    if attempt.random.random() < 0.3:
        path.unlink()
    else:
        places.another(attempt.random, path)
    attempt.words = attempt.random.choice((INSPECT, VERIFY, PACK))


@FOLDERS.add("a file that is a link to the same bytes", must_refuse=True)
def _link(attempt: Attempt) -> None:
    folder, _ = copied(attempt)
    path = attempt.random.choice(_files(folder))
    moved = attempt.given / "moved"
    if path.parent != folder and attempt.random.random() < 0.5:
        path.parent.rename(moved)
        path.parent.symlink_to(moved)
    else:
        path.rename(moved)
        path.symlink_to(moved)
    attempt.words = attempt.random.choice((INSPECT, VERIFY, PACK))


@FOLDERS.add("something else in the place of the manifest", must_refuse=True)
def _no_manifest(attempt: Attempt) -> None:
    folder, _ = copied(attempt)
    places.another(attempt.random, folder / MANIFEST)
    attempt.words = attempt.random.choice((VERIFY, LOAD, PREDICT))  # `inspect` shows the graph that lies there


@FOLDERS.add("files that the manifest does not list")
def _more(attempt: Attempt) -> None:
    folder, _ = copied(attempt)
    for name in ("more.bin", "engines/more.so", "\u202egnp.exe", "x" * 200):
        (folder / name).write_bytes(b"more")
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(".")


@FOLDERS.add("an engine of damaged bytes, rightly listed")
def _engine(attempt: Attempt) -> None:
    """A stranger makes his bundle so: nothing but the runtime can refuse it."""
    folder, document = copied(attempt)
    engine = document["engines"][0]
    path = folder / engine["files"][0]
    mutate = attempt.random.choice(list(bytewise.MUTATIONS.values()))
    path.write_bytes(mutate(attempt.random, path.read_bytes()))
    relisted(folder)
    attempt.words = (*PREDICT, "--target", engine["target"])


@FOLDERS.add("an engine that reads files outside", must_refuse=True)
def _external(attempt: Attempt) -> None:
    import onnx

    folder, document = copied(attempt)
    engine = document["engines"][0]
    path = folder / engine["files"][0]
    proto = onnx.load(str(path))
    tensor = next(each for each in proto.graph.initializer if each.data_type == onnx.TensorProto.FLOAT)
    secret = attempt.write("secret.bin", tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    place = attempt.random.choice(("../../../secret.bin", str(secret), "../../secret.bin"))
    tensor.external_data.add(key="location", value=place)
    path.write_bytes(proto.SerializeToString())
    relisted(folder)
    attempt.words = (*PREDICT, "--target", engine["target"])


@FOLDERS.add("golden arrays of damaged bytes, rightly listed")
def _golden(attempt: Attempt) -> None:
    folder, document = copied(attempt)
    path = folder / attempt.random.choice((document["golden"]["inputs"], document["golden"]["outputs"]))
    how = attempt.random.randrange(4)
    if how == 0:
        mutate = attempt.random.choice(list(bytewise.MUTATIONS.values()))
        path.write_bytes(mutate(attempt.random, path.read_bytes()))
    elif how == 1:
        np.savez(path, pixels=np.array([{"object": 1}], object))
    elif how == 2:
        np.savez(path, pixels=np.zeros((0, 8, 8, 3), np.uint8), logits=np.full((4, 4), np.nan, np.float32))
    else:
        np.savez_compressed(path, pixels=np.zeros((200, 1000, 1000), np.uint8))
    relisted(folder)
    attempt.words = LOAD


@FOLDERS.add("labels of damaged bytes, rightly listed")
def _labels(attempt: Attempt) -> None:
    folder, document = copied(attempt)
    odd = (
        b"",
        b"\xff\xfe",
        b"a\n" * 3,
        b"a\n" * 100_000,
        b"\x1b[2J\nb\nc\nd\n",
        b"x" * 10_000_000,
        b"\0\n" * 4,
        b"a\rb\nc\nd\ne\n",
    )
    (folder / document["labels"]).write_bytes(attempt.random.choice(odd))
    relisted(folder)
    attempt.words = LOAD


# --- packed -----------------------------------------------------------------------------------------------------------

Repack = Callable[[random.Random, bytes], bytes]


def packed(name: str) -> Callable[[Repack], Repack]:
    """A class of damage to a packed bundle, which is byte for byte as it is written or none."""

    def added(change: Repack) -> Repack:
        @ARCHIVES.add(name, must_refuse=True)
        def make(attempt: Attempt) -> None:
            whole = attempt.seeds.packed.read_bytes()
            data = change(attempt.random, whole)
            attempt.write("bundle.vitb", data + b"\0" if data == whole else data)
            attempt.words = attempt.random.choice((UNPACK, UNPACK, VERIFY_PACKED))

        return change

    return added


for _name, _mutate in bytewise.MUTATIONS.items():
    packed(f"packed: {_name}")(_mutate)


def members(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as read:
        return {name: read.read(name) for name in read.namelist()}


def zipped(files: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED, attributes: int = 0o100644) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as made:
        for name, content in files:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = attributes << 16, method
            made.writestr(info, content)
    return stream.getvalue()


@packed("packed: by another program")
def _other_program(chance, data):
    method = chance.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA))
    return zipped(list(members(data).items()), method)


@packed("packed: files in another order, doubled, more")
def _order(chance, data):
    files = list(members(data).items())
    how = chance.randrange(3)
    if how == 0:
        files[1:] = chance.sample(files[1:], len(files) - 1)
    elif how == 1:
        files.append(("more.txt", b"more"))
    else:
        files.insert(1, ("signature.json", b"x" * 1000))
    return zipped(files)


@packed("packed: names that lead outside")
def _escape(chance, data):
    name = chance.choice(("../escaped", "/escaped", "a/../../escaped", "..\\escaped", "C:\\escaped", "\0"))
    return zipped([*members(data).items(), (name, b"escaped")])


@packed("packed: links")
def _packed_link(chance, data):
    return zipped([*members(data).items(), ("link", b"../../secret")], attributes=0o120777)


@packed("packed: a manifest that lists names outside")
def _manifest_outside(chance, data):
    files = members(data)
    document = json.loads(files[MANIFEST])
    chosen = chance.choice(document["files"])
    content = files.pop(chosen["path"])
    chosen["path"] = chance.choice(
        ("../escaped", "/escaped", "engines", "MANIFEST.JSON", "model.onnx/x", "a//b", "x" * 241)
    )
    others = sorted({**files, chosen["path"]: content}.items())
    return _as_packed([(MANIFEST, json.dumps(document).encode()), *others])


def _as_packed(files: list[tuple[str, bytes]]) -> bytes:
    """In the very form of `bundle pack`, as far as that takes the names."""
    import zlib

    from vitdeploy.bundle.layout import PackedMember, directory, local_header

    listed, found = [], b""
    names = set()
    for name, content in files:
        if name in names:
            continue
        names.add(name)
        member = PackedMember(name, len(content), zlib.crc32(content), len(found))
        found += local_header(member) + content
        listed.append(member)
    return found + directory(listed)


@packed("packed: a manifest changed, in the right form")
def _manifest_changed(chance, data):
    files = members(data)
    document = json.loads(files[MANIFEST])
    entry = chance.choice(document["files"])
    entry["sha256"] = "0" * 64
    return _as_packed([(MANIFEST, json.dumps(document).encode()), *((n, c) for n, c in files.items() if n != MANIFEST)])


@packed("packed: numbers of its records")
def _records(chance, data):
    """Sizes, offsets, counts, flags: at each record of the archive."""
    signature = chance.choice((b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
    starts, at = [], data.find(signature)
    while at >= 0:
        starts.append(at)
        at = data.find(signature, at + 4)
    at = chance.choice(starts) + chance.randrange(4, 20)
    value = struct.pack("<I", chance.choice((0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)))
    return data[:at] + value + data[at + 4 :]


@packed("packed: a comment, a second end, zip64")
def _ends(chance, data):
    end = data[-22:]
    return chance.choice(
        (
            data[:-2] + b"\x05\0hello",
            data + end,
            data[:-22] + b"PK\x06\x06" + struct.pack("<Q", 44) + bytes(44) + b"PK\x06\x07" + bytes(16) + end,
            data[:-22] + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0),
        )
    )


@ARCHIVES.add("packed: something else in its place", must_refuse=True)
def _packed_place(attempt: Attempt) -> None:
    places.another(attempt.random, attempt.given / "bundle.vitb")
    attempt.words = attempt.random.choice((UNPACK, VERIFY_PACKED))


@ARCHIVES.add("packed: an output that is not ours", must_refuse=True)
def _output(attempt: Attempt) -> None:
    """What lies there stays as it is."""
    attempt.write("bundle.vitb", attempt.seeds.packed.read_bytes())
    target = attempt.given / "taken"
    how = attempt.random.randrange(3)
    if how == 0:
        target.mkdir()
        (target / "mine.txt").write_text("mine", encoding="utf-8")
    elif how == 1:
        target.write_text("mine", encoding="utf-8")
    else:
        target.symlink_to("elsewhere")
    attempt.words = ("bundle", "unpack", PACKED, "-o", "given/taken")


def whole(attempt: Attempt) -> None:
    copied(attempt)
    attempt.write("bundle.vitb", attempt.seeds.packed.read_bytes())


# Most refusals come from the manifest, which each of these reads; the cheapest is asked most often.
KIND = Kind(
    "bundles and .vitb",
    full=400,
    damages=(*FOLDERS, *ARCHIVES),
    words=in_turns(INSPECT, VERIFY, LOAD, INSPECT, PREDICT, VERIFY, LOAD),
    whole=whole,
    commands=(INSPECT, VERIFY, LOAD, PREDICT, PACK, UNPACK, VERIFY_PACKED),
)
