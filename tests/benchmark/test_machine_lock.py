"""One measurement a machine at a time: between processes, threads and users, and never against oneself."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from vitdeploy.benchmark import machine as machine_lock_module
from vitdeploy.benchmark.machine import LOCK_NAME, MACHINE, described, holder, machine_lock
from vitdeploy.errors import CapabilityError

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs flock")

# That of the product: other tests have one of their own.
LOCK_FILE = machine_lock_module.lock_file
IMPORTS = "import sys; from vitdeploy.benchmark.machine import MACHINE"
HOLD = f"{IMPORTS}; print(MACHINE.take(), flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A temporary folder of the test's own: other tests measure meanwhile."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(machine_lock_module, "lock_file", LOCK_FILE)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def hold():
    """Another process that takes the lock, or not."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", HOLD], **pipes)


def test_another_process_is_waited_for_and_named_until_it_dies():
    other = hold()
    assert other.stdout.readline() == "True\n"
    told = []

    def hear(text):
        told.append(text)
        other.send_signal(signal.SIGKILL)
        other.wait()

    with machine_lock(hear):
        assert holder() in (os.getpid(), None)
    text, since = told[0].split(", since ")
    assert text == f"process {other.pid} ({sys.executable} -c {HOLD})"[: len(text) - 4] + "...)" and len(told) == 1
    assert abs(time.mktime((*time.localtime()[:3], *map(int, since.split(":")), 0, 0, -1)) - time.time()) < 60
    other.stdin.close()
    other.stdout.close()
    assert MACHINE.take()  # it was given back
    MACHINE.give_back()


WAIT = (
    f"{IMPORTS}, machine_lock\nimport time\n"
    "with machine_lock(lambda text: print(text, flush=True)):\n print(time.monotonic())"
)


def wait():
    """Another process that waits for the lock, and tells for whom, then when it has it."""
    return subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, text=True)


def test_who_waits_is_served_in_the_order_of_arrival_and_knows_its_place():
    with hold() as first:
        assert first.stdout.readline() == "True\n"
        waiting, places = [], []
        for _ in range(3):
            waiting.append(wait())
            places.append(waiting[-1].stdout.readline().rpartition("; ")[2])
        first.stdin.close()
    times = [float(other.communicate()[0].splitlines()[-1]) for other in waiting]
    assert "before" not in places[0]
    assert places[1:] == ["1 more command waits before this one\n", "2 more commands wait before this one\n"]
    assert times == sorted(times)


def test_a_stopped_process_before_this_one_does_not_keep_a_free_machine():
    first = hold()
    assert first.stdout.readline() == "True\n"
    with wait() as stopped:
        assert stopped.stdout.readline()
        stopped.send_signal(signal.SIGSTOP)
        first.communicate()
        told = []
        with machine_lock(told.append):
            assert "1 more command waits before" in told[0]
        stopped.send_signal(signal.SIGCONT)


def test_waiting_ends_at_the_longest_wait(monkeypatch):
    monkeypatch.setattr(MACHINE, "max_wait", 0.2)
    monkeypatch.setattr(MACHINE, "waited", 0.0)
    with hold() as other:
        assert other.stdout.readline() == "True\n"
        with pytest.raises(CapabilityError) as caught, machine_lock(lambda text: None):
            pass
        other.stdin.close()
    assert caught.value.exit_code == 4 and str(other.pid) in caught.value.found and "--max-wait" in caught.value.fix
    assert MACHINE.waited >= 0.2


def test_who_holds_it_may_take_it_again_and_so_may_its_children_but_no_other_thread():
    taken = []
    with machine_lock(taken.append), machine_lock(taken.append):
        thread = threading.Thread(target=lambda: taken.append(MACHINE.take()))
        thread.start()
        thread.join()
        with hold() as child:
            assert child.stdout.readline() == "True\n"
            child.stdin.close()
    assert taken == [False]


def test_what_another_user_put_there_is_neither_followed_nor_waited_for(folder):
    """And the file is one that every user can open."""
    path, target = folder / LOCK_NAME, folder / "target"
    path.symlink_to(target)
    for _ in range(2):
        assert MACHINE.take()
        MACHINE.give_back()
        assert not target.exists()
        path.unlink()
        os.mkfifo(path)
    path.unlink()
    mask = os.umask(0o077)
    try:
        assert MACHINE.take()
        MACHINE.give_back()
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS])
def test_nobody_is_waited_for_where_a_file_system_has_no_such_lock(monkeypatch, number):
    import fcntl

    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert MACHINE.take()
    MACHINE.give_back()


def test_a_holder_that_cannot_be_seen_has_words():
    assert described(None) == "another process"
    assert described(os.getpid()) == "another thread of this process"
    assert holder() is None
