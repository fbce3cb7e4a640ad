"""WebDataset tars: each image read where it lies, and nothing that is not whole, plain and clear."""

import gzip
import json
import pickle
import tarfile  # noqa: TID251 - read in place
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.made import picture, sample, write_tar
from vitdeploy.data.containers import tars
from vitdeploy.data.containers.listing import DataClasses
from vitdeploy.data.containers.uris import read_written
from vitdeploy.data.folder import digest, has_container_labels, list_images, list_split
from vitdeploy.errors import DataError, ImageError


@pytest.fixture
def shards(tmp_path):
    """Two tars of webdataset's own writer, of three images each."""
    wds = pytest.importorskip("webdataset", reason="pip install webdataset, which writes the tars")
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(2):
        with wds.TarWriter(str(folder / f"val-{shard:03}.tar")) as writer:
            for i in range(3):
                number = 3 * shard + i
                row = {"__key__": f"{number:04}", "png": picture(number), "cls": number % 3, "json": {"width": 10}}
                writer.write(row)
    return folder


def test_what_webdataset_writes_is_read_in_place(shards):
    samples, classes = list_images(shards, "folders")
    assert list(samples.names) == [f"val-{i // 3:03}.tar/{i:04}.png" for i in range(6)]
    assert [each.content() for each in samples] == [picture(i) for i in range(6)]
    assert samples.labels.tolist() == [0, 1, 2, 0, 1, 2] and classes == DataClasses(("0", "1", "2"), "numbers")
    assert samples[4].path == shards / "val-001.tar" / "0004.png"
    written = json.loads(json.dumps(samples[4].held.written()))
    assert read_written(written) == samples[4].held


def test_one_tar_a_pattern_and_a_folder_name_their_images_alike(shards):
    expected = [f"val-001.tar/{i:04}.png" for i in (3, 4, 5)]
    for path in (shards / "val-001.tar", shards / "*-001.tar"):
        samples, _ = list_images(path, "none")
        assert list(samples.names) == expected and samples.labels is None
    assert list(list_images(shards, "none")[0].names)[3:] == expected


def test_images_for_another_process_are_found_there(shards):
    samples, _ = list_images(shards, "folders")
    sent = pickle.loads(pickle.dumps(samples.pick(np.array([4, 0])).packed()))  # noqa: TID251 - our own
    assert list(sent.names) == ["val-001.tar/0004.png", "val-000.tar/0000.png"] and sent.labels.tolist() == [1, 0]
    assert [each.content() for each in sent] == [picture(4), picture(0)]


def test_splits_never_overlap_and_digests_follow_bytes_and_labels(shards):
    found = list_split(shards, "folders", calibration=2, evaluation="all", seed=1)
    names = [*found.calibration.names, *found.evaluation.names]
    assert len(names) == len(set(names)) == 6 and found.kind == "numbers"
    before = digest(found.evaluation, shards)
    assert before == digest(found.evaluation, shards)
    assert before != digest(found.evaluation.renumbered([1, 0, 2]), shards)


def listed(tmp_path, *samples, labels="folders", **how):
    return list_images(write_tar(tmp_path / "x.tar", *samples, **how), labels)


def test_names_are_classes_in_no_order_and_a_list_beside_them_gives_one(tmp_path):
    rows = [sample("a", "dog"), sample("b", "cat", 1), sample("c", "dog", 2)]
    samples, classes = listed(tmp_path, *rows)
    assert (samples.labels.tolist(), classes) == ([1, 0, 1], DataClasses(("cat", "dog"), "words"))
    (tmp_path / "classes.txt").write_text("dog\nbird\ncat\n")
    samples, classes = listed(tmp_path, *rows)
    assert (samples.labels.tolist(), classes) == ([0, 2, 0], DataClasses(("dog", "bird", "cat"), "list"))
    samples, _ = listed(tmp_path, sample("a", 2), sample("b", 0, 1))
    assert samples.labels.tolist() == [2, 0]


def test_a_label_in_json_is_one_and_both_may_say_the_same(tmp_path):
    rows = [sample("a", json=b'{"label": 3}'), sample("b", 4, 1, json=b'{"cls": 4}')]
    assert listed(tmp_path, *rows)[0].labels.tolist() == [0, 1]
    assert has_container_labels(tmp_path / "x.tar")


def test_hidden_members_folders_and_leading_dots_are_no_samples(tmp_path):
    folder = tarfile.TarInfo("./part")
    folder.type = tarfile.DIRTYPE
    rows = [sample("./part/a", 1), {"./part/._a.png": b"resource fork", "README": b"text"}]
    samples, _ = listed(tmp_path, *rows, members=[(folder, b"")])
    assert list(samples.names) == ["x.tar/part/a.png"]


REFUSED = {
    "no image": ([{"a.cls": b"1"}], "the sample 'a' of .* has no image"),
    "two images": ([{**sample("a", 1), "a.jpg": b"x"}], "has several images"),
    "no label": ([sample("a", 1), sample("b", seed=1)], "the sample 'b' of .* has no label"),
    "two labels": ([sample("a", 1, json=b'{"label": 2}')], "has two labels"),
    "labels in JSON that differ": ([sample("a", json=b'{"label": 2, "cls": 3}')], "has contradictory labels"),
    "a label of another kind": ([sample("a", json=b'{"label": [2]}')], "neither a number nor a name"),
    "JSON that is none": ([sample("a", json=b"[" * 9)], "is not a JSON object"),
    "an empty label": ([sample("a", "")], "contains no label"),
    "a label that is no text": ([{"a.png": b"x", "a.cls": b"\xff"}], "contains no label"),
    "an unknown label": ([sample("a", -1)], "is not a class number"),
    "a key twice": ([sample("a", 1), sample("b", 1, 1), sample("a", 1, 2)], "two samples of .* have the same key"),
    "a member twice": ([sample("a", 1), {"a.png": b"y"}], "contains 'a.png' twice"),
    "a label of many bytes": ([sample("a", "x" * 5000)], "is too large"),
    "a name that leads out": ([{"../a.png": b"x", "../a.cls": b"1"}], "whose path leaves the archive"),
    "a name from the root": ([{"/a.png": b"x"}], "whose path leaves the archive"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_samples_that_are_not_clear_are_refused(tmp_path, case):
    rows, said = REFUSED[case]
    with pytest.raises(DataError, match=said):
        listed(tmp_path, *rows)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.FIFOTYPE, "pipe"),
    ],
)
def test_what_is_no_file_of_a_data_set_is_refused(tmp_path, kind, said):
    info = tarfile.TarInfo("b.png")
    info.type, info.linkname = kind, "/etc/passwd"
    with pytest.raises(DataError, match=said):
        listed(tmp_path, sample("a", 1), members=[(info, b"")])


def test_a_sparse_member_is_refused(tmp_path):
    info = tarfile.TarInfo("b.png")
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": "9", "GNU.sparse.map": "0,1"}
    info.size = 1
    with pytest.raises(DataError, match="a sparse file"):
        listed(tmp_path, sample("a", 1), members=[(info, b"x")])


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz"])
def test_a_compressed_tar_is_refused_and_the_reason_given(tmp_path, name):
    plain = write_tar(tmp_path / "plain", sample("a", 1)).read_bytes()
    (tmp_path / "plain").unlink()
    (tmp_path / name).write_bytes(gzip.compress(plain))
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match="is a compressed tar") as told:
            list_images(path, "none")
        assert "read in place" in told.value.expected


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A tar of three samples, and its bytes."""
    path = write_tar(tmp_path_factory.mktemp("three") / "x.tar", *(sample(f"{i}", i, i) for i in range(3)))
    return path, path.read_bytes()


def test_a_tar_that_was_cut_names_the_member(tmp_path, three):
    whole = three[1]
    (tmp_path / "x.tar").write_bytes(whole[: 512 + 100])
    with pytest.raises(DataError, match="is not a complete tar") as told:
        list_images(tmp_path / "x.tar", "folders")
    assert "'0.png' has 440 bytes" in told.value.found and "but only 100 are present" in told.value.found
    end = len(whole.rstrip(b"\0")) + 511 & ~511
    (tmp_path / "x.tar").write_bytes(whole[:end])
    with pytest.raises(DataError, match="is not a complete tar") as told:
        list_images(tmp_path / "x.tar", "folders")
    assert told.value.found == "no end-of-archive marker after '2.cls': the file is truncated"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_tar_is_refused_or_gives_images_of_its_own(tmp_path, three, data):
    """Whatever byte is another one or is missing: an error of ours, or what the whole tar holds at these places."""
    whole = bytearray(three[1])
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        whole[data.draw(st.integers(0, 4 * 512))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "x.tar"
    path.write_bytes(whole)
    try:
        samples, _ = list_images(path, "folders")
    except DataError:
        return
    for each in samples:
        assert bytes(whole).count(each.content()) >= 1
    assert len(samples) == 3


def test_several_tars_in_one_file_are_not_read_by_half(tmp_path, three):
    (tmp_path / "x.tar").write_bytes(three[1] * 2)
    with pytest.raises(DataError, match="has trailing data after the end-of-archive marker"):
        list_images(tmp_path / "x.tar", "folders")


def test_a_header_that_claims_gigabytes_is_not_read(tmp_path):
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.XHDTYPE, 1 << 32
    (tmp_path / "x.tar").write_bytes(info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict") + bytes(4096))
    with pytest.raises(DataError, match="is not a complete tar"):
        list_images(tmp_path / "x.tar", "none")


def test_an_image_that_is_too_large_is_skippable_and_not_read(tmp_path, monkeypatch):
    samples, _ = listed(tmp_path, sample("a", 1))
    monkeypatch.setattr("vitdeploy.data.containers.held.MAX_FILE_BYTES", 100)
    with pytest.raises(ImageError, match=r"x.tar/a.png is too large for an image file"):
        samples[0].content()


def test_a_tar_that_changed_since_it_was_listed_is_not_read(tmp_path):
    samples, _ = listed(tmp_path, sample("a", 1))
    write_tar(tmp_path / "x.tar", sample("a", 1, 5), sample("b", 1, 6))
    with pytest.raises(DataError, match="changed while its images were being read"):
        samples[0].content()
    (tmp_path / "x.tar").unlink()
    with pytest.raises(DataError, match="changed while"):
        samples[0].content()


def test_the_index_takes_forty_bytes_an_image_beside_its_name(tmp_path):
    many = [{f"n01440764/{i:08}.jpg": b"x"} for i in range(3000)]
    path = write_tar(tmp_path / "x.tar", *many)
    tracemalloc.start()
    samples = list_images(path, "none")[0]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    name = len("x.tar/n01440764/00000000.jpg")
    assert len(samples) == 3000 and held / len(samples) < 1.15 * name + 40 + 5
    part = samples.pick(np.array([7, 3]))
    assert [each.held.offset for each in part] == [samples[i].held.offset for i in (7, 3)]
    assert samples._holder.picked(np.array([7, 3])).at(1, "") == samples[3].held


def test_members_are_seen_by_what_reads_headers_alone():
    assert tars._split("part/a.b.png") == ("part/a", "b.png") and tars._split("part/.a.png") is None
    assert tars._split("part.x/a") is None
