"""Digests that are known by a file's stat: never stale, and a database that nobody has to look after."""

import hashlib
import os
import shutil
import sqlite3
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitdeploy.data.file_digests import RACY_NS, FileDigests


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def aged(path, seconds=3600.0):
    """The file, last written an hour ago by its times. No program can set a ctime: see `settled`."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return path


@pytest.fixture
def settled(monkeypatch):
    """Files that were just made count as old, as if the test had waited."""
    monkeypatch.setattr("vitdeploy.data.file_digests.RACY_NS", -RACY_NS)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.png").write_bytes(bytes([i]) * 100)
    return sorted(folder.iterdir())


def asked(place, images):
    with FileDigests(place) as digests:
        found = digests.of(images)
    assert found == [sha256(path) for path in images]
    return digests.hashed


def test_files_are_read_once(tmp_path, images, settled):
    place = tmp_path / "store" / "digests.sqlite"
    assert [asked(place, images) for _ in range(3)] == [5, 0, 0]


def test_a_file_that_may_change_within_its_times_is_read_again(tmp_path, images):
    place = tmp_path / "digests.sqlite"
    assert [asked(place, images) for _ in range(2)] == [5, 5]


def test_a_change_that_leaves_size_and_time_is_seen(tmp_path, images, settled):
    place, changed = tmp_path / "digests.sqlite", aged(images[2])
    asked(place, images)
    before = changed.stat()
    changed.write_bytes(b"x" * 100)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert changed.stat().st_mtime_ns == before.st_mtime_ns
    assert asked(place, images) == 1


def test_a_file_in_the_place_of_another_is_read(tmp_path, images, settled):
    place = tmp_path / "digests.sqlite"
    asked(place, images)
    shutil.copy2(images[1], tmp_path / "other")
    (tmp_path / "other").replace(images[0])
    assert asked(place, images) == 1
    assert asked(place, list(reversed(images))) == 0


def test_a_link_is_what_it_names(tmp_path, images, settled):
    place, link = tmp_path / "digests.sqlite", tmp_path / "link.png"
    link.symlink_to(images[0])
    asked(place, [link])
    link.unlink()
    link.symlink_to(images[1])
    assert asked(place, [link]) == 1


@given(data=st.binary(max_size=200), at=st.integers(0, 8191), cut=st.integers(0, 8192))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_database_is_no_error(tmp_path, images, settled, data, at, cut):
    place = tmp_path / "digests.sqlite"
    asked(place, images)
    kept = bytearray(place.read_bytes())
    kept[at : at + len(data)] = data
    place.write_bytes(kept[: max(cut, at)])
    with FileDigests(place) as digests:
        assert len(digests.of(images)) == 5
    place.unlink(missing_ok=True)
    assert asked(place, images) == 5


@pytest.mark.parametrize("content", [b"no database at all" * 100, b""], ids=["text", "empty"])
def test_what_is_no_database_is_begun_anew(tmp_path, images, settled, content):
    place = tmp_path / "digests.sqlite"
    place.write_bytes(content)
    assert [asked(place, images) for _ in range(2)] == [5, 0]


def test_a_database_of_another_program_is_begun_anew(tmp_path, images, settled):
    place = tmp_path / "digests.sqlite"
    with sqlite3.connect(place) as other:
        other.execute("CREATE TABLE files (name TEXT)")
    other.close()
    (tmp_path / "digests.sqlite-journal").write_bytes(b"left by a kill")
    assert [asked(place, images) for _ in range(2)] == [5, 0]


def test_where_no_database_can_be_written_files_are_read_each_time(tmp_path, images, settled):
    (tmp_path / "file").write_text("")
    assert [asked(tmp_path / "file" / "digests.sqlite", images) for _ in range(2)] == [5, 5]
    (tmp_path / "folder").mkdir()
    assert asked(tmp_path / "folder", images) == 5


def test_a_database_that_another_process_holds_is_not_thrown_away(tmp_path, images, settled, monkeypatch):
    place = tmp_path / "digests.sqlite"
    asked(place, images)
    monkeypatch.setattr("vitdeploy.data.file_digests.BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(place, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert asked(place, images) == 5
    holder.execute("ROLLBACK")
    holder.close()
    assert asked(place, images) == 0


def test_of_what_cannot_be_read_no_digest_comes_twice(tmp_path, images):
    with FileDigests(tmp_path / "digests.sqlite") as digests:
        first, second = (digests.of([tmp_path / "gone.png"])[0] for _ in range(2))
    assert first != second and first.startswith("unread ")


def test_a_name_that_is_no_utf8_is_known_again(tmp_path, settled):
    odd = tmp_path / "caf\udce9.png"
    try:
        odd.write_bytes(b"x")
    except OSError:
        pytest.skip("this file system takes no such name")
    assert [asked(tmp_path / "digests.sqlite", [odd]) for _ in range(2)] == [1, 0]
