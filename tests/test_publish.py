"""Publishing a folder: the old one or the new one, and nothing of anybody else's is touched."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vitdeploy.publish as module
from tests.faults.broken_disk import BrokenDisk
from tests.faults.forking import in_child
from vitdeploy.errors import OutputError, StorageError
from vitdeploy.publish import (
    check_replaceable,
    exchange,
    flush,
    native_writes,
    point,
    publish,
    remove_abandoned,
    replacing,
    replacing_file,
    restore,
    storage_errors,
    temporary_folder,
)

OURS = ("manifest.json", "old.bin", "new.bin")


def fill(folder, text="old"):
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    (folder / f"{text}.bin").write_bytes(b"1")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_new_folder_appears_whole(tmp_path):
    final = tmp_path / "a" / "b" / "out"
    with replacing(final, OURS) as work:
        fill(work, "new")
        assert not final.exists()
    assert names(final) == ["manifest.json", "new.bin"]
    assert names(final.parent) == ["out"]


def test_an_own_folder_is_replaced_whole(tmp_path):
    final = tmp_path / "out"
    fill(final)
    with replacing(final, OURS) as work:
        fill(work, "new")
        assert names(final) == ["manifest.json", "old.bin"]
    assert names(final) == ["manifest.json", "new.bin"]
    assert names(tmp_path) == ["out"]


def test_an_empty_folder_is_replaced(tmp_path):
    final = tmp_path / "out"
    final.mkdir()
    with replacing(final, OURS) as work:
        fill(work, "new")
    assert names(final) == ["manifest.json", "new.bin"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_old_folder_stays_when_the_block_fails(tmp_path, error):
    final = tmp_path / "out"
    fill(final)
    with pytest.raises(error), replacing(final, OURS) as work:
        fill(work, "new")
        raise error
    assert names(final) == ["manifest.json", "old.bin"]
    assert names(tmp_path) == ["out"]


def test_a_new_folder_does_not_appear_when_the_block_fails(tmp_path):
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "out", OURS) as work:
        fill(work)
        raise ValueError("no")
    assert names(tmp_path) == []


def make_foreign_folder(path):
    path.mkdir()
    (path / "thesis.txt").write_text("mine", encoding="utf-8")


def make_own_folder_with_a_foreign_file(path):
    fill(path)
    (path / "thesis.txt").write_text("mine", encoding="utf-8")


def make_file(path):
    path.write_text("mine", encoding="utf-8")


def make_link_to_an_own_folder(path):
    fill(path.parent / "real")
    path.symlink_to(path.parent / "real")


def make_link_to_nothing(path):
    path.symlink_to(path.parent / "nothing")


@pytest.mark.parametrize(
    "make",
    [
        make_foreign_folder,
        make_own_folder_with_a_foreign_file,
        make_file,
        make_link_to_an_own_folder,
        make_link_to_nothing,
    ],
    ids=lambda make: make.__name__.removeprefix("make_"),
)
def test_what_is_not_ours_is_refused_and_left_as_it_is(tmp_path, make):
    final = tmp_path / "out"
    make(final)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(OutputError) as caught, replacing(final, OURS):
        pytest.fail("the block must not be entered")
    assert caught.value.exit_code == 2
    assert "-o" in caught.value.fix
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_a_folder_that_appears_meanwhile_is_not_lost(tmp_path):
    final = tmp_path / "out"
    with replacing(final, OURS) as work:
        fill(work, "new")
    with temporary_folder(tmp_path) as work:
        fill(work, "late")
        assert publish(work, final) is False
    assert names(final) == ["manifest.json", "new.bin"]


def test_a_foreign_folder_that_appears_during_the_block_is_not_replaced(tmp_path):
    final = tmp_path / "out"
    with pytest.raises(OutputError), replacing(final, OURS) as work:
        fill(work, "new")
        make_foreign_folder(final)
    assert names(final) == ["thesis.txt"]
    assert names(tmp_path) == ["out"]


def test_check_replaceable_allows_what_replacing_does(tmp_path):
    fill(tmp_path / "own")
    (tmp_path / "empty").mkdir()
    for name in ("own", "empty", "absent"):
        assert check_replaceable(tmp_path / name, OURS) is None


def test_folders_of_dead_processes_are_removed_and_others_stay(tmp_path):
    dead = dead_process()
    here = module._here()
    ours_gone, ours_alive = f".tmp-{dead}-{here}aaaaaa", f".tmp-{os.getpid()}-{here}bbbbbb"
    foreign = [f".tmp-{dead}-notes", f".tmp-²-{'c' * 12}", f".tmp-{'9' * 30}-{'d' * 12}", ".tmp-x-y", ".tmp-"]
    for name in (ours_gone, ours_alive, *foreign):
        (tmp_path / name).mkdir()
    file_gone, file_alive = f".tmp-{dead}-{here}cccccc", f".tmp-{os.getpid()}-{here}dddddd"
    for name in (file_gone, file_alive):
        (tmp_path / name).write_bytes(b"half")
    remove_abandoned(tmp_path)
    assert names(tmp_path) == sorted([ours_alive, file_alive, *foreign])


def test_a_temporary_folder_is_gone_after_its_block(tmp_path):
    with temporary_folder(tmp_path / "new") as folder:
        (folder / "x").write_bytes(b"x")
        assert names(tmp_path / "new") == [folder.name]
    assert names(tmp_path / "new") == []


def killed_at_work(parent):
    with temporary_folder(parent):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_goes_with_the_next_temporary_folder(tmp_path):
    assert in_child(killed_at_work, tmp_path).status is None
    (left,) = names(tmp_path)
    with temporary_folder(tmp_path) as work:
        assert names(tmp_path) == [work.name] != [left]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said_with_the_bytes_that_are_free(tmp_path, number):
    with pytest.raises(StorageError, match="no space left") as caught, storage_errors(tmp_path / "deep" / "x"):
        raise OSError(number, os.strerror(number))
    assert "bytes free" in caught.value.found


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_refuses_is_said_with_the_reason(tmp_path, number):
    with pytest.raises(StorageError, match="cannot be written") as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.found == os.strerror(number)


def test_another_error_of_the_system_is_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(FileNotFoundError), storage_errors(tmp_path):
        (tmp_path / "absent").read_bytes()
    with pytest.raises(OSError, match="image file is truncated"), storage_errors(tmp_path):
        raise OSError("image file is truncated")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_said_with_the_reason(tmp_path, number):
    with pytest.raises(StorageError, match=r"the disk failed when .* was written") as caught, storage_errors(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.found == os.strerror(number)


@pytest.mark.parametrize("place", ["elsewhere/1.png", "out/images/1.png"], ids=["far away", "beside it"])
def test_a_file_elsewhere_is_named_instead_of_the_output(tmp_path, place):
    with pytest.raises(StorageError) as caught, storage_errors(tmp_path / "out" / "bundle"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / place))
    assert caught.value.message == f"{tmp_path / place} cannot be read or written"


@pytest.mark.parametrize(
    "place",
    ["out", "out/bundle/model.onnx", f"out/{module.temporary_name()}/model.onnx"],
    ids=["above it", "in it", "temporary"],
)
def test_what_is_made_for_the_output_is_called_by_its_name(tmp_path, place):
    with pytest.raises(StorageError) as caught, storage_errors(tmp_path / "out" / "bundle"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / place))
    assert caught.value.message == f"{tmp_path / 'out' / 'bundle'} cannot be written"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is of Linux")
def test_a_folder_in_which_nothing_can_be_made_is_said():
    with pytest.raises(StorageError, match="/proc cannot be") as caught, temporary_folder(module.Path("/proc")):
        pytest.fail("the block must not be entered")
    assert caught.value.found == "no folder can be made there"


# --- paths that cannot be an output -----------------------------------------------------------------------------------


def below_a_file(path):
    (path / "file").write_text("mine", encoding="utf-8")
    return path / "file" / "a" / "bundle"


def below_a_link_to_nothing(path):
    (path / "link").symlink_to(path / "nothing")
    return path / "link" / "bundle"


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (below_a_file, "Not a directory"),
        (below_a_link_to_nothing, "link is not a folder"),
        (lambda path: path / ("n" * 300), "File name too long"),
    ],
)
def test_a_path_that_no_folder_can_have_is_the_wrong_input(tmp_path, make, found):
    final = make(tmp_path)
    with pytest.raises(OutputError, match="cannot be created") as caught:
        check_replaceable(final, OURS)
    assert found in caught.value.found and "-o" in caught.value.fix
    if "link" not in found:
        with pytest.raises(OutputError, match="cannot be created"), replacing_file(final, lambda path: True):
            pytest.fail("the block must not be entered")


def test_the_working_folder_and_a_mount_point_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="cannot be replaced") as caught:
        check_replaceable(module.Path("."), OURS)
    assert caught.value.fix.endswith("-o bundle")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(OutputError, match="cannot be replaced") as caught:
        check_replaceable(tmp_path, OURS)
    assert caught.value.found == "a mount point" and caught.value.fix.endswith(f"-o {tmp_path / 'bundle'}")


# --- file systems that cannot do everything ---------------------------------------------------------------------------


def test_two_folders_change_places(tmp_path):
    fill(tmp_path / "a")
    fill(tmp_path / "b", "new")
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("the file system of the tests cannot exchange")
    assert [names(tmp_path / name)[1] for name in "ab"] == ["new.bin", "old.bin"]
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "absent")


@pytest.mark.parametrize("call", [None, lambda one, other: errno.EINVAL], ids=["no call", "refused"])
def test_where_folders_cannot_change_places_two_renames_do_it(tmp_path, monkeypatch, call):
    monkeypatch.setattr("vitdeploy.publish._system_call", lambda: call)
    assert not exchange(tmp_path, tmp_path)
    test_an_own_folder_is_replaced_whole(tmp_path)


def kill_between(out):
    """Replace a folder in two steps, but die after the first one."""
    module.exchange = lambda one, other: False
    module._renamed = lambda folder, final: os.kill(os.getpid(), signal.SIGKILL)
    with replacing(out, OURS) as work:
        fill(work, "new")


def by_looking(out):
    assert restore(out)


def by_a_command(out):
    with replacing(out.parent / "another", OURS) as work:
        fill(work, "new")


@pytest.mark.parametrize("mend", [by_looking, by_a_command])
def test_a_kill_between_two_renames_is_mended(tmp_path, mend):
    out = tmp_path / "out" / "bundle"
    out.parent.mkdir()
    fill(out)
    assert in_child(kill_between, out).status is None
    assert not out.exists()
    mend(out)
    assert names(out) == ["manifest.json", "old.bin"]
    remove_abandoned(out.parent)
    assert [name for name in names(out.parent) if name.startswith(".")] == []
    assert not restore(out)


@pytest.mark.parametrize("parent", ["absent", "n" * 300, "a\0b"], ids=["absent", "too long", "no name"])
def test_where_no_folder_can_be_nothing_is_restored(tmp_path, parent):
    assert not restore(tmp_path / parent / "bundle")


def test_folders_of_another_machine_are_removed_when_they_are_old(tmp_path):
    """Its processes, or those of another container, have numbers that say nothing here."""
    other = "000000" if module._here() != "000000" else "111111"
    young, old = (tmp_path / f".tmp-{dead_process()}-{other}{letter * 6}" for letter in "ab")
    for folder in (young, old):
        folder.mkdir()
    os.utime(old, (0, 0))
    remove_abandoned(tmp_path)
    assert names(tmp_path) == [young.name]


def test_a_folder_that_cannot_be_flushed_is_passed_over_but_not_a_disk_that_fails(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(b"x")
    for number, tolerated in ((errno.EINVAL, True), (errno.EIO, False)):

        def fsync(descriptor, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)
        with contextlib.nullcontext() if tolerated else pytest.raises(OSError, match="Input/output"):
            flush(tmp_path)
        with pytest.raises(OSError, match=os.strerror(number)):
            flush(tmp_path / "x")


def test_what_a_native_library_does_not_say_the_disk_is_asked(tmp_path):
    with pytest.raises(RuntimeError, match="of its own"), native_writes(tmp_path, 1000):
        raise RuntimeError("of its own")
    with pytest.raises(StorageError, match="no space left"), native_writes(tmp_path, 1 << 60):
        raise RuntimeError("iostream error")  # and what was written is removed, so that a little would find room
    with native_writes(tmp_path, 1 << 60):
        pass
    assert names(tmp_path) == []
    with BrokenDisk(tmp_path, fails=1), pytest.raises(StorageError, match="no space left"), native_writes(tmp_path, 0):
        pass


def test_a_file_system_that_does_not_say_its_room_hides_no_error_of_a_native_library(tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with pytest.raises(RuntimeError, match="of its own"), native_writes(tmp_path, 1000):
        raise RuntimeError("of its own")
    assert names(tmp_path) == []


def test_a_link_is_moved_in_one_step_and_nothing_else_is_replaced(tmp_path):
    link = tmp_path / "current"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        point(link, Path(name))
        assert link.readlink() == Path(name) and names(tmp_path)[-1] == "current"
    abandoned = tmp_path / module.temporary_name().replace(str(os.getpid()), str(dead_process()))
    abandoned.symlink_to("a")
    point(link, Path("a"))
    assert names(tmp_path) == ["a", "b", "current"]
    for name in ("a", "file"):
        (tmp_path / "file").write_bytes(b"mine")
        with pytest.raises(OutputError, match="exists and is not a link; it is not replaced"):
            point(tmp_path / name, Path("b"))
    assert (tmp_path / "file").read_bytes() == b"mine" and (tmp_path / "a").is_dir()
