"""400 ONNX files with external data: paths that lead outside, links, sizes and offsets that lie.

Source of the rules: docs/ExternalDataSecurity.md of ONNX.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from tests.faults.malformed import bytewise, places
from tests.faults.malformed.kinds import Attempt, Damage, Kind, Table, in_turns

FILE, DATA = "given/model/model.onnx", "weights.bin"
INSPECT = ("inspect", FILE)
OPTIMIZE = ("optimize", FILE, "-o", "out")
OUTSIDE = "secret.bin"  # in the folder above the model's: as long as a weight, so that only its place is wrong
EXTERNAL = Table()
Entries = dict[str, str]


def build(attempt: Attempt, change: Callable[[Any, Entries], None] = lambda tensor, entries: None) -> Any:
    """The tiny model with all float weights in DATA. `change` is given one of them and its entries."""
    proto = onnx.load(str(attempt.seeds.graph))
    content, weights = b"", [each for each in proto.graph.initializer if each.data_type == TensorProto.FLOAT]
    chosen = attempt.random.choice(weights)
    for tensor in weights:
        entries = {"location": DATA, "offset": str(len(content)), "length": str(len(tensor.raw_data))}
        content += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        if tensor is chosen:
            change(tensor, entries)
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
    attempt.write(f"model/{DATA}", content)
    attempt.write(OUTSIDE, content)
    attempt.write("model/model.onnx", proto.SerializeToString())
    return proto


def rewritten(attempt: Attempt, proto: Any) -> None:
    attempt.write("model/model.onnx", proto.SerializeToString())


def entries_are(
    name: str, *, must_refuse: bool = False
) -> Callable[[Callable[[random.Random, Any, Entries], None]], Any]:
    """A class of damage to the entries of one tensor."""

    def added(change: Callable[[random.Random, Any, Entries], None]) -> Any:
        @EXTERNAL.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            build(attempt, lambda tensor, entries: change(attempt.random, tensor, entries))

        return change

    return added


def location(name: str, *locations: str, must_refuse: bool = True) -> None:
    @entries_are(name, must_refuse=must_refuse)
    def _at(chance, tensor, entries):
        entries["location"] = chance.choice(locations)


location(
    "a path above", f"../{OUTSIDE}", f"./../{OUTSIDE}", f"sub/../../{OUTSIDE}", f"../../given/{OUTSIDE}", "../" * 40
)
location("an absolute path", "/etc/passwd", "/dev/zero", "/proc/self/environ", "//etc/passwd", "/")
location("a path of Windows", "C:\\x.bin", "C:weights.bin", f"..\\{OUTSIDE}", "\\\\server\\x", "\\x", "sub\\x")
location("no path", "", ".", "..", "./", "\0", "weights.bin\0x", "\n", "weights.bin/", "weights.bin/.")
location("an odd name", *(each for each in places.ODD_NAMES if "\ud800" not in each))
location("a name that is not there", "absent.bin", "Weights.bin", "weights.bin ", "sub/weights.bin", "weights.bin.")
location("a URL", "file:///etc/passwd", "http://localhost/x", "~/x", "$HOME/x", "%2e%2e/secret.bin")
location("the same, spelled otherwise", "./weights.bin", ".//weights.bin", "././weights.bin", must_refuse=False)
location("the model's own file", "model.onnx", must_refuse=False)


@EXTERNAL.add("a link", must_refuse=True)
def _link(attempt: Attempt) -> None:
    build(attempt)
    path = attempt.given / "model" / DATA
    path.unlink()
    path.symlink_to(attempt.random.choice((f"../{OUTSIDE}", attempt.given / OUTSIDE, "/etc/passwd", "nothing", DATA)))


@EXTERNAL.add("a hard link", must_refuse=True)
def _hard_link(attempt: Attempt) -> None:
    build(attempt)
    path = attempt.given / "model" / DATA
    path.unlink()
    path.hardlink_to(attempt.given / OUTSIDE)


@EXTERNAL.add("a folder that is a link", must_refuse=True)
def _linked_folder(attempt: Attempt) -> None:
    build(attempt, lambda tensor, entries: entries.update(location=f"sub/{OUTSIDE}"))
    (attempt.given / "model" / "sub").symlink_to(attempt.random.choice(("..", attempt.given, "../../given")))


for _name, _make in places.KINDS.items():

    def _in_place(attempt: Attempt, make: Callable[[Path], None] = _make) -> None:
        build(attempt)
        path = attempt.given / "model" / DATA
        path.unlink()
        make(path)

    # Zeros are weights like others, where the file is long enough.
    EXTERNAL.append(Damage(f"{_name} in the place of the data", _in_place, must_refuse="zeros" not in _name))


@EXTERNAL.add("data of another length")
def _data_length(attempt: Attempt) -> None:
    build(attempt)
    path = attempt.given / "model" / DATA
    data = path.read_bytes()
    path.write_bytes(attempt.random.choice((data[:-1], data[: len(data) // 2], data + b"\0", data * 2)))


@EXTERNAL.add("data that is damaged")
def _data(attempt: Attempt) -> None:
    build(attempt)
    path = attempt.given / "model" / DATA
    path.write_bytes(bytewise.some_bytes(attempt.random, path.read_bytes()))


@EXTERNAL.add("data that may not be read")
def _forbidden(attempt: Attempt) -> None:
    build(attempt)
    (attempt.given / "model" / DATA).chmod(0)


@EXTERNAL.add("data that is gone", must_refuse=True)
def _gone(attempt: Attempt) -> None:
    build(attempt)
    (attempt.given / "model" / DATA).unlink()


@EXTERNAL.add("data far behind the beginning of a file with holes")
def _sparse(attempt: Attempt) -> None:
    build(attempt, lambda tensor, entries: entries.update(offset=str(9 << 30)))
    os.truncate(attempt.given / "model" / DATA, 10 << 30)


NUMBERS = (
    *("-1", "-0", "+1", "1e3", "0x10", "", " 4", "4 ", "1_000", "4.0", "9" * 30, "9" * 5000, "\u0661", "\u00b2", "nan"),
    *(str(1 << 31), str(1 << 40), str((1 << 63) - 1), str(1 << 63), str(1 << 64), "\0", "\x1b[2J"),
)


@entries_are("an offset that lies", must_refuse=True)
def _offset(chance, tensor, entries):
    entries["offset"] = chance.choice([each for each in NUMBERS if each not in ("-0",)])


@entries_are("an offset into another weight")
def _near(chance, tensor, entries):
    entries["offset"] = chance.choice(("0", "1", "3", "4", "64"))


@entries_are("a length that lies", must_refuse=True)
def _length(chance, tensor, entries):
    entries["length"] = chance.choice(
        (*NUMBERS, "0", "1", str(int(entries["length"]) - 1), str(int(entries["length"]) + 4))
    )


@entries_are("no offset or no length")
def _absent(chance, tensor, entries):
    for key in chance.sample(("offset", "length"), chance.randrange(1, 3)):
        del entries[key]


@entries_are("no location", must_refuse=True)
def _nowhere(chance, tensor, entries):
    if chance.random() < 0.5:
        entries.clear()
    else:
        del entries["location"]


@entries_are("keys that ONNX does not define", must_refuse=True)
def _keys(chance, tensor, entries):
    entries[chance.choice(("__class__", "basepath", "Location", "", "\x1b", "raw", "k" * 10_000))] = "x"


@entries_are("a checksum")
def _checksum(chance, tensor, entries):
    entries["checksum"] = chance.choice(("", "0" * 40, "sha1:x", "\0", "x" * 100_000))


@EXTERNAL.add("an entry twice", must_refuse=True)
def _doubled(attempt: Attempt) -> None:
    proto = build(attempt)
    tensor = next(each for each in proto.graph.initializer if each.external_data)
    tensor.external_data.add(key=attempt.random.choice(("location", "offset")), value="0")
    rewritten(attempt, proto)


@entries_are("sizes that are not what is stored")
def _dims(chance, tensor, entries):
    del tensor.dims[:]
    tensor.dims.extend(chance.choice(([10**6, 10**6], [1 << 62], [-1, 4], [0], [3], [1] * 40, [1 << 32, 1 << 32])))
    if chance.random() < 0.5:
        entries.pop("length")


@entries_are("another type of elements")
def _type(chance, tensor, entries):
    tensor.data_type = chance.choice([*range(27), 99, -1])
    if chance.random() < 0.5:
        entries.pop("length")


@entries_are("data in the model as well")
def _both(chance, tensor, entries):
    if chance.random() < 0.5:
        tensor.raw_data = bytes(int(entries["length"]))
    else:
        tensor.float_data.extend([1.0] * 4)


@entries_are("in the model, and names a file", must_refuse=True)
def _default(chance, tensor, entries):
    tensor.data_location = TensorProto.DEFAULT
    tensor.raw_data = bytes(int(entries["length"]))


@entries_are("names a file, and has no data", must_refuse=True)
def _nothing(chance, tensor, entries):
    tensor.data_location = TensorProto.DEFAULT


@EXTERNAL.add("data of a tensor inside a node", must_refuse=True)
def _inside(attempt: Attempt) -> None:
    proto = build(attempt)
    tensor = next(each for each in proto.graph.initializer if each.external_data)
    proto.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["extra"], value=tensor))
    rewritten(attempt, proto)


@EXTERNAL.add("a shape in the data")
def _shape(attempt: Attempt) -> None:
    """What a shape computation reads while the graph is rewritten."""
    proto = build(attempt)
    tensor = next(each for each in proto.graph.initializer if each.name == "tokens")
    shape = attempt.random.choice(([0, 8, 4], [1 << 40, 8, 4], [-1, -1, 4], [7, 7, 7], [0, -8, 4]))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    attempt.write("model/shape.bin", np.array(shape, "<i8").tobytes())
    tensor.external_data.add(key="location", value="shape.bin")
    rewritten(attempt, proto)


@EXTERNAL.add("very many weights in very many files", must_refuse=True)
def _many(attempt: Attempt) -> None:
    proto = build(attempt)
    for index in range(attempt.random.choice((500, 20_000))):
        tensor = numpy_helper.from_array(np.zeros(1, np.float32), f"w{index}")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=f"files/{index}.bin")
        proto.graph.initializer.append(tensor)
    rewritten(attempt, proto)


@EXTERNAL.add("one piece of data for very many weights")
def _shared(attempt: Attempt) -> None:
    """A file of a few bytes, and gigabytes if each weight gets a copy."""
    proto = build(attempt)
    attempt.write("model/zeros.bin", bytes(4 << 20))
    for index in range(attempt.random.choice((10, 1000))):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[1 << 20])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="zeros.bin")
        proto.graph.initializer.append(tensor)
    rewritten(attempt, proto)


KIND = Kind(
    "external data",
    full=400,
    damages=tuple(EXTERNAL),
    words=in_turns(INSPECT, OPTIMIZE),
    whole=lambda attempt: build(attempt) and None,
    commands=(INSPECT, OPTIMIZE),
)
