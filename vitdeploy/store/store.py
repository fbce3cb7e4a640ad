"""The store: artifacts by the key of everything that they depend on."""

import contextlib
import datetime
import errno
import functools
import hashlib
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from platformdirs import user_cache_path

from vitdeploy.bundle.read import file_sha256, verify_file
from vitdeploy.errors import DigestError
from vitdeploy.publish import (
    discard,
    flush,
    identity,
    make_folder,
    publish,
    storage_errors,
    swap,
    temporary_folder,
)
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import DecodeError, FileEntry, decode, encode
from vitdeploy.store.key import RECORD_FILE, Identity, Made, Record, canonical_json
from vitdeploy.store.shared import SharedStore

# --- The locations of this user's stores ------------------------------------------------------------------------------


STORE_VARIABLE = "VITDEPLOY_STORE"
SHARED_VARIABLE = "VITDEPLOY_SHARED_STORE"


def store_folder() -> Path:
    """The root of this user's store: $VITDEPLOY_STORE, or the user's cache folder."""
    place = os.environ.get(STORE_VARIABLE)
    return Path(place) if place else user_cache_path("vitdeploy")


def shared_store() -> SharedStore | None:
    """The store shared with other machines: $VITDEPLOY_SHARED_STORE, a URL."""
    url = os.environ.get(SHARED_VARIABLE)
    return SharedStore(url) if url else None


# --- The log of made and downloaded artifacts: one line of JSON each, in the order of completion ----------------------
# Each line is appended by one write, so that lines of several processes do not mix. Artifacts are never looked up in
# the log: a lost or truncated line only costs an estimate in a plan.


T = TypeVar("T")
R = TypeVar("R")
LOG_FILE = "log.jsonl"
# Bytes read from the end of a log: about 10,000 lines.
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Line:
    """One artifact of `bytes` bytes that was made here, or downloaded ("brought") from the shared store."""

    event: Literal["made", "brought"]
    key: str
    kind: str
    bytes: int
    made: Made


def made_now(name: str, seconds: float, about: Mapping[str, int]) -> Made:
    """The record of something that this process has just finished."""
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    cpu, cores = this_machine()
    return Made(name, when, socket.gethostname(), os.getpid(), round(seconds, 3), cpu, cores, dict(about))


@functools.cache
def this_machine() -> tuple[str, int]:
    """The CPU of this machine, and the number of cores that this process may use."""
    host = describe_host()
    return host["cpu"], int(host["cores"])


def append(root: Path, event: Literal["made", "brought"], record: Record) -> None:
    """Add a line to the log of the store at `root`. The stored artifact matters more than the line, so a failing disk
    is not an error here."""
    if record.made is None:
        return
    line = canonical_json(encode(Line(event, record.key, record.kind, record.bytes, record.made))) + "\n"
    with contextlib.suppress(OSError):
        append_line(root / LOG_FILE, line.encode())


def append_line(path: Path, line: bytes, *, flushed: bool = False) -> None:
    """Append a line, which ends with a newline, to a file in one write; `flushed`: flush it to disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, line)
        if flushed:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_log(root: Path, most: int = MOST_BYTES) -> Iterator[Line]:
    """The lines at the end of a log, oldest first, without truncated ones."""
    try:
        with (root / LOG_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read()
    except FileNotFoundError:
        return
    yield from decoded_lines(Line, data)


def decoded_lines(cls: type[T], data: bytes) -> Iterator[T]:
    """The values in lines of JSON; invalid lines, such as one truncated by a crash, are skipped."""
    for text in data.splitlines():
        with contextlib.suppress(DecodeError, ValueError, RecursionError):
            yield decode(cls, json.loads(text))


# ----------------------------------------------------------------------------------------------------------------------
# A folder of artifacts by key. An entry is either absent or complete; it is verified whenever it is read.
#
# <root>/artifacts/<first two of key>/<key>/   files + artifact.json
# <root>/artifacts/<first two of key>/.tmp-*   being written
# <root>/unfinished/<key>/                     partial results of an interrupted stage, to resume from
# <root>/quarantine/                           entries whose bytes no longer match; never used again
# <root>/log.jsonl                             the log of made and downloaded artifacts (store/store.py)


# The claim, in a damaged entry, of the process that moves it aside; seconds to wait for it, in case it was killed.
CLAIM, CLAIM_SECONDS, LOOK_SECONDS = ".claim", 10.0, 0.005
# Parallel requests to a shared store.
AT_ONCE = 32
# Errors of an exhausted process or machine, which say nothing about an entry.
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


@dataclass(frozen=True)
class Artifact:
    """A finished, verified folder. `digest` depends only on its files, not on how they were made."""

    path: Path
    key: str
    digest: str


class Store:
    """Artifacts under `root`, which is created on first use. With a `shared` store, artifacts found or made here are
    uploaded to it, and artifacts of other machines are found in it."""

    def __init__(self, root: Path, shared: SharedStore | None = None) -> None:
        self.root, self.shared = root, shared

    def find(self, key: str) -> Artifact | None:
        """The artifact with this key, if it exists and is intact. A damaged one stays until it is made again, and is
        then moved to quarantine, so that no process moves what another one has just put there.

        Raises:
            OSError: no descriptors or memory to read it.
            MissingPackageError, StorageError: the shared store cannot be used.
        """
        found = self._here(key)
        if self.shared is None:
            return found
        if found is None:
            return self._brought(key, self.shared)
        self._offer(found)
        return found

    def side_by_side(self, ask: Callable[[T], R], about: Sequence[T]) -> list[R]:
        """The results of `ask`, which looks into this store, for each item; in parallel with a shared store, where each
        call waits for several requests and a driver has thousands of shards."""
        if self.shared is None:
            return [ask(each) for each in about]
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="vitdeploy-store") as pool:
            return list(pool.map(ask, about))

    def _brought(self, key: str, shared: SharedStore) -> Artifact | None:
        """Download an artifact that another machine has made; None if it is not there."""
        folder = self.folder(key)
        with temporary_folder(folder.parent) as work, storage_errors(self.root):
            record = shared.fetch(key, work)
            if record is None:
                return None
            found = self._publish(work, Artifact(folder, key, files_digest(record.files)))
        append(self.root, "brought", record)
        return found

    def look(self, key: str) -> Record | None:
        """The record of an artifact here or in the shared store; its files are neither read nor downloaded. Errors as
        in `find`."""
        record = self._record(key)
        return self.shared.record(key) if record is None and self.shared is not None else record

    def _offer(self, made: Artifact) -> None:
        if self.shared is not None:
            text = (made.path / RECORD_FILE).read_text(encoding="utf-8")
            self.shared.offer(made.path, decode(Record, json.loads(text)))

    def _record(self, key: str) -> Record | None:
        """The record of a local artifact, without a check of its files."""

        def read() -> Record | None:
            text = (self.folder(key) / RECORD_FILE).read_text(encoding="utf-8")
            record = decode(Record, json.loads(text))
            return record if record.key == key else None

        return _readable(read)

    def _here(self, key: str) -> Artifact | None:
        folder, record = self.folder(key), self._record(key)

        def verified() -> Artifact | None:
            for entry in record.files if record is not None else ():
                verify_file(folder, entry)
            return None if record is None else Artifact(folder, key, files_digest(record.files))

        return _readable(verified)

    def make(
        self,
        by: Identity,
        write: Callable[[Path], object],
        *,
        name: str = "",
        about: Mapping[str, int] | None = None,
    ) -> Artifact:
        """Let `write` fill an empty folder, then publish it under its key. The first intact artifact wins.

        Args:
            name, about: for the log; see `Made`.
        """
        folder, began = self.folder(by.key), time.monotonic()
        with temporary_folder(folder.parent) as work, storage_errors(self.root):
            write(work)
            files = list_files(work)
            made_by = made_now(name or by.kind, time.monotonic() - began, about or {})
            record = Record(1, by.key, by.kind, dict(by.config), dict(by.inputs), dict(by.tools), files, made_by)
            (work / RECORD_FILE).write_text(canonical_json(encode(record)) + "\n", encoding="utf-8")
            made = self._publish(work, Artifact(folder, by.key, files_digest(files)))
        append(self.root, "made", record)
        self._offer(made)
        shutil.rmtree(self.unfinished(by.key), ignore_errors=True)
        return made

    def _publish(self, work: Path, made: Artifact) -> Artifact:
        """Give the folder its name, or return the artifact that another process has made meanwhile, if intact."""
        waits_until = time.monotonic() + CLAIM_SECONDS
        while not publish(work, made.path):
            judged, found = identity(made.path), self._here(made.key)
            if found is not None:
                return found
            ours = judged is not None and (_claim(made.path, judged) or time.monotonic() > waits_until)
            if ours and judged is not None and self._replace_damaged(work, made, judged):
                break
            time.sleep(LOOK_SECONDS)
        return made

    def _replace_damaged(self, work: Path, made: Artifact, judged: tuple[int, int]) -> bool:
        """Replace the entry with the identity `judged` by `work`, if it is still there. Other processes may be reading,
        so the key always leads to one of both."""
        quarantine = self.root / "quarantine"
        make_folder(quarantine)
        quarantined = quarantine / f"{made.key}-{uuid.uuid4().hex[:8]}"
        if identity(made.path) != judged:
            return False
        if not swap(work, made.path):
            if identity(made.path) == judged:
                with contextlib.suppress(FileNotFoundError):
                    made.path.rename(quarantined)
            return False
        if identity(work) != judged:  # replaced by another process at this moment: its entry stays
            swap(work, made.path)
            return False
        work.rename(quarantined)
        flush(quarantine)
        return True

    def remove(self, key: str) -> None:
        """Remove the artifact and its unfinished parts."""
        with storage_errors(self.root):
            discard(self.folder(key))
        shutil.rmtree(self.unfinished(key), ignore_errors=True)

    def unfinished(self, key: str) -> Path:
        """The folder for a stage's resumable partial results; removed when the artifact is finished."""
        return self.root / "unfinished" / key

    def folder(self, key: str) -> Path:
        """The folder of the artifact with this key, if it is stored here."""
        return self.root / "artifacts" / key[:2] / key


def _readable(ask: Callable[[], R | None]) -> R | None:
    """The result of `ask`; None if the entry cannot be read or does not match its record. Only errors of an exhausted
    process or machine propagate."""
    try:
        return ask()
    except (ValueError, RecursionError, DigestError):  # from JSON, from names and from decoding
        return None
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise
        return None


def _claim(folder: Path, judged: tuple[int, int]) -> bool:
    """Whether this process may move a damaged folder aside: it must create a link in the folder itself, which only one
    process can."""
    if os.name != "posix":
        return True
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != judged:
            return False
        os.symlink(str(os.getpid()), CLAIM, dir_fd=descriptor)
    except FileExistsError:
        return False
    except OSError:  # not every file system has links
        return True
    finally:
        os.close(descriptor)
    return True


def list_files(folder: Path) -> tuple[FileEntry, ...]:
    """Every file below `folder` with its size and SHA-256, sorted by path."""
    return tuple(
        FileEntry(path.relative_to(folder).as_posix(), path.stat().st_size, file_sha256(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )


def files_digest(files: tuple[FileEntry, ...]) -> str:
    """SHA-256 over paths and digests."""
    return hashlib.sha256(canonical_json([[f.path, f.sha256] for f in files]).encode()).hexdigest()
