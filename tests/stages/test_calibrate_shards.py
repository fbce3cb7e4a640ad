"""Calibration of many images: the same bytes whoever observes them, and only what is new is observed again."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.made import write_tar
from vitdeploy.data.folder import Sample, list_images, split
from vitdeploy.errors import DataError, MissingFileError, WorkerError
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.quantization import observer
from vitdeploy.quantization.observers import Observation
from vitdeploy.stages import calibrate as stage
from vitdeploy.stages import calibrate_shards as shards
from vitdeploy.stages.calibrate import calibrate, calibrate_step
from vitdeploy.stages.calibrate_shards import Batch, GraphFile, _CalibrationShard, observe_piece
from vitdeploy.stages.step import read_json
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.store.key import Identity
from vitdeploy.store.store import Store
from vitdeploy.tasks.adapter import Data
from vitdeploy.workflows.executors import Processes, RayCluster

IMAGES = 96


@pytest.fixture(scope="module")
def folder(digits, tmp_path_factory):
    """A folder with some digits, copied so that they can be changed."""
    place = tmp_path_factory.mktemp("images")
    for sample in split(digits, "folders", calibration=IMAGES + 1, evaluation=1, seed=0).calibration:
        shutil.copyfile(sample.path, place / f"{sample.label}-{sample.path.name}")
    return place


def samples_in(folder, count=IMAGES):
    return [Sample(path, None) for path in sorted(folder.iterdir(), key=lambda path: path.name[::-1])[:count]]


@pytest.fixture
def samples(folder):
    return samples_in(folder)


@pytest.fixture(scope="module")
def graph(small_export):
    return small_export / "model.onnx"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """96 images are 32 that are shown first, for the moments, and some ten shards."""
    monkeypatch.setattr(observer, "MOMENT_IMAGES", 8)
    monkeypatch.setattr(stage, "IN_ONE", 40)
    monkeypatch.setattr(shards, "WINDOW", 4)
    monkeypatch.setattr(shards, "MOST", 32)


class Watched:
    """This process as an executor that can be watched, and that ends after some pieces."""

    def __init__(self, ends_after=None):
        self.seen, self.ends_after = [], ends_after

    def map(self, function, items):
        for index, item in reversed(list(enumerate(items))):
            if len(self.seen) == self.ends_after:
                yield index, WorkerError("a working process died")
            self.seen.append(item)
            yield index, function(item)


def files_of(graph, samples, out, workers=HERE, scratch=None):
    out.mkdir(parents=True)
    calibrate(graph, samples, out, scratch=scratch, workers=workers)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture(scope="module")
def whole(graph, folder, tmp_path_factory):
    """The files of a calibration in one piece, whose runs have one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer, "MOMENT_IMAGES", 8)
        patch.setattr(stage, "_runs", lambda memory, images: {"threads": shards.THREADS, "at_once": 1})
        patch.setattr(stage, "IN_ONE", IMAGES)
        return files_of(graph, samples_in(folder), tmp_path_factory.mktemp("whole") / "out")


@pytest.mark.parametrize("at_once", [1, 3])
def test_shards_in_this_process_give_the_bytes_of_one_piece(tmp_path, graph, samples, whole, monkeypatch, at_once):
    monkeypatch.setattr(stage, "usable_cores", lambda: at_once)
    assert files_of(graph, samples, tmp_path / "out") == whole


def test_shards_in_any_order_from_a_worker_give_the_same_bytes(tmp_path, graph, samples, whole):
    watched = Watched()
    assert files_of(graph, samples, tmp_path / "watched", Workers(watched)) == whole
    assert len(watched.seen) > 3


@pytest.mark.slow
def test_two_nodes_of_a_ray_cluster_give_the_same_bytes(tmp_path, graph, samples, whole, cluster):
    assert files_of(graph, samples, tmp_path / "out", Workers(RayCluster(cluster))) == whole


def test_a_graph_of_a_fixed_batch_is_cut_between_its_batches(tmp_path, graph, samples):
    model = load_graph(graph)
    for value in (*model.graph.inputs, *model.graph.outputs, *(v for node in model.graph for v in node.outputs)):
        if value.shape is not None and not isinstance(value.shape[0], int):
            value.shape = type(value.shape)([5, *list(value.shape)[1:]])
    save_graph(model, tmp_path / "fixed.onnx")
    watched = Watched()
    files = files_of(tmp_path / "fixed.onnx", samples, tmp_path / "shards", Workers(watched))
    assert {len(batch.samples) for piece in watched.seen for batch in piece.batches} == {5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "_runs", lambda memory, images: {"threads": shards.THREADS, "at_once": 1})
        patch.setattr(stage, "IN_ONE", IMAGES)
        assert files == files_of(tmp_path / "fixed.onnx", samples, tmp_path / "whole")


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_a_calibration_whose_workers_died_goes_on_with_the_shards_that_are_left(tmp_path, graph, samples, whole):
    store, broken = Store(tmp_path / "store"), Watched(ends_after=2)
    with pytest.raises(WorkerError, match="a working process died"):
        files_of(graph, samples, tmp_path / "broken", Workers(broken, store))
    assert list((tmp_path / "broken").iterdir()) == []
    rest, again = Watched(), Watched()
    assert files_of(graph, samples, tmp_path / "out", Workers(rest, store)) == whole
    assert not {piece.identity.key for piece in rest.seen} & {piece.identity.key for piece in broken.seen}
    assert files_of(graph, samples, tmp_path / "again", Workers(again, store)) == whole
    assert again.seen == []
    assert files_of(graph, samples, tmp_path / "anew", Workers(again, store, resume=False)) == whole
    assert len(again.seen) == len(rest.seen) + len(broken.seen)


def test_without_a_store_the_folder_of_the_stage_keeps_them(tmp_path, graph, samples, whole):
    scratch, rest = tmp_path / "scratch", Watched()
    with pytest.raises(WorkerError):
        files_of(graph, samples, tmp_path / "broken", Workers(Watched(ends_after=3)), scratch)
    told = []
    (tmp_path / "out").mkdir()
    calibrate(graph, samples, tmp_path / "out", lambda text, done, total: told.append(done), scratch, Workers(rest))
    assert told[:2] == [0, 32]  # the first images too
    assert len(rest.seen) > 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == whole


def test_of_a_set_that_grew_only_the_shards_around_the_new_image_are_observed(tmp_path, graph, folder):
    """A seed puts all images in another order then: others come first."""
    more = samples_in(folder, IMAGES + 1)
    store, order = Store(tmp_path / "store"), np.random.RandomState(0).permutation(IMAGES + 1)

    def stored():
        return {path.name for path in (tmp_path / "store" / "artifacts").glob("*/*")}

    files_of(graph, more[:IMAGES], tmp_path / "first", Workers(None, store))
    first, grown = stored(), [more[index] for index in order]
    files = files_of(graph, grown, tmp_path / "second", Workers(None, store))
    assert 0 < len(stored() - first) <= 3 < len(first)
    assert files == files_of(graph, grown, tmp_path / "anew")


def test_images_are_known_by_their_bytes_not_by_their_names(tmp_path, graph, folder, samples):
    store, again = Store(tmp_path / "store"), Watched()
    files_of(graph, samples, tmp_path / "first", Workers(Watched(), store))
    shutil.copytree(folder, tmp_path / folder.name)
    moved = [Sample(tmp_path / folder.name / sample.path.name, None) for sample in samples]
    files_of(graph, moved, tmp_path / "second", Workers(again, store))
    assert again.seen == []


def test_the_key_of_the_step_is_the_same_whoever_works(samples):
    data = Data(Path(), samples, (), "calibration", "evaluation")
    steps = [calibrate_step(data, workers=each) for each in (HERE, Workers(Processes(2), Store(Path("store"))))]
    artifact = dataclasses.make_dataclass("Artifact", ["digest"])("graph")
    assert len({step.key({"optimize": artifact}) for step in steps}) == 1


# --- faults -----------------------------------------------------------------------------------------------------------


def test_an_image_that_changed_meanwhile_is_named(tmp_path, graph, folder):
    shutil.copytree(folder, tmp_path / "images")
    samples = samples_in(tmp_path / "images")

    class Changing(Watched):
        """Changes an image once all are hashed."""

        def map(self, function, items):
            last = items[0].batches[0].samples[0].path
            shutil.copyfile(samples[0].path, last)
            self.changed = last
            yield from super().map(function, items)

    executor, store = Changing(), Store(tmp_path / "store")
    with pytest.raises(DataError, match="changed since the calibration began") as caught:
        files_of(graph, samples, tmp_path / "out", Workers(executor, store))
    assert str(executor.changed) in caught.value.message
    assert list((tmp_path / "out").iterdir()) == []


def test_a_worker_finds_the_graph_of_the_command_or_says_so(tmp_path, graph, samples, monkeypatch):
    monkeypatch.setenv("VITDEPLOY_STORE", str(tmp_path / "theirs"))
    batch = Batch((samples[0],), (shards.file_sha256(samples[0].path),))
    piece = _CalibrationShard(GraphFile.of(graph, None), (batch,))
    away = dataclasses.replace(piece.graph, path=tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(MissingFileError, match="a calibration worker finds no graph"):
        observe_piece(dataclasses.replace(piece, graph=away))
    made = Store(tmp_path / "theirs").make(
        Identity("optimize", {}, {}, {}), lambda out: shutil.copyfile(graph, out / "model.onnx")
    )
    found = observe_piece(dataclasses.replace(piece, graph=dataclasses.replace(away, key=made.key)))
    assert found.keys() == observe_piece(piece).keys()
    (tmp_path / "other.onnx").write_bytes(graph.read_bytes() + b"\x00")
    other = dataclasses.replace(piece.graph, path=tmp_path / "other.onnx")
    with pytest.raises(DataError, match="a calibration worker finds a different graph"):
        observe_piece(dataclasses.replace(piece, graph=other))


def test_the_images_of_all_shards_are_counted(tmp_path, graph, samples):
    told = []
    (tmp_path / "out").mkdir()
    facts = calibrate(graph, samples, tmp_path / "out", lambda *each: told.append(each), workers=Workers(Watched()))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1:] == (IMAGES, IMAGES)
    assert (facts["images"], facts["distinct"]) == (IMAGES, IMAGES)
    assert read_json(tmp_path / "out" / "calibrate.json") == facts


def test_an_observation_of_one_thread_is_what_shards_are_compared_with(graph):
    """ONNX Runtime's own choice of threads may cut products otherwise."""
    assert shards.THREADS == Observation(load_graph(graph), None, threads=shards.THREADS).runner.threads == 1


@pytest.mark.usefixtures("forked_workers")
def test_images_in_a_tar_give_the_statistics_of_the_same_files(graph, samples, tmp_path):
    tar = write_tar(tmp_path / "all.tar", {f"{i:03}.png": each.path.read_bytes() for i, each in enumerate(samples)})
    listed, _ = list_images(tar, "none")
    found = files_of(graph, list(listed), tmp_path / "held", Workers(Processes(2)))
    assert found["statistics.npz"] == files_of(graph, samples, tmp_path / "files")["statistics.npz"]
    with tar.open("r+b") as file:  # another picture in the place of one of the same size
        at = tar.read_bytes().index(samples[3].path.read_bytes())
        file.seek(at + 60)
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"all\.tar"):
        files_of(graph, list(listed), tmp_path / "changed", Workers(Processes(2)))
