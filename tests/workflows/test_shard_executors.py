"""`verify` in shards by processes of this machine, and by a real Ray cluster of two nodes: the bytes of one process."""

import dataclasses
import json

import pytest

from tests.conftest import IN_SCALE
from tests.workflows import pieces
from tests.workflows.test_sharded import (  # noqa: F401 - fixtures
    ENGINE,
    IMAGES,
    ORIGINAL,
    images,
    noise,
    picture,
    small_shards,
    subjects,
    verified,
)
from vitdeploy.errors import DataError, ImageError, StorageError, WorkerError
from vitdeploy.store.store import SHARED_VARIABLE, STORE_VARIABLE, Store
from vitdeploy.workflows import sharded
from vitdeploy.workflows import subjects as portable
from vitdeploy.workflows.executors import Processes, RayCluster

pytestmark = pytest.mark.usefixtures("forked_workers")


class Through:
    """An executor whose pieces are done by another function of a module, which is given the folder too."""

    def __init__(self, inner, function, folder, before=lambda: None):
        self.inner, self.function, self.folder, self.before = inner, function, folder, before

    def map(self, function, items):
        self.before()
        return self.inner.map(self.function, [(str(self.folder), item) for item in items])


def stored(folder):
    """Every artifact of a store by its key: the digest of what is in it."""
    paths = (folder / "artifacts").glob("*/*/artifact.json")
    return {path.parent.name: Store(folder).find(path.parent.name).digest for path in paths}


@pytest.fixture
def pair(subjects):  # noqa: F811
    """Two engines, one as the original, whose processes need no PyTorch."""
    return [dataclasses.replace(subjects[1], name=ORIGINAL), subjects[2]]


@pytest.fixture(scope="module", params=["processes", "ray"])
def executor(request):
    return Processes(4) if request.param == "processes" else RayCluster(request.getfixturevalue("cluster"))


def test_the_bytes_are_those_of_one_process(images, subjects, pair, executor, monkeypatch, tmp_path):  # noqa: F811
    original, engine = pair if isinstance(executor, Processes) else (subjects[0], subjects[2])
    expected, _, _ = verified(images, engine, original)
    one = stored(tmp_path / "store")
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "another"))
    monkeypatch.setenv(SHARED_VARIABLE, f"file://{tmp_path}/shared")
    found, ran, _ = verified(images, engine, original, executor=executor)
    assert json.dumps(found) == json.dumps(expected) and ran == {ORIGINAL: IMAGES, ENGINE: IMAGES}
    assert stored(tmp_path / "another") == one
    # Another machine finds in the shared store what these have found.
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "third"))
    assert verified(images, engine, original)[:2] == (expected, {ORIGINAL: 0, ENGINE: 0})


@IN_SCALE
def test_a_worker_that_is_killed_changes_nothing(images, pair, cluster, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(sharded, "MOST_AT_ONCE", 8)
    monkeypatch.setattr(sharded, "LEAST_PIECES", 2)
    original, engine = pair
    mortal = Through(RayCluster(cluster), pieces.evaluates_at_second_try, tmp_path / "begun")
    found, ran, _ = verified(images, engine, original, executor=mortal)
    assert ran == {ORIGINAL: IMAGES, ENGINE: IMAGES}
    assert verified(images, engine, original)[:2] == (found, {ORIGINAL: 0, ENGINE: 0})


def test_what_always_dies_is_named_and_the_rest_goes_on(images, pair, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(sharded, "LEAST_PIECES", 4)
    original, engine = pair
    verified(images, engine, original)
    picture(images / "3" / "0003.png", 1000)  # of the original, one shard is missing
    with pytest.raises(WorkerError, match=f"{ORIGINAL} was not evaluated on ") as caught:
        verified(images, engine, original, executor=Through(Processes(2), pieces.always_dies, tmp_path))
    assert "/0" in caught.value.found and "run the same command again" in caught.value.fix
    found, ran, _ = verified(images, engine, original, executor=Processes(2))
    assert 0 < ran[ORIGINAL] == ran[ENGINE] <= 64 and found["n"] == IMAGES


def test_images_that_change_meanwhile_are_found(images, pair, tmp_path):  # noqa: F811
    original, engine = pair

    def change():
        picture(images / "4" / "0104.png", 1001)

    with pytest.raises(DataError, match="images changed during the evaluation") as caught:
        verified(images, engine, original, executor=Through(Processes(2), pieces.evaluates, tmp_path, change))
    assert "4/0104.png" in caught.value.found and "run the same command again" in caught.value.fix
    found, ran, _ = verified(images, engine, original)
    assert 0 < ran[ORIGINAL] <= 64 and ran[ENGINE] == IMAGES == found["n"]


def test_images_that_change_in_this_process_are_found(images, pair):  # noqa: F811
    original, engine = pair

    def progress(text, done, total):
        if text == ENGINE and done:
            picture(images / "9" / "0239.png", done)

    with pytest.raises(DataError, match="images changed during the evaluation") as caught:
        verified(images, engine, original, progress=progress)
    assert caught.value.found == "9/0239.png"


def test_an_unreadable_image_is_named_by_a_process_as_by_this_one(images, pair):  # noqa: F811
    original, engine = pair
    (images / "2" / "0002.png").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"0002\.png"):
        verified(images, engine, original, executor=Processes(1))
    found = verified(images, engine, original, skip_bad=True, executor=Processes(1))[0]
    assert len(found["skipped"]) == 1 and found["n"] == IMAGES - 1


def test_what_an_executor_is_not_for_is_said(images, pair):  # noqa: F811
    original, engine = pair
    unknown = dataclasses.replace(engine, identity=None)
    _, _, notes = verified(images, unknown, original, executor=Processes(2))
    assert f"--executor is not used; images are evaluated in this process: {ENGINE} has no identity for a key" in notes


def test_a_node_with_other_files_or_packages_is_refused(subjects, tmp_path):  # noqa: F811
    asked = subjects[1].identity()
    runner = subjects[1].portable.runner(asked, Store(tmp_path))
    assert not runner.spinning  # on cores that another worker has its turn on
    for other, name in (
        (dataclasses.replace(asked, tools={**asked.tools, "onnxruntime": "1.0"}), "onnxruntime: 1.0"),
        (dataclasses.replace(asked, inputs={**asked.inputs, "more.bin": "0" * 64}), "more.bin: 000"),
    ):
        with pytest.raises(WorkerError, match="could give other answers") as caught:
            subjects[1].portable.runner(other, Store(tmp_path))
        assert caught.value.expected.startswith(name)


def test_an_engine_that_was_compiled_for_the_command_is_sent_by_the_store(small_export, subjects, tmp_path):  # noqa: F811
    from vitdeploy.workflows.subjects import Finder

    (tmp_path / "work").mkdir()
    [found] = Finder(tmp_path / "work").find(str(small_export))
    identity, store = found.identity(), Store(tmp_path / "store")
    sent = found.portable.sent(identity, store)
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert sent.runner(identity, store).load().outputs
    with pytest.raises(StorageError, match="is not in the store of"):
        sent.runner(identity, Store(tmp_path / "empty"))
    assert isinstance(sent, portable._PortableEngine)
