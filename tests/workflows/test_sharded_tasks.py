"""`verify` in shards of tasks with an answer for every object or pixel: the document of all images at once."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.workflows.dense_graphs import HEADS, LABELS, graph, picture, scenes
from tests.workflows.test_shard_executors import stored
from tests.workflows.test_sharded import ENGINE, ORIGINAL, small_shards  # noqa: F401 - a fixture of all tests
from vitdeploy.errors import DataError, ImageError
from vitdeploy.spec import Budget
from vitdeploy.store.store import STORE_VARIABLE
from vitdeploy.tasks.adapter import DataChoice
from vitdeploy.workflows import sharded
from vitdeploy.workflows.comparison import verify_subjects
from vitdeploy.workflows.executors import Processes
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.subjects import Finder

IMAGES = 72
TASKS = list(HEADS)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return scenes(tmp_path_factory.mktemp("scenes"), IMAGES)


@pytest.fixture
def data(drawn, tmp_path):
    folder = shutil.copytree(drawn.images.parent, tmp_path / "scenes")
    return dataclasses.replace(drawn, images=folder / "images", labels=folder / "labels")


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Of each task the original, and an engine that answers otherwise."""
    work, found = tmp_path_factory.mktemp("graphs"), {}
    for task in TASKS:
        for name, noise in ((ORIGINAL, 0.0), (ENGINE, 0.2)):
            folder = work / f"{task}-{name}"
            folder.mkdir()
            file = graph(task, work / f"{task}-{name}.onnx", noise)
            compile_bundle(file, "onnxruntime-cpu", None, None, folder)
            [subject] = Finder(work).find(str(folder))
            found[task, name] = dataclasses.replace(subject, name=name)
    return {task: (found[task, ORIGINAL], found[task, ENGINE]) for task in TASKS}


def verified(data, pair, task, labelled=True, skip_bad=False, executor=None, progress=None):
    """The document, and the images that each artifact ran on."""
    ran, (theirs, ours) = {}, pair
    kind, place = (LABELS[task], data.annotations(task)) if labelled else ("none", None)
    found = verify_subjects(
        *(ours, theirs, DataChoice(data.images, kind, place, 0, "all", 3)),
        skip_bad=skip_bad,
        budget=Budget(max_drop=1.0 if labelled else None, min_agreement=50),
        progress=progress or (lambda text, done, total: ran.update({text: total})),
        executor=executor,
    )
    return without_control(json.dumps(found.document())), {name: ran.get(name, 0) for name in (ORIGINAL, ENGINE)}


def without_control(document):
    """A control pairs images of one shard, so it is not that of all images at once."""
    numbers = re.sub(r'"control": \{[^}]*\},|((?<=agree to )|(?<=would lose )|(?<=a bound of ))[-\d.]+', "", document)
    assert numbers != document
    return numbers


def at_once(monkeypatch, *arguments, **options):
    with monkeypatch.context() as patch:
        patch.setattr(sharded, "MOST", 1 << 30)
        return verified(*arguments, **options)[0]


@pytest.mark.parametrize(
    ("task", "labelled"), [*((task, True) for task in TASKS), ("depth", False), ("detection", False)]
)
def test_the_document_is_that_of_all_images_at_once(data, sides, monkeypatch, task, labelled):
    found, ran = verified(data, sides[task], task, labelled)
    assert ran == {ORIGINAL: IMAGES, ENGINE: IMAGES}
    assert found == at_once(monkeypatch, data, sides[task], task, labelled)
    document = json.loads(found)
    assert document["n"] == IMAGES and document["agreement"] < 100
    assert (document["value"] is not None and document["value"] != document["reference_value"]) is labelled
    assert verified(data, sides[task], task, labelled) == (found, {ORIGINAL: 0, ENGINE: 0})


@pytest.mark.usefixtures("forked_workers")
def test_processes_leave_the_same_shards(data, sides, monkeypatch, tmp_path):
    task = "detection"
    found, _ = verified(data, sides[task], task)
    one = stored(tmp_path / "store")
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "another"))
    assert verified(data, sides[task], task, executor=Processes(2)) == (found, {ORIGINAL: IMAGES, ENGINE: IMAGES})
    assert stored(tmp_path / "another") == one and len(one) > 6


@pytest.mark.parametrize("task", ["depth", "instance-segmentation"])
def test_another_label_is_counted_again_and_nothing_else(data, sides, monkeypatch, task):
    before, _ = verified(data, sides[task], task)
    if task == "depth":
        np.save(data.annotations(task) / "010.npy", np.full((36, 40), 2.0, np.float32))
    else:
        document = json.loads(data.annotations(task).read_text())
        changed = next(row for row in document["annotations"] if row["image_id"] == 12)
        document["annotations"].remove(changed)
        data.annotations(task).write_text(json.dumps(document))
    found, ran = verified(data, sides[task], task)
    assert 0 < ran[ORIGINAL] == ran[ENGINE] <= 8 and found != before
    assert found == at_once(monkeypatch, data, sides[task], task)


def test_a_label_that_changes_meanwhile_is_found(data, sides):
    def progress(text, done, total):
        if text == ENGINE and done:
            Image.new("L", (40, 36), 1).save(data.annotations("segmentation") / "071.png")

    with pytest.raises(DataError, match="images or labels changed during the evaluation") as caught:
        verified(data, sides["segmentation"], "segmentation", progress=progress)
    assert "labels/segmentation/071.png" in caught.value.found
    found, ran = verified(data, sides["segmentation"], "segmentation")
    assert 0 < ran[ORIGINAL] == ran[ENGINE] <= 8 and json.loads(found)["n"] == IMAGES


def test_unreadable_images_are_skipped_and_counted_or_are_the_error(data, sides, monkeypatch):
    """Of one the size can be read, as its labels need; of the other nothing."""
    Image.new("RGB", (40, 36)).save(data.images / "004.bmp")
    half = (data.images / "004.bmp").read_bytes()[:900]
    (data.images / "004.png").unlink()
    (data.images / "004.bmp").write_bytes(half)
    (data.images / "031.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"031\.png") as caught:
        verified(data, sides["detection"], "detection")
    assert "--skip-bad" in caught.value.fix
    found, _ = verified(data, sides["detection"], "detection", skip_bad=True)
    assert found == at_once(monkeypatch, data, sides["detection"], "detection", skip_bad=True)
    assert [path[-7:] for path in json.loads(found)["skipped"]] == ["031.png", "004.bmp"]


def test_the_side_that_answers_keeps_its_answers_by_its_own_head(data, sides, monkeypatch):
    """As at once: labels are read as the artifact says, whatever the original says of them."""
    theirs, ours = sides["segmentation"]
    other = dataclasses.replace(HEADS["segmentation"], reduce_labels=True, ignore=0)
    pair = dataclasses.replace(theirs, setting=dataclasses.replace(theirs.setting, postprocess=other)), ours
    found, ran = verified(data, pair, "segmentation")
    assert ran == {ORIGINAL: IMAGES, ENGINE: IMAGES}
    assert found == at_once(monkeypatch, data, pair, "segmentation")
    assert found == verified(data, sides["segmentation"], "segmentation")[0]


def test_a_folder_that_grows_has_few_images_to_evaluate(data, sides, monkeypatch):
    verified(data, sides["depth"], "depth", labelled=False)
    picture(data.images / "030x.png", 5000)
    found, ran = verified(data, sides["depth"], "depth", labelled=False)
    assert 0 < ran[ORIGINAL] == ran[ENGINE] <= 16
    assert found == at_once(monkeypatch, data, sides["depth"], "depth", labelled=False)
