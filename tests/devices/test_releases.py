"""Deployments on a device's disk: releases that are whole, and a link that is at one of them whatever happens."""

import contextlib
import json
import os
import signal
import time

import pytest

from tests.faults.forking import begin, ended, in_child
from tests.faults.plans import bring, entries_of, fill, move_to, release
from vitdeploy.devices.agent.documents import Deployed
from vitdeploy.devices.agent.releases import DeploymentFolder, deployments, is_whole
from vitdeploy.errors import DeviceError, DigestError, HostError, StorageError, VitdeployError

OLD, NEW = release("old")[0], release("new")[0]


@pytest.fixture
def place(tmp_path):
    """A deployment that has both releases, with its link at the old one."""
    move_to(tmp_path, bring(tmp_path, "old"))
    bring(tmp_path, "new")
    return DeploymentFolder("shop", tmp_path)


def at(place):
    return place.link.resolve().name


def test_a_release_is_sent_once_and_kept_files_are_not_sent_again(tmp_path):
    place = DeploymentFolder("shop", tmp_path)
    _, files = release("old")
    assert place.missing(entries_of(files)) == list(files) and not place.folder.exists()
    bring(tmp_path, "old")
    assert place.missing(entries_of(files)) == []
    new, others = release("new")
    assert place.missing(entries_of(others)) == ["manifest.json", "graph.onnx"]
    sent = tmp_path / "sent"
    fill(sent, {name: others[name] for name in ("manifest.json", "graph.onnx")})
    with place.held():
        folder = place.add(new, entries_of(others), sent)
    assert is_whole(folder, entries_of(others)) and folder.name == new
    assert (folder / "golden/in.npz").stat().st_nlink == 1  # ONNX refuses weights that have two names
    assert place.look() == Deployed("shop")


def test_a_damaged_release_is_no_source_and_is_mended(place, tmp_path):
    (place.folder_of(OLD) / "golden/in.npz").write_bytes(b"damaged")
    (place.folder_of(NEW) / "golden/in.npz").write_bytes(b"damaged")
    digest, files = release("new")
    assert place.missing(entries_of(files)) == ["golden/in.npz"]
    with place.held(), pytest.raises(DigestError, match=r"golden/in\.npz was not sent"):
        place.add(digest, entries_of(files), tmp_path / "nothing")
    with pytest.raises(DigestError, match="is not the file that the manifest records"):
        move_to(tmp_path, NEW)
    assert at(place) == OLD
    bring(tmp_path, "new")
    move_to(tmp_path, NEW)
    assert at(place) == NEW


def test_files_of_another_bundle_are_no_release_of_that_name(tmp_path):
    place, (_, files) = DeploymentFolder("shop", tmp_path), release("old")
    fill(tmp_path / "sent", files)
    with place.held(), pytest.raises(DigestError, match="is another release"):
        place.add(NEW, entries_of(files), tmp_path / "sent")
    assert not place.folder_of(NEW).exists()


def test_no_path_leads_out_of_a_release(tmp_path):
    place = DeploymentFolder("shop", tmp_path / "deployed")
    fill(tmp_path / "sent", {"x": b"1"})
    with place.held(), pytest.raises(VitdeployError, match="is not a valid path in a release"):
        place.add(NEW, entries_of({"../../../x": b"1"}), tmp_path / "sent")
    assert not (tmp_path / "x").exists()


def test_two_releases_are_kept(place, tmp_path):
    move_to(tmp_path, NEW)
    third = bring(tmp_path, "third")
    move_to(tmp_path, third)
    assert sorted(path.name for path in place.releases.iterdir()) == sorted([NEW, third])
    assert place.look() == Deployed("shop", third, NEW, 3)
    move_to(tmp_path, NEW)  # and back, with nothing sent
    assert place.look() == Deployed("shop", NEW, third, 4)


@pytest.mark.parametrize("expected", [(NEW, 1), ("", 0), (OLD, 2)])
def test_who_does_not_know_how_it_stands_moves_nothing(place, expected):
    said = "another process deployed shop on this device meanwhile"
    with pytest.raises(DeviceError, match=said), place.moved(NEW, *expected):
        pytest.fail("it was moved")
    assert place.look() == Deployed("shop", OLD, "", 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_what_fails_through_the_link_is_taken_back(place, error):
    with pytest.raises(error), place.moved(NEW, OLD, 1) as (link, before):
        assert link.resolve().name == NEW and before == place.folder_of(OLD)
        raise error
    assert (at(place), place.look()) == (OLD, Deployed("shop", OLD, "", 1))


def test_a_first_release_that_fails_leaves_no_link(tmp_path):
    place, digest = DeploymentFolder("shop", tmp_path), bring(tmp_path, "new")
    with pytest.raises(RuntimeError), place.moved(digest, "", 0) as (_, before):
        assert before is None and at(place) == digest
        raise RuntimeError
    assert not place.link.is_symlink() and place.look() == Deployed("shop")


def die_in_the_move(home):
    with DeploymentFolder("shop", home).moved(NEW, OLD, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def stay_in_the_move(home):
    with DeploymentFolder("shop", home).moved(NEW, OLD, 1):
        time.sleep(60)


def test_a_move_that_was_killed_is_undone_by_whoever_looks_next(place, tmp_path):
    assert in_child(die_in_the_move, tmp_path).status is None  # killed
    assert at(place) == NEW
    assert place.look() == Deployed("shop", OLD, "", 1) and at(place) == OLD
    move_to(tmp_path, NEW)
    assert place.look() == Deployed("shop", NEW, OLD, 2)


def test_who_looks_while_it_is_moved_leaves_it_alone(place, tmp_path):
    child = begin(stay_in_the_move, tmp_path)
    deadline = time.monotonic() + 10
    while at(place) != NEW and time.monotonic() < deadline:
        time.sleep(0.01)
    assert place.look() == Deployed("shop", NEW, "", 1, moving=NEW)
    os.kill(child[0], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        ended(child, 10)
    assert place.look() == Deployed("shop", OLD, "", 1)


def test_where_there_are_no_locks_the_living_process_protects_its_move(place, tmp_path, monkeypatch):
    import fcntl

    def no_locks(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with place.moved(NEW, OLD, 1):
        assert DeploymentFolder("shop", tmp_path).look() == Deployed("shop", NEW, "", 1, moving=NEW)
        with (
            pytest.raises(DeviceError, match="another process deployed"),
            DeploymentFolder("shop", tmp_path).moved(NEW, OLD, 1),
        ):
            pass
    assert place.look() == Deployed("shop", NEW, OLD, 2)


def test_a_link_that_was_moved_by_hand_is_what_counts(place):
    place.link.unlink()
    place.link.symlink_to(f"releases/{NEW}")
    assert place.look() == Deployed("shop", NEW, "", 1)
    with place.moved(OLD, NEW, 1):
        pass
    assert place.look() == Deployed("shop", OLD, NEW, 2)


@pytest.mark.parametrize("make", ["folder", "elsewhere"])
def test_what_is_no_link_of_ours_is_not_touched(place, make, tmp_path):
    place.link.unlink()
    place.link.mkdir() if make == "folder" else place.link.symlink_to(tmp_path)
    with pytest.raises(StorageError, match="is not a link of vitdeploy"):
        place.look()
    with pytest.raises(StorageError, match="is not a link of vitdeploy"):
        move_to(tmp_path, NEW)
    assert place.link.is_dir()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{", StorageError, "record.json cannot be read"),
        (json.dumps({"format": 2}), HostError, "has an unknown format"),
    ],
)
def test_a_record_that_is_none_is_refused(place, text, kind, message):
    (place.folder / "record.json").write_text(text)
    with pytest.raises(kind, match=message):
        place.look()
    assert at(place) == OLD


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "-x", "x/y", "a" * 65])
def test_no_name_leads_elsewhere(tmp_path, name):
    with pytest.raises(VitdeployError, match="is not a valid deployment name"):
        DeploymentFolder(name, tmp_path)
    with pytest.raises(VitdeployError, match="is not a valid release"):
        DeploymentFolder("shop", tmp_path).folder_of(name)


def test_all_deployments_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert deployments() == []
    home = tmp_path / ".local/share/vitdeploy/deployed"
    move_to(home, bring(home, "old"))
    (home / ".hidden").mkdir()
    assert deployments() == [Deployed("shop", OLD, "", 1)]
