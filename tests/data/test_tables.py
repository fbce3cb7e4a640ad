"""Parquet files and saved data sets: names of classes by name, and no image that is not there."""

import json

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="pip install 'vitdeploy[data]'")
pq = pytest.importorskip("pyarrow.parquet")

from tests.data.made import features, picture, table  # noqa: E402
from vitdeploy.data.containers import listing as rows  # noqa: E402
from vitdeploy.data.containers.listing import DataClasses  # noqa: E402
from vitdeploy.data.containers.uris import read_written  # noqa: E402
from vitdeploy.data.decoding import (  # noqa: E402
    DecodedSet,
    Skipped,
    reading_order,
)
from vitdeploy.data.folder import has_container_labels, list_images  # noqa: E402
from vitdeploy.errors import DataError, ImageError, MissingPackageError  # noqa: E402
from vitdeploy.runtime.preprocess import load_pixels  # noqa: E402
from vitdeploy.spec import PreprocessSpec  # noqa: E402

PETS = ("dog", "cat")


def write(path, *arguments, size=None, **how):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(*arguments, **how), path, row_group_size=size)
    return path


def save(folder, *tables):
    """As `save_to_disk` of datasets."""
    folder.mkdir()
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, each in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, each.schema) as writer:
            writer.write_table(each, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_parquet_files_of_one_set_are_read_by_row(tmp_path):
    write(tmp_path / "data" / "val-00000-of-00002.parquet", [0, 1, 1], PETS, seeds=[0, 1, 2], size=2)
    write(tmp_path / "data" / "val-00001-of-00002.parquet", [1], PETS, seeds=[3])
    samples, classes = list_images(tmp_path, "folders")
    parts = [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert list(samples.names) == [f"data/val-{file:05}-of-00002.parquet/{row}" for file, row in parts]
    assert [each.content() for each in samples] == [picture(i) for i in range(4)]
    assert (samples.labels.tolist(), classes) == ([0, 1, 1, 1], DataClasses(PETS, "list"))
    assert read_written(json.loads(json.dumps(samples[2].held.written()))) == samples[2].held
    assert samples._holder.picked(samples.places[2:]).at(1, "") == samples[3].held


def test_a_saved_data_set_is_read_as_it_lies(tmp_path):
    folder = save(tmp_path / "set", table([1, 0, 1], PETS, seeds=[0, 1, 2]), table([0], PETS, seeds=[3]))
    samples, classes = list_images(folder, "folders")
    assert list(samples.names) == [
        f"data-0000{file}-of-00002.arrow/{row}" for file, row in ((0, 0), (0, 1), (0, 2), (1, 0))
    ]
    assert [each.content() for each in samples] == [picture(i) for i in range(4)]
    assert (samples.labels.tolist(), classes) == ([1, 0, 1, 0], DataClasses(PETS, "list"))


def test_what_datasets_itself_writes_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets, which writes the data set")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(PETS))})
    rows = {"image": [{"bytes": picture(i), "path": None} for i in range(3)], "label": [0, 1, 1]}
    found = datasets.Dataset.from_dict(rows, features=kinds)
    found.save_to_disk(str(tmp_path / "saved"))
    found.to_parquet(str(tmp_path / "one.parquet"))
    for path in (tmp_path / "saved", tmp_path / "one.parquet"):
        samples, classes = list_images(path, "folders")
        assert [each.content() for each in samples] == [picture(i) for i in range(3)]
        assert (samples.labels.tolist(), classes.names) == ([0, 1, 1], PETS)


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (pa.array(["dog", "cat", "dog"]), [1, 0, 1], DataClasses(("cat", "dog"), "words")),
        (pa.array(["dog", "cat", "dog"]).dictionary_encode(), [1, 0, 1], DataClasses(("cat", "dog"), "words")),
        (pa.array([7, 2, 7], pa.uint8()), [1, 0, 1], DataClasses(("2", "7"), "numbers")),
        (pa.array(["7", "12", "7"]), [0, 1, 0], DataClasses(("7", "12"), "numbers")),
    ],
)
def test_labels_are_numbers_or_names(tmp_path, labels, expected, classes):
    path = tmp_path / "x.parquet"
    plain = pa.table({"image": [picture(i) for i in range(3)], "label": labels})
    pq.write_table(plain, path)
    samples, found = list_images(path, "folders")
    assert (samples.labels.tolist(), found) == (expected, classes)
    assert samples[1].content() == picture(1) and has_container_labels(path)


def test_names_beside_the_file_and_in_it_have_to_agree(tmp_path):
    path = write(tmp_path / "x.parquet", [0, 1])
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert list_images(path, "folders")[1] == DataClasses(("cat", "dog"), "list")
    write(path, [0, 1], PETS)
    with pytest.raises(DataError, match="have different class names"):
        list_images(path, "folders")
    write(path, [0, 2], ("cat", "dog"))
    with pytest.raises(DataError, match="is not one of its classes"):
        list_images(path, "folders")


def refused(path, said, labels="folders"):
    with pytest.raises(DataError, match=said) as told:
        list_images(path, labels)
    return told.value


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"label": [1]}, "no unambiguous image column"),
        ({"a": [b"x"], "b": [b"y"], "label": [1]}, "no unambiguous image column"),
        ({"image": ["x.png"], "label": [1]}, "no unambiguous image column"),
        ({"image": [b"x"]}, "no unambiguous label column"),
        ({"image": [b"x"], "cls": [1], "class": [2]}, None),
        ({"image": [b"x"], "label": [0.5]}, "does not contain classes"),
        ({"image": [b"x"], "label": [[1]]}, "does not contain classes"),
        ({"image": [b"x"], "label": [True]}, "does not contain classes"),
        ({"image": [b"x", b"y"], "label": [1, None]}, "has no label"),
        ({"image": [b"x"], "label": [-1]}, "is not a class number"),
        ({"image": [b"x", None], "label": [1, 2]}, "has images without bytes"),
    ],
)
def test_columns_that_are_not_clear_are_refused(tmp_path, columns, said):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(columns), path)
    if said is None:  # the first of the usual names
        assert list_images(path, "folders")[1].names == ("1",)
    else:
        refused(path, said)


def test_what_is_wrong_with_a_schema_is_said(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(table([0, 1]).replace_schema_metadata({b"huggingface": b"{"}), path)
    refused(path, "cannot read the feature metadata of Hugging Face's datasets")
    for names, said in ((["a", "a"], "'a' twice"), (["a", ""], "an empty name")):
        pq.write_table(table([0, 1]).replace_schema_metadata(features(names)), path)
        assert refused(path, "invalid list of class names").found == said


def test_images_that_only_name_a_file_are_refused(tmp_path):
    image = pa.array(
        [{"bytes": None, "path": "/etc/passwd"}], pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    )
    bare = pa.table({"image": image, "label": [1]})
    pq.write_table(bare, tmp_path / "x.parquet")
    error = refused(tmp_path / "x.parquet", "has images without bytes")
    assert "1 of 1 rows" in error.found and "save_to_disk" in error.fix
    refused(save(tmp_path / "set", bare), "has images without bytes")


def test_an_image_without_bytes_that_no_statistics_tell_of_can_be_skipped(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"image": [picture(0), None], "label": [1, 2]}), path, write_statistics=False)
    samples, _ = list_images(path, "folders")
    assert samples[0].content() == picture(0)
    with pytest.raises(ImageError, match=r"x.parquet/1 has no image bytes"):
        samples[1].content()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.999])
def test_a_file_that_was_cut_is_refused(tmp_path, share):
    path = write(tmp_path / "x.parquet", [0, 1], PETS)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    refused(path, "is not a complete Parquet file", "none")


def test_a_saved_set_that_is_not_whole_is_refused(tmp_path):
    folder = save(tmp_path / "set", table([1, 0], PETS), table([0], PETS))
    second = folder / "data-00001-of-00002.arrow"
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    refused(folder, "is not a complete Arrow file")
    second.unlink()
    assert refused(folder, "is not a complete data set").found == "data-00001-of-00002.arrow is missing"
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}')
    refused(folder, "is not a complete data set")


def test_a_damaged_page_is_found_when_it_is_read(tmp_path):
    path = write(tmp_path / "x.parquet", [0, 1], PETS)
    content = bytearray(path.read_bytes())
    content[4:40] = bytes(36)  # the first page of the images
    path.write_bytes(content)
    samples, _ = list_images(path, "folders")
    with pytest.raises(DataError, match="is not a complete Parquet file"):
        samples[0].content()


def test_a_row_group_of_gigabytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("vitdeploy.data.containers.tables.MAX_GROUP", 100)
    assert "row_group_size" in refused(write(tmp_path / "x.parquet", [0, 1], PETS), "a row group of").fix


def test_few_row_groups_are_kept(tmp_path, monkeypatch):
    samples, _ = list_images(write(tmp_path / "x.parquet", [0] * 6, PETS, size=2), "none")
    monkeypatch.setattr(rows, "_kept", rows._Kept())
    monkeypatch.setattr(rows, "KEPT_BYTES", 1)
    for i in (0, 1, 5, 2, 0):
        assert samples[i].content() == picture(i)
    assert len(rows._kept._groups) == 1


def test_pixels_are_kept_by_image_though_groups_are_read_one_after_another(tmp_path):
    """One of them cannot be read."""
    found = pa.table({"image": [b"none" if i == 4 else picture(i) for i in range(9)], "label": [0] * 9})
    pq.write_table(found, tmp_path / "x.parquet", row_group_size=3)
    samples = list_images(tmp_path / "x.parquet", "none")[0].pick(np.array([8, 0, 4, 3, 7, 1]))
    assert reading_order(samples) == [1, 5, 2, 3, 0, 4]
    decoded, skipped, spec = DecodedSet(samples, tmp_path), Skipped([]), PreprocessSpec(8, (8, 8))
    kept = decoded.check(spec, skipped, lambda count: None)
    assert [each.path.name for each in kept] == ["8", "0", "3", "7", "1"] and len(skipped.paths) == 1
    pixels = decoded.of(spec)
    assert [pixels[i][0].tobytes() for i in range(5)] == [
        load_pixels(picture(n), spec).tobytes() for n in (8, 0, 3, 7, 1)
    ]


def test_files_of_different_sets_and_parts_are_refused(tmp_path):
    write(tmp_path / "a" / "0.parquet", [0], PETS)
    write(tmp_path / "a" / "1.parquet", [0], ("dog", "bird"))
    refused(tmp_path / "a", "does not belong to the same data set as 0.parquet")
    write(tmp_path / "b" / "data" / "train-00000-of-00001.parquet", [0], PETS)
    write(tmp_path / "b" / "data" / "test-00000-of-00001.parquet", [0], PETS)
    error = refused(tmp_path / "b", "contains several parts of a data set")
    assert error.fix == f"pass one: {tmp_path}/b/data/test-*-of-00001.parquet"
    assert len(list_images(tmp_path / "b" / "data" / "test-*.parquet", "none")[0]) == 1
    write(tmp_path / "c" / "val-00000-of-00002.parquet", [0], PETS)
    assert (
        "1 of 2 files; missing: val-00001-of-00002" in refused(tmp_path / "c", "is missing files of the data set").found
    )
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "dataset_dict.json").write_text("{}")
    save(tmp_path / "d" / "test", table([0], PETS))
    assert refused(tmp_path / "d", "several parts").fix == f"pass one: {tmp_path}/d/test"


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "x.parquet", [0], PETS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPackageError, match="needs the package pyarrow") as told:
        list_images(path, "none")
    assert "vitdeploy[data]" in told.value.fix
