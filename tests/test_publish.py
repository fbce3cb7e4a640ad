"""Publishing a folder: the old one or the new one, and nothing of anybody else's is touched."""

import errno
import os
import subprocess
import sys

import pytest

from vitdeploy.errors import OutputError, StorageError
from vitdeploy.publish import (
    check_replaceable,
    publish,
    remove_abandoned,
    replacing,
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
    ours_gone, ours_alive = f".tmp-{dead}-{'a' * 12}", f".tmp-{os.getpid()}-{'b' * 12}"
    foreign = [f".tmp-{dead}-notes", f".tmp-²-{'c' * 12}", f".tmp-{'9' * 30}-{'d' * 12}", ".tmp-x-y", ".tmp-"]
    for name in (ours_gone, ours_alive, *foreign):
        (tmp_path / name).mkdir()
    remove_abandoned(tmp_path)
    assert names(tmp_path) == sorted([ours_alive, *foreign])


def test_a_temporary_folder_is_gone_after_its_block(tmp_path):
    with temporary_folder(tmp_path / "new") as folder:
        (folder / "x").write_bytes(b"x")
        assert names(tmp_path / "new") == [folder.name]
    assert names(tmp_path / "new") == []


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
