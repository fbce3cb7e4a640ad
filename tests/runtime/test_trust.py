"""Which plans may be loaded: those whose digest this user's registry has, and no others."""

import hashlib
import os
import signal
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.forking import in_child
from vitdeploy.errors import MissingFileError, StorageError, UnsafeError, UntrustedEngineError
from vitdeploy.runtime import trust
from vitdeploy.runtime.trust import write_atomic

PLAN = bytes(range(256)) * 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "engine.plan"
    path.write_bytes(PLAN)
    return path


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_a_registered_plan_is_read(plan):
    assert not trust.is_trusted(sha256(PLAN))
    trust.register(sha256(PLAN), {"tensorrt": "11.4.0.106"})
    assert trust.read_trusted(plan) == PLAN


def test_the_registry_is_the_users_alone(cache):
    trust.register(sha256(PLAN), {"gpu": "a"})
    folder = cache / "vitdeploy" / "trusted-engines"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (entry,) = folder.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert "gpu" in entry.read_text()


def test_a_plan_of_someone_else_is_refused_with_what_to_do(plan):
    with pytest.raises(UntrustedEngineError, match="it is native code") as caught:
        trust.read_trusted(plan)
    assert caught.value.exit_code == 3
    assert caught.value.fix == f"rebuild it: vitdeploy compile {plan.parent}/graph.onnx --target tensorrt -o DIR"
    assert sha256(PLAN)[:16] in caught.value.found


def test_a_file_that_is_not_there_is_no_plan(tmp_path):
    with pytest.raises(MissingFileError, match="cannot be read"):
        trust.read_trusted(tmp_path / "absent.plan")


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_change_of_a_registered_plan_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("plan")
    changed = bytearray(PLAN)
    if data.draw(st.booleans(), "truncate"):
        del changed[data.draw(st.integers(0, len(PLAN) - 1)) :]
    else:
        changed[data.draw(st.integers(0, len(PLAN) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    (folder / "engine.plan").write_bytes(changed)
    trust.register(sha256(PLAN), {})
    with pytest.raises(UntrustedEngineError):
        trust.read_trusted(folder / "engine.plan")


def test_a_digest_beside_the_plan_makes_no_plan_trusted(plan):
    (plan.parent / f"{sha256(PLAN)}.json").write_text("{}")
    assert not trust.is_trusted(sha256(PLAN))


@pytest.mark.parametrize("mode", [0o750, 0o707, 0o777])
def test_a_registry_that_others_can_enter_trusts_nothing(cache, mode):
    trust.register(sha256(PLAN), {})
    folder = cache / "vitdeploy" / "trusted-engines"
    folder.chmod(mode)
    assert not trust.is_trusted(sha256(PLAN))
    with pytest.raises(UnsafeError, match="must be private") as caught:
        trust.register(sha256(PLAN), {})
    assert f"chmod 700 {folder}" in caught.value.fix


def test_a_registry_that_is_a_link_trusts_nothing(cache, tmp_path):
    trust.register(sha256(PLAN), {})
    folder = cache / "vitdeploy" / "trusted-engines"
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not trust.is_trusted(sha256(PLAN))


def test_an_entry_that_is_a_link_or_a_folder_trusts_nothing(cache, tmp_path):
    trust.register(sha256(b"another"), {})
    folder = cache / "vitdeploy" / "trusted-engines"
    (tmp_path / "entry").write_text("{}")
    (folder / f"{sha256(PLAN)}.json").symlink_to(tmp_path / "entry")
    assert not trust.is_trusted(sha256(PLAN))


@pytest.mark.parametrize("digest", ["", "0" * 63, "../" + "0" * 61, "A" * 64])
def test_what_is_no_digest_is_never_trusted(digest):
    assert not trust.is_trusted(digest)
    with pytest.raises(ValueError, match="not a SHA-256"):
        trust.register(digest, {})


def test_a_registry_that_cannot_be_written_says_so(cache):
    cache.mkdir()
    (cache / "vitdeploy").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        trust.register(sha256(PLAN), {})
    assert caught.value.exit_code == 4


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomic(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    write_atomic(path, memoryview(b"new"))
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"new", [path])


def killed_before_it_ends(path):
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    write_atomic(path, b"new")


def test_what_a_killed_process_left_beside_a_file_goes_with_the_next_one(tmp_path):
    path = tmp_path / "file"
    write_atomic(path, b"old")
    assert in_child(killed_before_it_ends, path).status is None
    left = {other.read_bytes() for other in tmp_path.iterdir() if other != path}
    assert (path.read_bytes(), left) == (b"old", {b"new"})
    write_atomic(path, b"newer")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"newer", [path])
