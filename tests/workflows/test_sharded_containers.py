"""`verify` of images that lie in tars, tables and behind URIs: the document of the same images as files."""

import dataclasses
import io
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import SMALL_MODEL
from tests.data.made import write_tar
from vitdeploy.errors import DataError
from vitdeploy.models.source import Source
from vitdeploy.spec import Budget
from vitdeploy.store.store import STORE_VARIABLE
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows import sharded
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.subjects import Finder

IMAGES = 60


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Noise in class folders, and the bytes of each image by its number."""
    folder, found = tmp_path_factory.mktemp("noise"), []
    for i in range(IMAGES):
        path = folder / str(i % 10) / f"{i:04}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (32, 32), np.uint8)).save(path)
        found.append(path.read_bytes())
    return folder, found


@pytest.fixture(scope="module")
def subjects(small_checkpoint, small_bundle, tmp_path_factory):
    """The original and an engine."""
    source, work = Source(checkpoint=small_checkpoint), tmp_path_factory.mktemp("work")
    found = (Finder(work).find(text, source)[0] for text in (SMALL_MODEL, str(small_bundle)))
    return [dataclasses.replace(each, name=name) for each, name in zip(found, ("original", "engine"), strict=True)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(sharded, "WINDOW", 4)
    monkeypatch.setattr(sharded, "MOST", 20)


def verified(path, subjects, skip_bad=False):
    """The document, and on how many images the engine ran."""
    ran = {}
    found = verify_subjects(
        *(subjects[1], subjects[0], DataChoice(path, "folders", None, 0, "all", 3)),
        skip_bad=skip_bad,
        budget=Budget(max_drop=1.0, min_agreement=50.0),
        progress=lambda text, done, total: ran.update({text: total}),
        note=lambda text: None,
    )
    return found.document(), ran.get("engine", 0)


def tars(folder, contents):
    for shard in range(3):
        numbers = range(20 * shard, 20 * shard + 20)
        rows = [{f"{i:04}.png": contents[i], f"{i:04}.cls": str(i % 10).encode()} for i in numbers]
        write_tar(folder / f"val-{shard}.tar", *rows)
    return folder


def tables(folder, contents):
    for part in range(2):
        numbers = range(30 * part, 30 * part + 30)
        found = pa.table({"image": [contents[i] for i in numbers], "label": [i % 10 for i in numbers]})
        pq.write_table(found, folder / f"val-0000{part}-of-00002.parquet", row_group_size=7)
    return folder


def addresses(folder, contents):
    for i, content in enumerate(contents):
        fsspec.filesystem("memory").pipe_file(f"/shard/{i}.png", content)
    rows = (f"memory://shard/{i}.png,{i % 10}\n" for i in range(len(contents)))
    (folder / "list.csv").write_text("".join(rows))
    return folder / "list.csv"


@pytest.mark.parametrize("write", [tars, tables, addresses], ids=lambda each: each.__name__)
def test_the_numbers_are_those_of_the_files(contents, subjects, tmp_path, monkeypatch, write):
    """In shards and at once, and nothing is evaluated again."""
    (tmp_path / "data").mkdir()
    place = write(tmp_path / "data", contents[1])
    expected, _ = verified(contents[0], subjects)
    found, ran = verified(place, subjects)
    assert ran == IMAGES and verified(place, subjects) == (found, 0)
    told = {"mapping", "remarks", "warnings"}  # how classes became the model's
    assert {**found, **dict.fromkeys(told)} == {**expected, **dict.fromkeys(told)} and found["n"] == IMAGES
    assert found["mapping"]["how"] == "number"
    monkeypatch.setattr(sharded, "MOST", 1 << 30)
    assert verified(place, subjects)[0] == found


def test_a_data_set_that_grows_and_changes_is_evaluated_where_it_did(contents, subjects, tmp_path):
    (tmp_path / "data").mkdir()
    place = tars(tmp_path / "data", contents[1])
    verified(place, subjects)
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(IMAGES).integers(0, 256, (32, 32), np.uint8)).save(buffer, "png")
    write_tar(place / "val-3.tar", {"more.png": buffer.getvalue(), "more.cls": b"3"})
    found, ran = verified(place, subjects)
    assert found["n"] == IMAGES + 1 and 0 < ran <= 40
    write_tar(place / "val-3.tar", {"more.png": contents[1][5], "more.cls": b"5"})  # which is there already
    assert verified(place, subjects)[0]["n"] == IMAGES


def test_unreadable_members_are_skipped_by_name_or_are_the_error(contents, subjects, tmp_path):
    (tmp_path / "data").mkdir()
    place = tars(tmp_path / "data", [b"no image" if i == 31 else each for i, each in enumerate(contents[1])])
    found, _ = verified(place, subjects, skip_bad=True)
    assert found["skipped"] == [str(place / "val-1.tar" / "0031.png")] and found["n"] == IMAGES - 1


def test_labels_of_another_kind_are_for_files(tmp_path, subjects, contents):
    (tmp_path / "data").mkdir()
    place = tars(tmp_path / "data", contents[1])
    choice = DataChoice(place / "val-0.tar", "coco", Path("x.json"), 0, "all", 3)
    from vitdeploy.tasks.adapter import check_labels

    with pytest.raises(DataError, match="require a folder of image files"):
        check_labels(choice, ("coco",), "detection")
