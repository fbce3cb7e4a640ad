"""Plans cut off at any moment, on disks that lose what they may, or fail; and the gate notices a plan that errs."""

import errno
import os
import shutil

import pytest

import vitdeploy.devices.agent.releases as releases
import vitdeploy.publish as publish
from tests.faults.broken_disk import BrokenDisk
from tests.faults.crash import drawn_crashes, recorded, recording
from tests.faults.crash_points import crash, record
from tests.faults.forking import in_child
from tests.faults.gate import Row
from tests.faults.plans import NEW, OLD, OURS, PLANS, fill, held
from vitdeploy.devices.agent.releases import DeploymentFolder
from vitdeploy.errors import StorageError

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="finds paths in /proc")  # noqa: PTH110

BY_NAME = {plan.name: plan for plan in PLANS}
REPLACED, IN_TWO_STEPS, AGAIN = "a folder replaced", "a folder replaced without an exchange", "an entry made again"
BROUGHT, SWITCHED, FIRST = "a release brought", "a release switched to", "the first release switched to"


def crashed(name, work, **options):
    row = Row("crash points", 1)
    assert crash(row, BY_NAME[name], work, draws=0, **options) > 5
    return [f"{case.name}: {case.note}" for case in row.bad], len(row.cases)


@pytest.mark.parametrize("name", [REPLACED, IN_TWO_STEPS, AGAIN, BROUGHT, SWITCHED, FIRST])
def test_a_crash_leaves_the_old_or_the_new(tmp_path, name):
    wrong, disks = crashed(name, tmp_path)
    assert not wrong and disks > (10 if name in (SWITCHED, FIRST) else 50)


def never_flushed(patch):
    patch.setattr(publish, "flush", lambda path: None)


def only_files_flushed(patch):
    real = publish.flush
    patch.setattr(publish, "flush", lambda path: None if path.is_dir() else real(path))


def moved_without_a_word(patch):
    real = DeploymentFolder._write
    patch.setattr(DeploymentFolder, "_write", lambda self, record: None if record.move else real(self, record))


def pointed_in_two_steps(patch):
    def point(link, target):
        link.unlink(missing_ok=True)
        publish.flush(link.parent)
        link.symlink_to(target)

    patch.setattr(releases, "point", point)


def removed_first(patch):
    def replace(work, final):
        shutil.rmtree(final, ignore_errors=True)
        return publish.publish(work, final)

    patch.setattr(publish, "_replace", replace)


def forgotten(patch):
    patch.setattr(publish, "_bring_back", lambda aside: None)


@pytest.mark.parametrize(
    ("name", "sabotage", "found"),
    [
        (REPLACED, never_flushed, "in pieces"),
        (REPLACED, only_files_flushed, "in pieces"),
        (REPLACED, removed_first, "in pieces"),
        (IN_TWO_STEPS, forgotten, "left behind: out/.old-"),
        (AGAIN, only_files_flushed, "the entry holds"),
        (BROUGHT, never_flushed, "in pieces"),
        (SWITCHED, moved_without_a_word, "the release is"),
        (SWITCHED, pointed_in_two_steps, "the release is"),
    ],
)
def test_a_plan_that_errs_is_found(tmp_path, monkeypatch, name, sabotage, found):
    sabotage(monkeypatch)
    (wrong,), _ = crashed(name, tmp_path, to_first=True)
    assert found in wrong


def test_crashes_that_are_drawn_are_the_same_each_time_and_some_come_after_the_end(tmp_path):
    before, operations = in_child(record, BY_NAME[REPLACED], tmp_path).result
    first, again = ([*drawn_crashes(before, operations, 3, 7, 4)] for _ in range(2))
    assert first == again
    assert [each.ended for each in first] == [False] * 7 + [True] * 4
    assert len({each.told for each in first[:7]}) == 7


def publish_beside_a_log(home):
    with recording(home, home / "operations"):
        (home / "log.txt").write_text("begun")
        with publish.replacing(home / "out" / "bundle", OURS) as work:
            fill(work, NEW)
        (home / "log.txt").unlink()


def test_of_a_command_the_store_and_the_output_are_recorded(tmp_path):
    assert in_child(publish_beside_a_log, tmp_path).status == 0
    before, operations = recorded(tmp_path / "operations")
    names = {name for each in operations for _, name in each.places}
    assert not before.folders[0] and {"out", "bundle", "manifest.json"} <= names
    assert not names & {"log.txt", "operations"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_in_any_call_is_a_storage_error(tmp_path, number):
    fill(tmp_path / "out", OLD)
    struck = set()
    for place in range(1, 100):
        with BrokenDisk(tmp_path, place, number) as disk:
            try:
                with publish.replacing(tmp_path / "out", OURS) as work:
                    fill(work, NEW)
            except StorageError as error:
                assert (error.code, error.exit_code) == ("VD4101", 4)
                struck.add(disk.failed.split()[0])
        if disk.calls < place:
            break
        assert held(tmp_path / "out") in (dict(OLD), dict(NEW))
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert disk.calls < place and struck >= {"open", "write", "close", "fsync", "mkdir", "exchange"}
