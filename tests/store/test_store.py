"""The store: an artifact is there whole or not at all, and what is damaged is made again."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vitdeploy.publish as publish
import vitdeploy.store.store as module
from tests.faults.forking import in_child
from vitdeploy.errors import StorageError
from vitdeploy.store.key import Identity
from vitdeploy.store.store import LOG_FILE, RECORD_FILE, Store, files_digest, list_files

ROOT = Path(__file__).parent.parent.parent
KEY = hashlib.sha256(b"a stage").hexdigest()
CONTENT = {"model.onnx": b"graph" * 1000, "weights/model.bin": bytes(range(256))}


def write(folder):
    for name, data in CONTENT.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def make(store, key=KEY, write=write):
    return store.make(Identity("export", {"opset": 20}, {"checkpoint": "00"}, {"onnx": "1"}, key), write)


def start_child(root, body, *arguments):
    """A child process that makes KEY in the store at `root`; `body` is the body of its `write(folder)`."""
    code = f"""
import os, pathlib, sys
from vitdeploy.store.key import Identity
from vitdeploy.store.store import Store

def write(folder):
{body}

store = Store(pathlib.Path({str(root)!r}))
artifact = store.make(Identity("export", {{"opset": 20}}, {{"checkpoint": "00"}}, {{"onnx": "1"}}, {KEY!r}), write)
print(artifact.digest)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def everything_in(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def temporary_folders(root):
    return list(root.rglob(".tmp-*"))


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_what_was_made_is_found(store):
    made = make(store)
    assert store.find(KEY) == made
    assert {name: (made.path / name).read_bytes() for name in CONTENT} == CONTENT


def test_nothing_is_found_in_a_store_that_does_not_exist(store):
    assert store.find(KEY) is None
    assert not store.root.exists()


def test_nothing_is_left_but_the_artifact(store):
    made = make(store)
    assert temporary_folders(store.root) == []
    names = {f"artifacts/{KEY[:2]}/{KEY}/{name}" for name in (*CONTENT, RECORD_FILE)}
    assert set(everything_in(store.root)) == {*names, LOG_FILE}
    assert made.path == store.root / "artifacts" / KEY[:2] / KEY


def test_the_record_says_what_the_artifact_was_made_from(store):
    record = json.loads((make(store).path / RECORD_FILE).read_text(encoding="utf-8"))
    assert record["key"] == KEY
    assert (record["config"], record["inputs"], record["tools"]) == ({"opset": 20}, {"checkpoint": "00"}, {"onnx": "1"})
    assert [entry["path"] for entry in record["files"]] == sorted(CONTENT)


def test_the_digest_depends_on_files_alone(store):
    other = hashlib.sha256(b"another stage").hexdigest()
    assert make(store).digest == make(store, other).digest
    assert make(store, "ff" * 32, lambda folder: (folder / "x").write_bytes(b"")).digest != make(store).digest


def test_an_error_while_writing_leaves_nothing(store):
    def fail(folder):
        write(folder)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        make(store, write=fail)
    assert everything_in(store.root) == {}
    assert temporary_folders(store.root) == []


def test_a_killed_process_leaves_no_artifact_and_the_next_one_removes_its_leftover(store):
    body = (
        "    (folder / 'model.onnx').write_bytes(b'half')\n    print('written', flush=True)\n    sys.stdin.readline()"
    )
    child = start_child(store.root, body)
    assert child.stdout.readline() == "written\n"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.communicate()
    assert store.find(KEY) is None
    assert len(temporary_folders(store.root)) == 1
    made = make(store)
    assert store.find(KEY) == made
    assert temporary_folders(store.root) == []


def test_the_folder_of_a_process_at_work_is_not_removed(store):
    body = "    (folder / 'a').write_bytes(b'a')\n    print('written', flush=True)\n    sys.stdin.readline()"
    child = start_child(store.root, body)
    assert child.stdout.readline() == "written\n"
    make(store, KEY[:2] + "0" * 62)
    assert len(temporary_folders(store.root)) == 1
    child.communicate("go on\n")
    assert child.returncode == 0
    assert (store.find(KEY).path / "a").read_bytes() == b"a"


def test_two_processes_may_make_the_same_at_once(store):
    body = "    (folder / 'm').write_bytes(b'x' * 100000)\n    print('ready', flush=True)\n    sys.stdin.readline()"
    children = [start_child(store.root, body) for _ in range(2)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 2  # both are inside `write`
    for child in children:
        child.stdin.write("go on\n")
        child.stdin.flush()
    digests = [child.communicate()[0].strip() for child in children]
    assert [child.returncode for child in children] == [0, 0]
    found = store.find(KEY)
    assert digests == [found.digest] * 2
    assert (found.path / "m").read_bytes() == b"x" * 100000
    assert temporary_folders(store.root) == []


@pytest.mark.parametrize("name", CONTENT)
def test_a_flipped_bit_is_found_and_the_entry_put_aside_and_made_again(store, name):
    path = make(store).path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert store.find(KEY) is None
    assert make(store) == store.find(KEY)
    (quarantined,) = (store.root / "quarantine").iterdir()
    assert (quarantined / name).read_bytes() == bytes(data)
    assert {name: (store.find(KEY).path / name).read_bytes() for name in CONTENT} == CONTENT


def truncate(folder):
    (folder / "model.onnx").write_bytes(CONTENT["model.onnx"][:-1])


def delete(folder):
    (folder / "model.onnx").unlink()


def link(folder):
    target = folder.parent / "elsewhere"
    (folder / "model.onnx").rename(target)
    (folder / "model.onnx").symlink_to(target)


def no_record(folder):
    (folder / RECORD_FILE).unlink()


def no_json(folder):
    (folder / RECORD_FILE).write_text("{", encoding="utf-8")


def deep_json(folder):
    (folder / RECORD_FILE).write_text("[" * 200_000, encoding="utf-8")


def other_key(folder):
    record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    (folder / RECORD_FILE).write_text(json.dumps({**record, "key": "00" * 32}), encoding="utf-8")


@pytest.mark.parametrize(
    "damage", [truncate, delete, link, no_record, no_json, deep_json, other_key], ids=lambda f: f.__name__
)
def test_a_damaged_entry_is_never_used(store, damage):
    damage(make(store).path)
    assert store.find(KEY) is None
    assert make(store) == store.find(KEY)
    assert len(list((store.root / "quarantine").iterdir())) == 1


def find_without_descriptors(store):
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return store.find(KEY)


def test_an_entry_is_not_damaged_where_the_process_has_no_descriptor_left_to_read_it(store):
    made = make(store)
    found = in_child(find_without_descriptors, store)
    assert found.status == 1 and "Too many open files" in found.error
    assert store.find(KEY) == made


def test_an_undamaged_entry_stays_when_another_is_put_aside(store):
    other = KEY[:2] + "0" * 62
    kept = make(store, other)
    truncate(make(store).path)
    assert store.find(KEY) is None
    assert store.find(other) == kept


def test_a_process_that_died_before_it_put_a_damaged_entry_aside_is_not_waited_for_long(store, monkeypatch):
    truncate(make(store).path)
    (store.folder(KEY) / module.CLAIM).symlink_to("1")
    monkeypatch.setattr(module, "CLAIM_SECONDS", 0.05)
    assert make(store) == store.find(KEY)


def test_what_was_removed_is_not_found(store):
    made = make(store)
    store.remove(KEY)
    assert store.find(KEY) is None
    assert not made.path.exists()


def test_list_files_is_sorted_and_has_sizes_and_digests(tmp_path):
    write(tmp_path)
    entries = list_files(tmp_path)
    assert [(e.path, e.bytes, e.sha256) for e in entries] == [
        (name, len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(CONTENT.items())
    ]
    assert files_digest(entries) != files_digest(entries[:1])


LIMITED = """
import pathlib, resource, signal, sys
import numpy as np
from vitdeploy.errors import StorageError
from vitdeploy.store.key import Identity
from vitdeploy.store.store import Store

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
WRITES = {
    "plain": lambda folder: (folder / "x").write_bytes(bytes(1_000_000)),
    "numpy": lambda folder: np.save(folder / "x.npy", np.zeros(1_000_000)),
}
try:
    Store(pathlib.Path(sys.argv[1])).make(Identity("export", {}, {}, {}, "ab" * 32), WRITES[sys.argv[2]])
except StorageError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("how", ["plain", "numpy"])
def test_a_file_that_the_disk_has_no_room_for_is_a_storage_error(store, how):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, store.root, how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == StorageError.exit_code == 4, done.stderr
    assert done.stdout.startswith("VD4101  no space left to write")
    assert "free some" in done.stdout
    assert everything_in(store.root) == {}
    assert temporary_folders(store.root) == []


@pytest.fixture
def mounted(tmp_path):
    """mount(options): a small file system in memory, mounted at a folder; unmounted at the end."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(
                "mounting a file system needs root: run the tests as root, or in a container with CAP_SYS_ADMIN"
            )
        return folder

    if sys.platform != "linux":
        pytest.skip("tmpfs is mounted on Linux only")
    yield mount
    subprocess.run(["umount", folder], capture_output=True, check=False)


def test_on_a_full_disk_nothing_is_published_and_what_was_there_stays(mounted):
    store = Store(mounted("size=256k") / "store")
    first = make(store)
    other = "ab" * 32
    with pytest.raises(StorageError) as caught:
        make(store, other, lambda folder: (folder / "x").write_bytes(bytes(1_000_000)))
    assert caught.value.exit_code == 4
    assert "bytes free" in caught.value.found
    assert store.find(other) is None
    assert store.find(KEY) == first
    assert temporary_folders(store.root) == []


def test_an_artifact_on_a_read_only_disk_is_found_and_a_new_one_is_refused(mounted):
    folder = mounted("size=1m")
    store = Store(folder / "store")
    made = make(store)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert store.find(KEY) == made
    with pytest.raises(StorageError, match="cannot be written") as caught:
        make(store, "ab" * 32)
    assert "Read-only" in caught.value.found
    assert caught.value.exit_code == 4


def test_whoever_comes_second_gets_what_is_there(store):
    """Stages that measure differ: what later keys are made of must be what lies in the store."""

    def late(folder):
        write(folder)
        first.append(make(store, write=lambda other: (other / "x").write_bytes(b"first")))

    first = []
    assert make(store, write=late) == first[0] == store.find(KEY)
    assert temporary_folders(store.root) == []


def test_a_damaged_entry_that_is_there_first_does_not_win(store):
    def late(folder):
        write(folder)
        truncate(make(store).path)

    made = make(store, write=late)
    assert made == store.find(KEY)
    assert (made.path / "model.onnx").read_bytes() == CONTENT["model.onnx"]


@pytest.mark.parametrize("moment", ["verify_file", "swap"])
@pytest.mark.parametrize("exchanged", [True, False])
def test_an_entry_that_was_made_again_meanwhile_stays(store, monkeypatch, moment, exchanged):
    """Another process makes it while this one judges the damaged one, or is about to put it aside."""
    truncate(make(store).path)
    real, first = getattr(module, moment), []

    def late(*arguments):
        monkeypatch.setattr(module, moment, real)
        first.append(make(store, write=lambda folder: (folder / "x").write_bytes(b"first")))
        return real(*arguments)

    if not exchanged:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    monkeypatch.setattr(module, moment, late)
    monkeypatch.setattr(module, "CLAIM_SECONDS", 0.05)  # of this one, which cannot go on meanwhile
    assert make(store) == first[0] == store.find(KEY)
    assert temporary_folders(store.root) == []
    assert len(list((store.root / "quarantine").iterdir())) == 1
