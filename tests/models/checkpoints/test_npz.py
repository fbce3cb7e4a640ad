"""Reading `.npz`: what NumPy writes comes back, and nothing that a hostile file declares is believed."""

from __future__ import annotations

import contextlib
import io
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.errors import CheckpointError, PickleError
from vitdeploy.models.checkpoints.read import is_npz, read_npz

DTYPES = ["float32", "float64", "float16", ">f4", "int64", "uint8", "bool"]


@settings(max_examples=30, deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    order=st.sampled_from("CF"),
    compressed=st.booleans(),
)
def test_what_numpy_writes_comes_back(tmp_path_factory, shape, dtype, order, compressed):
    path = tmp_path_factory.mktemp("npz") / "arrays.npz"
    array = np.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype=dtype, order=order)
    (np.savez_compressed if compressed else np.savez)(path, **{"a/b": array})
    read = read_npz(path)
    assert list(read) == ["a/b"]
    assert read["a/b"].shape == tuple(shape)
    assert np.array_equal(read["a/b"].numpy(), array)


def test_bfloat16_is_saved_as_two_raw_bytes(tmp_path):
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    np.savez(tmp_path / "b.npz", w=values.view(torch.int16).numpy().view("V2"))
    read = read_npz(tmp_path / "b.npz")["w"]
    assert read.dtype == torch.float32
    assert torch.equal(read, values.float())


def test_a_pytorch_checkpoint_is_no_npz(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pt")
    np.savez(tmp_path / "a.npz", a=np.zeros(1))
    (tmp_path / "empty").touch()
    assert [is_npz(tmp_path / name) for name in ("a.npz", "a.pt", "empty")] == [True, False, False]


def packed(path, members, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def claiming(shape):
    """A member whose header promises another shape than its bytes have."""
    return npy(np.zeros(10, "f4")).replace(b"(10,), }" + b" " * 12, f"({shape},), }}".ljust(20).encode())


HOSTILE = {
    "Python objects": ({"a.npy": npy(np.array([{}], dtype=object))}, "dtype object"),
    "a program beside": ({"a.npy": npy(np.zeros(1)), "x.py": b"1"}, "holds 'x.py'"),
    "nothing": ({}, "an empty archive"),
    "more than it has": ({"a.npy": claiming(10**10)}, "declares 40,000,000,000 bytes and has 40"),
    "text": ({"a.npy": npy(np.array(["a"]))}, "dtype <U1"),
    "no array": ({"a.npy": b"abc"}, "EOF"),
    "a version of the future": ({"a.npy": b"\x93NUMPY\x09\x00" + b" " * 80}, "version"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_every_fault_is_named(fault, tmp_path):
    members, message = HOSTILE[fault]
    packed(tmp_path / "x.npz", members)
    with pytest.raises(PickleError if fault == "Python objects" else CheckpointError) as raised:
        read_npz(tmp_path / "x.npz")
    assert message in str(raised.value)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    packed(tmp_path / "bomb.npz", {"a.npy": npy(np.zeros(1 << 20))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="expands to an implausible size"):
        read_npz(tmp_path / "bomb.npz")


def test_a_directory_that_understates_a_member_is_an_error(tmp_path):
    packed(tmp_path / "x.npz", {"a.npy": npy(np.arange(4096.0))}, zipfile.ZIP_DEFLATED)
    data = (tmp_path / "x.npz").read_bytes()
    size = len(npy(np.arange(4096.0))).to_bytes(4, "little")
    assert data.count(size) == 2
    (tmp_path / "x.npz").write_bytes(data.replace(size, (200).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match="not a complete"):
        read_npz(tmp_path / "x.npz")


@settings(max_examples=40, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_file_is_read_or_refused_never_worse(tmp_path_factory, position, value, cut):
    path = tmp_path_factory.mktemp("npz") / "x.npz"
    np.savez_compressed(path, a=np.random.default_rng(0).normal(size=(8, 8)), b=np.arange(5))
    data = bytearray(path.read_bytes())
    at = int(position * len(data))
    data[at] = value
    path.write_bytes(data[:at] if cut else data)
    with contextlib.suppress(CheckpointError, PickleError):
        read_npz(path)
