"""Checkpoint files that promise more than they hold, or in a way of their own, are refused before they are unpacked."""

import json
import os
import struct
import time
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitdeploy.data.tokens import read_tokens
from vitdeploy.errors import CheckpointError, DataError, MissingFileError
from vitdeploy.models.checkpoints.read import read_checkpoint, read_tensors
from vitdeploy.models.json_file import shards_of


@pytest.fixture
def state():
    return {"head.weight": torch.arange(60.0).reshape(10, 6), "head.bias": torch.zeros(10)}


def refused(path, *words, error=CheckpointError):
    started = time.process_time()
    with pytest.raises(error) as caught:
        read_checkpoint(path)
    assert time.process_time() - started < 5
    for word in words:
        assert word in str(caught.value)
    return caught.value


# --- zip archives -----------------------------------------------------------------------------------------------------


def archive(path, state, kind):
    """A checkpoint with the members of NumPy's or PyTorch's archive, to be written again in another way."""
    if kind == "npz":
        np.savez(path, **{key: tensor.numpy() for key, tensor in state.items()})
    else:
        torch.save(state, path)
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}


def repacked(path, members, compression=zipfile.ZIP_STORED, twice=()):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
        for name in twice:
            with pytest.warns(UserWarning, match="Duplicate name"):
                file.writestr(name, members[name])


def patched(path, local, central, value):
    """Write a number into each local header and each entry of the directory."""
    data = bytearray(path.read_bytes())
    for magic, offset in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        at = data.find(magic)
        while at >= 0:
            struct.pack_into("<H", data, at + offset, value)
            at = data.find(magic, at + 4)
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["npz", "pt"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("LZMA", "uses lzma"),
        ("damaged LZMA", "uses lzma"),
        ("version 9.9", "zip file version 9.9"),
        ("a name that is not UTF-8", "not UTF-8"),
        ("encrypted", "an encrypted member"),
        ("twice", "two members with the same name"),
        ("a bomb", "implausible size"),
        ("a long list", "a directory of"),
    ],
)
def test_an_archive_that_is_not_as_it_should_be_is_refused(tmp_path, state, monkeypatch, kind, fault, why):
    path = tmp_path / f"weights.{kind}"
    members = archive(path, state, kind)
    if "LZMA" in fault:
        repacked(path, members, zipfile.ZIP_LZMA)
    if fault == "damaged LZMA":
        data = bytearray(path.read_bytes())
        data[200:260] = bytes(60)
        path.write_bytes(data)
    if fault == "version 9.9":
        patched(path, 4, 6, 99)
    if fault == "a name that is not UTF-8":
        patched(path, 6, 8, 0x800)
        path.write_bytes(path.read_bytes().replace(b"head", b"\xffead").replace(b"data.pkl", b"\xffata.pkl"))
    if fault == "encrypted":
        patched(path, 6, 8, 1)
    if fault == "twice":
        repacked(path, members, twice=[next(iter(members))])
    if fault == "a bomb":
        name = next(name for name in members if name.endswith(("data/0", "weight.npy")))
        repacked(path, members | {name: members[name] + bytes(1 << 24)}, zipfile.ZIP_DEFLATED)
    if fault == "a long list":
        monkeypatch.setattr("vitdeploy.zip_members.MAX_DIRECTORY", 64)
    refused(path, why)


def test_token_files_are_held_to_the_same(tmp_path):
    path = tmp_path / "tokens.npz"
    np.savez(path, source=np.ones((2, 3), np.int64))
    patched(path, 4, 6, 99)
    with pytest.raises(DataError, match=r"not a complete \.npz file") as caught:
        read_tokens(path)
    assert "zip file version 9.9" in caught.value.found


# --- safetensors ------------------------------------------------------------------------------------------------------


def with_header(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_a_header_of_too_many_bytes_or_tensors_is_refused(tmp_path, monkeypatch):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = with_header(tmp_path / "a.safetensors", {f"k{i}": entry for i in range(30_000)})
    refused(path, "lists an implausible number of tensors", "30,000 tensors", "at most 20,000")
    monkeypatch.setattr("vitdeploy.models.checkpoints.read.MAX_HEADER_READ", 1000)
    refused(path, "bytes", "at most 1,000")


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E8M0", "F4", "F99", ""])
def test_numbers_of_other_types_are_named(tmp_path, dtype):
    size = 4 if dtype.startswith("F8") else 2
    header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, size]}}
    path = with_header(tmp_path / "a.safetensors", header, bytes(size))
    refused(path, "has tensors of an unsupported type", f"w {dtype}", "float weights")


@pytest.mark.parametrize("header", [b"{" + b"[" * 5000, b"{}" + b" " * 100, b'{"a": 1}', b"{\xff}"])
def test_what_is_no_header_is_left_to_the_library(tmp_path, header):
    refused(with_header(tmp_path / "a.safetensors", header))


# --- tensors ----------------------------------------------------------------------------------------------------------


FOREIGN = {
    "float8_e4m3fn": lambda: torch.zeros(4).to(torch.float8_e4m3fn),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.zeros(4, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FOREIGN)
def test_tensors_that_are_no_plain_numbers_are_named(tmp_path, state, kind):
    torch.save(state | {"extra": FOREIGN[kind]()}, tmp_path / "weights.pt")
    for read in (read_checkpoint, read_tensors):
        with pytest.raises(CheckpointError, match="tensors of an unsupported type") as caught:
            read(tmp_path / "weights.pt")
        assert caught.value.found.startswith("extra ") and kind in caught.value.found


def test_one_number_shown_as_many_is_refused(tmp_path, state):
    torch.save(state | {"extra": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "weights.pt")
    refused(tmp_path / "weights.pt", "tensors are larger than their storage", "4,000,000,000,")
    torch.save(state | {"extra": torch.zeros(1).expand(100, 100)}, tmp_path / "weights.pt")
    assert read_checkpoint(tmp_path / "weights.pt")[0]["extra"].shape == (100, 100)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["n" * 5000, "n" * 300 + ".pt", "a\0b", "absent.pt", "d/" * 3000])
def test_a_name_that_no_file_can_have_is_missing(tmp_path, name):
    refused(tmp_path / name, "no checkpoint at", error=MissingFileError)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "weights.pt")
    refused(tmp_path / "weights.pt", "no file", error=MissingFileError)


@pytest.mark.parametrize("name", ["n" * 300 + ".safetensors", "a\0b", "a\nb", "\ud800", "", "..", 7, ["a"], {"a": "b"}])
def test_an_index_names_files_of_its_folder(tmp_path, state, name):
    index = tmp_path / "model.safetensors.index.json"
    save_file(state, tmp_path / "a.safetensors")
    index.write_text(json.dumps({"weight_map": {"head.weight": "a.safetensors", "head.bias": name}}))
    with pytest.raises(CheckpointError, match=r"names files outside its folder|not a weight index"):
        shards_of(index)
