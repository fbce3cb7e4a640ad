"""A store behind a URL: what one machine has made another one finds, whole and checked, or not at all."""

import copy
import hashlib
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.store.test_store import CONTENT, KEY, everything_in, make
from vitdeploy.errors import MissingPackageError, StorageError
from vitdeploy.store import shared as module
from vitdeploy.store.shared import SharedStore
from vitdeploy.store.store import RECORD_FILE, SHARED_VARIABLE, Store, shared_store


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    """One that opens a folder, and one of a protocol without folders, renames or links."""
    if request.param == "file":
        yield f"file://{tmp_path}/shared"
    else:
        place = f"memory://shared-{tmp_path.name}"
        yield place
        fsspec.filesystem("memory").store.clear()


def machine(tmp_path, name, url):
    return Store(tmp_path / name, SharedStore(url))


def refuse(folder):
    raise AssertionError("it was there already")


def test_what_one_machine_made_another_finds(tmp_path, url):
    made = make(machine(tmp_path, "a", url))
    found = machine(tmp_path, "b", url).find(KEY)
    assert (found.key, found.digest) == (KEY, made.digest)
    assert everything_in(found.path) == everything_in(made.path)
    assert (tmp_path / "b") in found.path.parents


def test_what_is_nowhere_is_not_found(tmp_path, url):
    assert machine(tmp_path, "a", url).find(KEY) is None
    assert list((tmp_path / "a").rglob("*.onnx")) == []


def test_what_was_made_before_the_store_was_shared_is_offered_when_it_is_found(tmp_path, url):
    make(Store(tmp_path / "a"))
    assert machine(tmp_path, "b", url).find(KEY) is None
    assert machine(tmp_path, "a", url).find(KEY) is not None
    assert machine(tmp_path, "b", url).find(KEY) is not None


def test_equal_files_of_two_artifacts_are_there_once(tmp_path, url):
    store, other = machine(tmp_path, "a", url), hashlib.sha256(b"another").hexdigest()
    make(store)
    make(store, key=other)
    files, at = fsspec.core.url_to_fs(url)
    assert len([path for path in files.find(at) if "/files/" in path]) == len(CONTENT)
    assert len([path for path in files.find(at) if "/artifacts/" in path]) == 2
    assert not [path for path in files.find(at) if "/.tmp/" in path]


@pytest.fixture
def folder(tmp_path):
    """The folder of a shared store with one artifact."""
    make(machine(tmp_path, "a", f"file://{tmp_path}/shared"))
    return tmp_path / "shared"


def one(folder, pattern):
    [path] = folder.glob(pattern)
    return path


def record_of(folder):
    return one(folder, "artifacts/*/*.json")


def change_record(folder, **changes):
    record = json.loads(record_of(folder).read_text())
    record_of(folder).write_text(json.dumps({**record, **changes}))


def first_file(folder):
    return sorted(folder.glob("files/*/*"))[0]


DAMAGE = {
    "a flipped bit": lambda f: first_file(f).write_bytes(
        bytes([first_file(f).read_bytes()[0] ^ 1]) + first_file(f).read_bytes()[1:]
    ),
    "half a file": lambda f: first_file(f).write_bytes(first_file(f).read_bytes()[:9]),
    "no file": lambda f: first_file(f).unlink(),
    "half a record": lambda f: record_of(f).write_bytes(record_of(f).read_bytes()[:50]),
    "a record that is no JSON": lambda f: record_of(f).write_text("[" * 100_000),
    "the record of another key": lambda f: change_record(f, key="0" * 64),
    "a record of too many bytes": lambda f: record_of(f).write_text(" " * (module.MAX_RECORD_BYTES + 1)),
    "a path that leads out": lambda f: change_record(
        f, files=[{"path": "../../out", "bytes": 1, "sha256": first_file(f).name}]
    ),
    "a path that is its record's": lambda f: change_record(
        f, files=[{"path": RECORD_FILE, "bytes": 1, "sha256": first_file(f).name}]
    ),
    "a path twice": lambda f: change_record(f, files=[{"path": "x", "bytes": 1, "sha256": first_file(f).name}] * 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_there_counts_as_absent_and_is_written_again(folder, tmp_path, damage):
    DAMAGE[damage](folder)
    store = machine(tmp_path, "b", f"file://{folder}")
    assert store.find(KEY) is None
    assert not (tmp_path / "out").exists() and not [*(tmp_path / "b").rglob("*.bin")]
    make(store)
    found = machine(tmp_path, "c", f"file://{folder}").find(KEY)
    assert found is not None
    assert {name: data for name, data in everything_in(found.path).items() if name != RECORD_FILE} == CONTENT


def test_many_machines_may_make_the_same_at_once(tmp_path, url):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda name: make(machine(tmp_path, str(name), url)), range(8)))
    assert len({each.digest for each in made}) == 1
    assert machine(tmp_path, "late", url).find(KEY).digest == made[0].digest
    files, at = fsspec.core.url_to_fs(url)
    assert not [path for path in files.find(at) if "/.tmp/" in path]


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_store_is_asked_many_things_at_a_time(tmp_path, url, shared):
    store, together = machine(tmp_path, "a", url) if shared else Store(tmp_path / "a"), threading.Barrier(4)
    make(store)

    def ask(key):
        if shared:
            together.wait(20)  # broken where one waits for another
        return store.find(key) is not None

    assert store.side_by_side(ask, [KEY, "0" * 64, KEY, "1" * 64]) == [True, False, True, False]


class Faulty(LocalFileSystem):
    """A folder behind a store that fails as it is told to: `fails` is asked with each operation."""

    protocol = "faulty"
    cachable = False
    fails = staticmethod(lambda name, path: None)

    def _told(self, name, path):
        self.fails(name, path)

    def info(self, path, **options):
        self._told("info", path)
        return super().info(path, **options)

    def get_file(self, path, local, **options):
        self._told("get", path)
        return super().get_file(path, local, **options)

    def put_file(self, local, path, **options):
        self._told("put", path)
        return super().put_file(local, path, **options)

    def mv(self, path, other, **options):
        self._told("mv", other)
        return super().mv(path, other, **options)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture
def fails(monkeypatch):
    return lambda function: monkeypatch.setattr(Faulty, "fails", staticmethod(function))


def silent_for_ever(name, path):
    threading.Event().wait(5)


def refused(name, path):
    raise PermissionError(13, "Access Denied for s3cret")


@pytest.mark.parametrize(
    ("fault", "said"),
    [(silent_for_ever, "no answer for 0 s"), (refused, "PermissionError: [Errno 13] Access Denied for ...")],
)
def test_a_store_that_does_not_answer_is_named(tmp_path, fails, monkeypatch, fault, said):
    fails(fault)
    monkeypatch.setattr("vitdeploy.remote.PATIENCE_SECONDS", 0.2)
    secret = "s3cret" if fault is refused else "s3/cr#t"  # a secret may have slashes
    store = Store(tmp_path / "a", SharedStore(f"faulty://me:{secret}@{tmp_path}/shared?sig={secret}"))
    with pytest.raises(StorageError) as caught:
        store.find(KEY)
    assert secret not in str(caught.value)
    assert "cannot be used" in caught.value.message and said in caught.value.found
    assert "s3cret" not in str(caught.value) and "Traceback" not in str(caught.value)


@pytest.mark.parametrize("operation", ["put", "mv"])
@pytest.mark.parametrize("number", range(3))
def test_a_writer_that_is_cut_off_leaves_nothing_that_a_reader_takes(tmp_path, fails, operation, number):
    """At any of its files or its record; its own work is kept, and offered when it is run again."""
    seen = []

    def fault(name, path):
        seen.extend([path] if name == operation else [])
        if name == operation and len(seen) == number + 1:
            raise ConnectionError("cut off")

    fails(fault)
    url = f"faulty://{tmp_path}/shared"
    writer = machine(tmp_path, "a", url)
    if operation == "put" and number == 2:
        make(writer)  # two files, and the record is not put from a file
    else:
        with pytest.raises(StorageError, match="cannot be written"):
            make(writer)
        fails(lambda name, path: None)
        assert machine(tmp_path, "b", url).find(KEY) is None
        assert machine(tmp_path, "a", url).find(KEY) is not None
    fails(lambda name, path: None)
    assert machine(tmp_path, "c", url).find(KEY) is not None


def test_a_full_disk_here_is_not_taken_for_a_fault_there(tmp_path, fails):
    make(machine(tmp_path, "a", f"faulty://{tmp_path}/shared"))

    def full(name, path):
        if name == "get":
            raise OSError(28, "No space left on device")

    fails(full)
    with pytest.raises(StorageError) as caught:
        machine(tmp_path, "b", f"faulty://{tmp_path}/shared").find(KEY)
    assert "cannot be used" not in caught.value.message and str(tmp_path / "b") in caught.value.message


def test_packages_that_are_missing_are_named(tmp_path, monkeypatch):
    for url, package in (("s3://bucket/store", "s3fs"), ("gs://bucket/store", "gcsfs")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingPackageError, match=f"needs the package {package}"):
            machine(tmp_path, "a", url).find(KEY)
    with pytest.raises(StorageError) as caught:
        machine(tmp_path, "a", "nobodys://host/share").find(KEY)
    assert "Protocol not known: nobodys" in caught.value.found
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPackageError, match="a shared store needs the package fsspec") as caught:
        machine(tmp_path, "a", "file:///nowhere").find(KEY)
    assert "vitdeploy[data]" in caught.value.fix


def test_the_address_goes_to_workers_and_connections_do_not(tmp_path, monkeypatch):
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    assert shared_store() is None
    monkeypatch.setenv(SHARED_VARIABLE, f"file://{tmp_path}/shared")
    store = shared_store()
    assert store.fetch(KEY, tmp_path) is None
    given = copy.deepcopy(store)  # by the state that is pickled
    assert (given, given._remote._opened) == (store, None)
