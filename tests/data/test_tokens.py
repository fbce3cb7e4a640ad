"""Token files: what is read, what is refused, splits and digests."""

import io
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from vitdeploy.data import tokens
from vitdeploy.data.tokens import TokenArrays, digest, read_tokens, split
from vitdeploy.errors import DataError, MissingFileError

SOURCE = np.arange(12, dtype=np.int64).reshape(4, 3)
TARGET = np.arange(20, dtype=np.int64).reshape(4, 5)
ARRAYS = npst.arrays(np.int64, st.tuples(st.just(3), st.integers(1, 5)), elements=st.integers(0, 2**63 - 1))


def write(path, *, save=np.savez, **arrays):
    save(path, **arrays)
    return path


def npy(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def header(shape, dtype="<i8"):
    """The header of a .npy without the data that it announces."""
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


# --- reading ----------------------------------------------------------------------------------------------------------


@given(source=ARRAYS, target=ARRAYS, save=st.sampled_from([np.savez, np.savez_compressed]), fortran=st.booleans())
@settings(max_examples=20, deadline=None)
def test_what_numpy_wrote_is_read(tmp_path_factory, source, target, save, fortran):
    path = tmp_path_factory.mktemp("npz") / "tokens.npz"
    write(path, save=save, source=np.asfortranarray(source) if fortran else source, target=target)
    read = read_tokens(path)
    assert np.array_equal(read.source, source)
    assert np.array_equal(read.target, target)
    assert read.source.flags.c_contiguous
    assert read.source.flags.writeable
    assert len(read) == 3


def test_targets_may_be_missing(tmp_path):
    assert read_tokens(write(tmp_path / "t.npz", source=SOURCE)).target is None


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(MissingFileError, match="no token file at"):
        read_tokens(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({"target": TARGET}, "arrays target"),
        ({"source": SOURCE, "labels": TARGET}, "arrays source, labels"),
        ({}, "arrays none"),
    ],
)
def test_other_members_are_refused(tmp_path, arrays, found):
    with pytest.raises(DataError, match="does not contain tokens") as caught:
        read_tokens(write(tmp_path / "t.npz", **arrays))
    assert caught.value.found == found


def test_a_member_that_is_there_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        archive.writestr("source.npy", npy(SOURCE))
        archive.writestr("source", npy(SOURCE))
    with pytest.raises(DataError, match="does not contain tokens"):
        read_tokens(tmp_path / "t.npz")


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (SOURCE.astype(np.int32), "int32 [4, 3] in 48 bytes"),
        (SOURCE.astype(np.float64), "float64 [4, 3] in 96 bytes"),
        (SOURCE.astype(">i8"), ">i8 [4, 3] in 96 bytes"),
        (SOURCE[0], "int64 [3] in 24 bytes"),
        (SOURCE[None], "int64 [1, 4, 3] in 96 bytes"),
        (SOURCE[:0], "int64 [0, 3] in 0 bytes"),
        (SOURCE[:, :0], "int64 [4, 0] in 0 bytes"),
    ],
)
def test_another_dtype_or_shape_is_refused(tmp_path, array, found):
    with pytest.raises(DataError, match="is not an array of tokens") as caught:
        read_tokens(write(tmp_path / "t.npz", source=array))
    assert caught.value.found == found
    assert caught.value.expected == "int64 [n, length] of at most 256 MiB"


@pytest.mark.parametrize("shape", [(10**12, 10**6), (4, 4), (3, 3), (-1, -12)])
def test_a_header_that_announces_another_size_than_the_file_has_is_refused(tmp_path, shape):
    with pytest.raises(DataError, match="is not an array of tokens") as caught:
        read_tokens(zipped(tmp_path / "t.npz", source=header(shape) + SOURCE.tobytes()))
    assert str(list(shape)) in caught.value.found


def test_a_member_too_large_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "MAX_BYTES", 1 << 20)
    zeros = np.zeros((1 << 17, 1), np.int64)
    path = write(tmp_path / "t.npz", save=np.savez_compressed, source=zeros)
    assert path.stat().st_size < 10_000
    with pytest.raises(DataError, match="is too large") as caught:
        read_tokens(path)
    assert (caught.value.found, caught.value.expected) == ("1,048,704 bytes", "int64 [n, length] of at most 1 MiB")
    assert len(read_tokens(write(path, source=zeros[:-16])).source) == (1 << 17) - 16


@pytest.mark.parametrize(
    "content", [b"", b"text", header((4, 3), "|O") + b"cos\nsystem\n(S'exit'\ntR.", b"\x93NUMPY\x09\x00"]
)
def test_members_that_are_no_arrays_are_refused(tmp_path, content):
    with pytest.raises(DataError):
        read_tokens(zipped(tmp_path / "t.npz", source=content))


def test_an_array_of_objects_is_not_unpickled(tmp_path):
    path = write(tmp_path / "t.npz", source=np.array([[1]], object))
    with pytest.raises(DataError, match="is not an array of tokens") as caught:
        read_tokens(path)
    assert caught.value.found.startswith("object [1, 1]")


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_a_torn_file_is_refused(tmp_path, keep):
    whole = write(tmp_path / "t.npz", source=SOURCE, target=TARGET).read_bytes()
    (tmp_path / "t.npz").write_bytes(whole[:keep])
    with pytest.raises(DataError, match=r"is not a complete \.npz file"):
        read_tokens(tmp_path / "t.npz")


def test_flipped_bytes_are_found(tmp_path):
    path = write(tmp_path / "t.npz", source=SOURCE)
    content = bytearray(path.read_bytes())
    content[content.index(SOURCE.tobytes()) + 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a complete \.npz file") as caught:
        read_tokens(path)
    assert "CRC" in caught.value.found


def test_negative_tokens_are_refused(tmp_path):
    with pytest.raises(DataError, match="has negative tokens") as caught:
        read_tokens(write(tmp_path / "t.npz", source=SOURCE - 2))
    assert caught.value.found == "-2"


def test_another_number_of_targets_is_refused(tmp_path):
    with pytest.raises(DataError, match="different numbers of sources and targets") as caught:
        read_tokens(write(tmp_path / "t.npz", source=SOURCE, target=TARGET[:3]))
    assert (caught.value.found, caught.value.expected) == ("3 targets", "4")


# --- splitting --------------------------------------------------------------------------------------------------------


def twenty():
    rows = np.arange(20, dtype=np.int64)[:, None]
    return TokenArrays(rows, 100 + rows)


@given(seed=st.integers(0, 2**32 - 1), calibration=st.integers(1, 19), data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_sequence_is_in_both_parts_and_pairs_stay_together(seed, calibration, data):
    evaluation = data.draw(st.one_of(st.just("all"), st.integers(1, 20 - calibration)))
    first, second = split(twenty(), calibration=calibration, evaluation=evaluation, seed=seed)
    both = [*first.source[:, 0], *second.source[:, 0]]
    assert len(first) == calibration
    assert len(second) == (20 - calibration if evaluation == "all" else evaluation)
    assert len(set(both)) == len(both)
    assert np.array_equal(first.target, first.source + 100)


def test_the_choice_is_that_of_the_image_folders():
    order = np.random.RandomState(7).permutation(20)
    first, second = split(twenty(), calibration=5, evaluation=3, seed=7)
    assert np.array_equal(first.source[:, 0], order[:5])
    assert np.array_equal(second.source[:, 0], order[5:8])


def test_sequences_without_targets_are_split_too():
    first, second = split(TokenArrays(SOURCE, None), calibration=1, evaluation="all", seed=0)
    assert (first.target, second.target) == (None, None)


@pytest.mark.parametrize(("calibration", "evaluation", "expected"), [(20, "all", "at least one"), (18, 3, "3")])
def test_too_few_sequences_are_refused(calibration, evaluation, expected):
    with pytest.raises(DataError, match=r"x\.npz has too few sequences") as caught:
        split(twenty(), calibration=calibration, evaluation=evaluation, seed=0, source="x.npz")
    assert caught.value.found == "20 sequences"
    assert caught.value.expected == f"{calibration} to calibrate and {expected} to evaluate"


# --- digest -----------------------------------------------------------------------------------------------------------


def test_the_digest_is_of_the_arrays_and_not_of_the_file(tmp_path):
    stored = read_tokens(write(tmp_path / "a.npz", source=SOURCE, target=TARGET))
    packed = read_tokens(write(tmp_path / "b.npz", save=np.savez_compressed, source=SOURCE, target=TARGET))
    assert digest(stored) == digest(packed)
    assert len(digest(stored)) == 64


def test_the_digest_changes_with_values_order_shape_and_role():
    variants = [
        TokenArrays(SOURCE, TARGET),
        TokenArrays(SOURCE + 1, TARGET),
        TokenArrays(SOURCE[::-1], TARGET[::-1]),
        TokenArrays(SOURCE.reshape(2, 6), TARGET.reshape(2, 10)),
        TokenArrays(SOURCE, None),
        TokenArrays(TARGET, SOURCE),
    ]
    assert len({digest(variant) for variant in variants}) == len(variants)
