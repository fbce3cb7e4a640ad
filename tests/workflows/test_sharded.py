"""`verify` in shards: the document of all images at once, of only the work that is new."""

import dataclasses
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SMALL_MODEL
from tests.forked import start
from vitdeploy.errors import DataError, ImageError
from vitdeploy.models.source import Source
from vitdeploy.spec import Budget
from vitdeploy.store.store import STORE_VARIABLE
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows import sharded
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Finder

IMAGES = 240
ORIGINAL, ENGINE, DIGESTS = "original", "engine", "digests of the images"


def picture(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (32, 32), np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Ten class folders of noise."""
    folder = tmp_path_factory.mktemp("noise")
    for i in range(IMAGES):
        picture(folder / str(i % 10) / f"{i:04}.png", i)
    return folder


@pytest.fixture
def images(noise, tmp_path):
    return shutil.copytree(noise, tmp_path / "images")


@pytest.fixture(scope="module")
def subjects(small_checkpoint, small_bundle, small_export, tmp_path_factory):
    """The original, and two engines of it."""
    source, work = Source(checkpoint=small_checkpoint), tmp_path_factory.mktemp("work")
    (work / "openvino").mkdir()
    compile_bundle(small_export / "model.onnx", "openvino-cpu", None, None, work / "openvino")
    found = [Finder(work).find(text, source)[0] for text in (SMALL_MODEL, str(small_bundle), str(work / "openvino"))]
    return [dataclasses.replace(each, name=name) for each, name in zip(found, (ORIGINAL, ENGINE, ENGINE), strict=True)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path):
    """A store of the test's own, and shards of some twenty images."""
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    monkeypatch.setattr(sharded, "WINDOW", 8)
    monkeypatch.setattr(sharded, "MOST", 64)


def verified(images, ours, theirs, labels="folders", count="all", skip_bad=False, progress=None, executor=None):
    """The document, the images that each artifact ran on, and the notes."""
    ran, notes = {}, []
    found = verify_subjects(
        *(ours, theirs, DataChoice(images, labels, None, 0, count, 3)),
        skip_bad=skip_bad,
        budget=Budget(max_drop=1.0, min_agreement=99.9),
        progress=progress or (lambda text, done, total: ran.update({text: total})),
        note=notes.append,
        executor=executor,
    )
    return found.document(), {name: ran.get(name, 0) for name in (ORIGINAL, ENGINE)}, notes


def at_once(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "MOST", 1 << 30)
        return verified(*arguments, **options)[0]


@pytest.mark.parametrize(
    ("labels", "count", "engine"), [("folders", "all", 1), ("folders", 203, 2), ("none", "all", 2)], ids=str
)
def test_the_document_is_that_of_all_images_at_once(images, subjects, monkeypatch, labels, count, engine):
    theirs, ours = subjects[0], subjects[engine]
    found, ran, notes = verified(images, ours, theirs, labels, count)
    n = IMAGES if count == "all" else count
    assert ran == {ORIGINAL: n, ENGINE: n}
    assert found == at_once(monkeypatch, images, ours, theirs, labels, count)
    assert found["n"] == n
    assert [text.split(": ")[0] for text in notes if "inference" in text] == [ORIGINAL, ENGINE]
    assert any("they prove only" in text for text in notes)


def test_what_was_evaluated_is_not_evaluated_again(images, subjects):
    original, first, second = subjects
    one = verified(images, first, original)[0]
    assert verified(images, first, original)[:2] == (one, {ORIGINAL: 0, ENGINE: 0})
    assert verified(images, second, original)[1] == {ORIGINAL: 0, ENGINE: IMAGES}
    resized = dataclasses.replace(first.setting.images, resize=40)
    other = dataclasses.replace(first, setting=dataclasses.replace(first.setting, preprocess=resized))
    assert verified(images, other, original)[1] == {ORIGINAL: IMAGES, ENGINE: IMAGES}


def test_a_folder_that_grows_has_few_images_to_evaluate(images, subjects, monkeypatch):
    original, engine, _ = subjects
    verified(images, engine, original)
    picture(images / "4" / "0100x.png", 1000)
    found, ran, _ = verified(images, engine, original)
    assert ran[ORIGINAL] == ran[ENGINE] and 0 < ran[ENGINE] <= 3 * 64 < IMAGES
    assert found == at_once(monkeypatch, images, engine, original)
    picture(images / "4" / "0104.png", 1001)  # another picture in the place of one
    found, ran, _ = verified(images, engine, original)
    assert 0 < ran[ENGINE] <= 64
    assert found == at_once(monkeypatch, images, engine, original)


def test_unreadable_images_are_skipped_and_counted_or_are_the_error(images, subjects, monkeypatch):
    original, engine, _ = subjects
    bad = [images / "2" / "0002.png", images / "7" / "0107.png"]
    for path in bad:
        path.write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"0002\.png") as caught:
        verified(images, engine, original)
    assert "--skip-bad" in caught.value.fix
    found, _, _ = verified(images, engine, original, skip_bad=True)
    assert found == at_once(monkeypatch, images, engine, original, skip_bad=True)
    assert sorted(found["skipped"]) == [str(path) for path in bad]
    with pytest.raises(ImageError, match=r"0002\.png"):  # what was stored with it skipped is no answer to that
        verified(images, engine, original)


def test_a_folder_without_any_readable_image_is_refused(images, subjects):
    for path in images.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="no image could be read") as caught:
        verified(images, subjects[1], subjects[0], skip_bad=True)
    assert caught.value.found == f"{IMAGES} unreadable files"


def test_labels_that_do_not_fit_are_doubted_as_all_at_once(images, subjects, monkeypatch):
    found, _, _ = verified(images, subjects[1], subjects[0])
    assert len(found["warnings"]) == 1 and "the original's top-1 is" in found["warnings"][0]
    assert found == at_once(monkeypatch, images, subjects[1], subjects[0])


def test_without_a_store_or_an_identity_all_images_are_evaluated_at_once(images, subjects, monkeypatch, tmp_path):
    original, engine, _ = subjects
    expected = verified(images, engine, original)[0]
    unknown = dataclasses.replace(engine, identity=None)
    assert verified(images, unknown, original)[:2] == (expected, {ORIGINAL: IMAGES, ENGINE: IMAGES})
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "file" / "store"))
    assert verified(images, engine, original)[:2] == (expected, {ORIGINAL: IMAGES, ENGINE: IMAGES})


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "openvino-cpu"])
def test_a_graph_that_is_compiled_again_is_the_same_engine(small_export, tmp_path, target):
    identities = []
    for name in "ab":
        (tmp_path / name).mkdir()
        [found] = Finder(tmp_path / name, target).find(str(small_export))
        identities.append(found.identity())
    assert identities[0] == identities[1] and identities[0].inputs


KILLED = """
import os, signal
from pathlib import Path
from vitdeploy.models.source import Source
from vitdeploy.spec import Budget
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows import sharded
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.subjects import Finder

sharded.WINDOW, sharded.MOST = 8, 64
source = Source(checkpoint=Path(checkpoint))
theirs, ours = (Finder(Path()).find(text, source)[0] for text in (model, bundle))

def progress(text, done, total):
    if text == (theirs.name if stops_in == "original" else ours.name) and done >= stops_at:
        os.kill(os.getpid(), signal.SIGKILL)

choice = DataChoice(Path(images), "folders", None, 0, "all", 3)
verify_subjects(ours, theirs, choice, skip_bad=False, budget=Budget(), progress=progress)
"""


@pytest.mark.parametrize(("stops_in", "stops_at"), [(ORIGINAL, 150), (ENGINE, 150)])
def test_a_killed_evaluation_goes_on_where_it_was(
    images, subjects, small_checkpoint, small_bundle, monkeypatch, stops_in, stops_at
):
    names = {"images": str(images), "model": SMALL_MODEL, "checkpoint": str(small_checkpoint)}
    process = start(exec, KILLED, {**names, "bundle": str(small_bundle), "stops_in": stops_in, "stops_at": stops_at})
    process.join()
    assert process.exitcode == -signal.SIGKILL
    found, ran, _ = verified(images, subjects[1], subjects[0])
    left = ran[stops_in]
    assert IMAGES - 150 <= left <= IMAGES - 150 + 64
    assert ran[ENGINE if stops_in == ORIGINAL else ORIGINAL] == (IMAGES if stops_in == ORIGINAL else 0)
    assert found == at_once(monkeypatch, images, subjects[1], subjects[0])
