"""400 safetensors files, and indexes of several: headers that lie, JSON that is none, keys and shapes of no model.

Source of the format: safetensors README, "Format": 8 bytes of the header's length, JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.faults.malformed import bytewise, places, trees
from tests.faults.malformed.kinds import Attempt, Kind, Table, in_turns
from tests.faults.seeds import BUILT_IN

FILE = "given/weights.safetensors"
NAMED = ("vitdeploy.model", BUILT_IN, FILE)
ALONE = ("vitdeploy.model", "", FILE, "2")
EXPORT = ("export", BUILT_IN, "--checkpoint", FILE, "-o", "out")
SAFETENSORS = Table()
Header = dict[str, Any]


def split(data: bytes) -> tuple[Header, bytes]:
    """The header, and the bytes of all tensors."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Header | str | bytes, tensors: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + tensors


Change = Callable[[random.Random, Header, bytes], bytes]


def case(name: str, *, must_refuse: bool = False) -> Callable[[Change], Change]:
    def added(change: Change) -> Change:
        @SAFETENSORS.add(name, must_refuse=must_refuse)
        def make(attempt: Attempt) -> None:
            header, tensors = split(attempt.seeds.safetensors.read_bytes())
            attempt.write("weights.safetensors", change(attempt.random, header, tensors))

        return change

    return added


def tensor_of(chance: random.Random, header: Header) -> Any:
    return header[chance.choice([key for key in header if key != "__metadata__"])]


def _bytewise(name: str, mutate: bytewise.Mutation) -> None:
    @SAFETENSORS.add(name)
    def make(attempt: Attempt) -> None:
        attempt.write("weights.safetensors", mutate(attempt.random, attempt.seeds.safetensors.read_bytes()))


for _name, _mutate in bytewise.MUTATIONS.items():
    _bytewise(_name, _mutate)


@case("a length of the header that lies", must_refuse=True)
def _length(chance, header, tensors):
    size = len(json.dumps(header).encode())
    lies = (0, 1, size - 1, size + 1, 100 << 20, (100 << 20) + 1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1)
    return joined(header, tensors, chance.choice(lies))


@case("a header that is no JSON", must_refuse=True)
def _no_json(chance, header, tensors):
    return joined(trees.damaged_text(chance, json.dumps(header))[:5_000_000], tensors)


@case("a header of very many keys")
def _many_keys(chance, header, tensors):
    """A million tensors of no element: valid, and nothing of a model."""
    count = chance.choice((10_000, 200_000, 1_000_000))
    keys = ",".join(f'"k{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(count))
    return joined("{" + keys + "}", b"")


@case("a long header")
def _long(chance, header, tensors):
    how = chance.randrange(3)
    if how == 0:
        return joined(json.dumps(header) + " " * chance.choice((1000, 50_000_000)), tensors)
    if how == 1:
        header["__metadata__"] = {"note": "x" * 20_000_000}
    else:
        header["x" * 5_000_000] = tensor_of(chance, header)
    return joined(header, tensors)


@case("a deep header", must_refuse=True)
def _deep(chance, header, tensors):
    depth = chance.choice((200, 5000, 2_000_000))
    return joined('{"__metadata__":' + "[" * depth + "]" * depth + "}", tensors)


@case("metadata that is none")
def _metadata(chance, header, tensors):
    header["__metadata__"] = chance.choice(trees.VALUES)
    return joined(header, tensors)


@case("a key twice")
def _twice(chance, header, tensors):
    text = json.dumps(header)
    return joined(text[:-1] + ', "head.bias": ' + json.dumps(tensor_of(chance, header)) + "}", tensors)


@case("names of tensors", must_refuse=True)
def _names(chance, header, tensors):
    key = chance.choice([key for key in header if key != "__metadata__"])
    return joined(
        {**{k: v for k, v in header.items() if k != key}, chance.choice(places.ODD_NAMES): header[key]}, tensors
    )


@case("types of elements")
def _dtype(chance, header, tensors):
    names = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "I64", "BOOL", "U16", "C64", "BF16", "F16", "F64", "f32")
    kind = chance.choice((*names, "", None, 4, "\x1b", "F" * 100_000))
    changed = header.values() if chance.random() < 0.3 else [tensor_of(chance, header)]
    for each in changed:
        if "dtype" in each:
            each["dtype"] = kind
    return joined(header, tensors)


@case("all in one type")
def _converted(chance, header, tensors):
    """Offsets and sizes are right: weights of eight bits and less, which no one computes with."""
    kind, size = chance.choice((("F8_E4M3", 1), ("F8_E5M2", 1), ("U8", 1), ("BOOL", 1), ("F16", 2), ("I64", 8)))
    at, found = 0, {}
    for key, value in header.items():
        if key != "__metadata__":
            count = int(np.prod(value["shape"])) * size
            found[key] = {"dtype": kind, "shape": value["shape"], "data_offsets": [at, at + count]}
            at += count
    return joined(found, bytes(at))


@case("a shape that does not fit its data", must_refuse=True)
def _shape(chance, header, tensors):
    wrong = (
        [10**6, 10**6],
        [-1],
        [],
        [1 << 63],
        [1 << 32, 1 << 32],
        [0],
        "32",
        None,
        [0.5],
        [True],
        {},
        [[32]],
        [None],
    )
    tensor_of(chance, header)["shape"] = chance.choice(wrong)
    return joined(header, tensors)


@case("offsets that lie", must_refuse=True)
def _offsets(chance, header, tensors):
    tensor = tensor_of(chance, header)
    start, end = tensor["data_offsets"]
    tensor["data_offsets"] = chance.choice(
        (
            *([end, start], [start, end + 4], [start + 4, end + 4], [start, start], [-4, end], [0, 1 << 62], [start]),
            *(
                [start, end, end],
                [0.0, 4.0],
                [str(start), str(end)],
                None,
                {},
                [1 << 63, (1 << 63) + 4],
                [(1 << 64) - 4, 0],
            ),
        )
    )
    return joined(header, tensors)


@case("two tensors in one place", must_refuse=True)
def _overlap(chance, header, tensors):
    same: dict[int, list[Any]] = {}
    for key, value in header.items():
        if key != "__metadata__":
            same.setdefault(value["data_offsets"][1] - value["data_offsets"][0], []).append(value)
    one, other = chance.choice([each for each in same.values() if len(each) > 1])[:2]
    other["data_offsets"] = one["data_offsets"]
    return joined(header, tensors)


@case("a hole between tensors", must_refuse=True)
def _hole(chance, header, tensors):
    for value in header.values():
        if "data_offsets" in value:
            value["data_offsets"] = [at + 8 for at in value["data_offsets"]]
    return joined(header, b"hidden!!" + tensors)


@case("a value of the header changed")
def _changed(chance, header, tensors):
    return joined(trees.changed(chance, header), tensors)


@case("a part of the header gone")
def _gone(chance, header, tensors):
    return joined(trees.without(chance, header), tensors)


@case("a part of the header too much")
def _grown(chance, header, tensors):
    return joined(trees.grown(chance, header), tensors)


@case("weights that are no numbers", must_refuse=True)
def _nan(chance, header, tensors):
    data, tensor = bytearray(tensors), tensor_of(chance, header)
    value = np.float32(chance.choice((np.nan, np.inf, -np.inf))).tobytes()
    data[tensor["data_offsets"][0] : tensor["data_offsets"][0] + 4] = value
    return joined(header, bytes(data))


@case("weights of extreme values")
def _extreme(chance, header, tensors):
    value = np.float32(chance.choice((3e38, -3e38, 1e-45, 0.0)))
    return joined(header, np.full(len(tensors) // 4, value, "<f4").tobytes())


@case("tensors of another shape and the same size")
def _turned(chance, header, tensors):
    tensor = chance.choice([value for value in header.values() if len(value.get("shape", ())) > 1])
    tensor["shape"] = chance.choice((tensor["shape"][::-1], [*tensor["shape"], 1], [int(np.prod(tensor["shape"]))]))
    return joined(header, tensors)


@case("tensors of another model")
def _other_model(chance, header, tensors):
    prefix = chance.choice(("module.", "model.", "a" * 5000 + ".", "head.", "blocks.0.", "lora_A."))
    return joined({prefix + key: value for key, value in header.items() if key != "__metadata__"}, tensors)


@case("no tensors", must_refuse=True)
def _none(chance, header, tensors):
    return chance.choice((joined({}, b""), joined({}, tensors), joined({"__metadata__": {"format": "pt"}}, b"")))


@case("absurd sizes, consistent and of no element")
def _empty(chance, header, tensors):
    """A dimension of nothing makes any other free."""
    found = {
        key: {"dtype": "F32", "shape": [0, chance.choice((1 << 40, 10**6))], "data_offsets": [0, 0]}
        for key in header
        if key != "__metadata__"
    }
    return joined(found, b"")


@SAFETENSORS.add("something else in its place", must_refuse=True)
def _place(attempt: Attempt) -> None:
    places.another(attempt.random, attempt.given / "weights.safetensors")


# --- several files ----------------------------------------------------------------------------------------------------

INDEX = "model.safetensors.index.json"


def _shards(attempt: Attempt) -> Any:
    """The weights in two files with an index, which the command names."""
    header, tensors = split(attempt.seeds.safetensors.read_bytes())
    keys = [key for key in header if key != "__metadata__"]
    index: dict[str, Any] = {"metadata": {"total_size": len(tensors)}, "weight_map": {}}
    for number, part in enumerate((keys[: len(keys) // 2], keys[len(keys) // 2 :]), 1):
        name, at, content, own = f"model-0000{number}-of-00002.safetensors", 0, b"", {}
        for key in part:
            start, end = header[key]["data_offsets"]
            own[key] = {**header[key], "data_offsets": [at, at + end - start]}
            content, at = content + tensors[start:end], at + end - start
            index["weight_map"][key] = name
        attempt.write(f"shards/{name}", joined(own, content))
    attempt.write(f"shards/{INDEX}", json.dumps(index))
    attempt.words = ("vitdeploy.model", BUILT_IN, f"given/shards/{INDEX}")
    return index


@SAFETENSORS.add("an index that is no JSON")
def _index_text(attempt: Attempt) -> None:
    text = trees.damaged_text(attempt.random, json.dumps(_shards(attempt)))
    attempt.write(f"shards/{INDEX}", text)


@SAFETENSORS.add("an index with a value changed")
def _index_value(attempt: Attempt) -> None:
    attempt.write(f"shards/{INDEX}", json.dumps(trees.changed(attempt.random, _shards(attempt))))


@SAFETENSORS.add("an index of odd files", must_refuse=True)
def _index_names(attempt: Attempt) -> None:
    index = _shards(attempt)
    attempt.write("outside.safetensors", attempt.seeds.safetensors.read_bytes())
    names = (
        *places.ODD_NAMES,
        "../outside.safetensors",
        str(attempt.given / "outside.safetensors"),
        INDEX,
        None,
        7,
        [],
    )
    index["weight_map"][attempt.random.choice(list(index["weight_map"]))] = attempt.random.choice(names)
    attempt.write(f"shards/{INDEX}", json.dumps(index))


@SAFETENSORS.add("an index of very many files", must_refuse=True)
def _index_size(attempt: Attempt) -> None:
    _shards(attempt)
    count = attempt.random.choice((10_000, 200_000))
    attempt.write(f"shards/{INDEX}", json.dumps({"weight_map": {f"k{i}": f"f{i}.safetensors" for i in range(count)}}))


@SAFETENSORS.add("a part that is damaged, gone, or something else")
def _part(attempt: Attempt) -> None:
    _shards(attempt)
    path = attempt.given / "shards" / "model-00002-of-00002.safetensors"
    how = attempt.random.randrange(3)
    if how == 0:
        path.write_bytes(bytewise.truncated(attempt.random, path.read_bytes()))
    elif how == 1:
        path.unlink()
    else:
        places.another(attempt.random, path)


@SAFETENSORS.add("a part that has the keys of another")
def _same_part(attempt: Attempt) -> None:
    _shards(attempt)
    folder = attempt.given / "shards"
    one, other = sorted(folder.glob("*.safetensors"))
    other.write_bytes(one.read_bytes())


def whole(attempt: Attempt) -> None:
    attempt.write("weights.safetensors", attempt.seeds.safetensors.read_bytes())


KIND = Kind(
    "safetensors",
    full=400,
    damages=tuple(SAFETENSORS),
    words=in_turns(*[NAMED, ALONE] * 6, EXPORT),
    whole=whole,
    commands=(NAMED, ALONE, EXPORT),
)
