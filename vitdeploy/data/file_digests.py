"""A cache of image digests, keyed by the files' stat as in git's index.

It is a SQLite database. A damaged or foreign database is replaced. If it cannot be written, files are hashed each time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from vitdeploy.bundle.read import file_sha256
from vitdeploy.data.containers.held import HeldImage
from vitdeploy.data.containers.uris import mark_of
from vitdeploy.data.folder import Sample
from vitdeploy.errors import ImageError
from vitdeploy.paths import name_bytes, shown_name

# The name of the database, next to the artifacts of a store: all users of the store share it.
DIGESTS_FILE = "digests.sqlite"
# "vitd" in ASCII, and the version of the table.
APPLICATION, VERSION = 0x76697464, 1
# A file that changed this shortly before it was recorded may change again with the same timestamp: FAT has a resolution
# of 2 s. Git calls such entries racy (Documentation/technical/racy-git.txt).
RACY_NS = 2_100_000_000
# The prefix of the digest of an unreadable file.
UNREAD = "unread"
# The most digests lost if the process is killed.
COMMIT_FILES = 1000
BUSY_SECONDS = 5.0
# Concurrent requests to services.
ASKED_AT_ONCE = 16

_TABLE = """CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, ctime INTEGER,
inode INTEGER, recorded INTEGER, sha256 TEXT) WITHOUT ROWID"""
_FIND = """SELECT sha256 FROM files WHERE path = ? AND size = ? AND mtime = ? AND ctime = ? AND inode = ?
AND max(mtime, ctime) + ? < recorded"""
_RECORDED = "SELECT sha256 FROM files WHERE path = ?"
_RECORD = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"

# The key of a file's cache entry.
Stat = tuple[int, int, int, int]


class FileDigests:
    """SHA-256 of files, without reading those in the database that have not changed. Use as a context manager.
    `hashed`: the number of files read; `changed`: those whose bytes differ from the record."""

    def __init__(self, file: Path) -> None:
        """`file`: the database; created if missing."""
        self._file = file
        self._database: sqlite3.Connection | None = None
        self.hashed = 0
        self.changed: list[Path] = []

    def __enter__(self) -> FileDigests:
        with contextlib.suppress(OSError, sqlite3.OperationalError):  # not writable: no cache
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._database = _opened(self._file)
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                _discard(self._file)
                self._database = _opened(self._file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commit()
        self._close()

    def of(self, images: Iterable[Path | Sample]) -> list[str]:
        """Return the hexadecimal SHA-256 of each file or image; for an unreadable one, a unique text.

        An image in a container is identified by the container's stat, one at a URI by its service's entity tag, digest,
        or size and time.

        Raises:
            StorageError: a service does not answer. DataError: a container changed after it was listed.
        """
        found: list[str] = []
        remote: dict[int, Sample] = {}
        for index, image in enumerate(images):
            path, held = (image, None) if isinstance(image, Path) else (image.path, image.held)
            if held is None:
                file = os.path.abspath(path)  # noqa: PTH100 - links stay: what they name may change
                found.append(self._digest(file, file, functools.partial(file_sha256, Path(file))))
            elif isinstance(image, Sample) and held.uri is not None:
                remote[index] = image
                found.append("")
            else:
                assert held.within is not None
                container, where = held.within
                key = f"{container.path}//{where}"  # two slashes: cannot be a file's path
                found.append(self._digest(key, container.path, functools.partial(_held_sha256, held, str(path))))
            if len(found) % COMMIT_FILES == 0:
                self._commit()
        if remote:
            for index, digest in zip(remote, self._remote_digests(list(remote.values())), strict=True):
                found[index] = digest
        self._commit()
        return found

    def _remote_digests(self, samples: Sequence[Sample]) -> Iterator[str]:
        """As `of`, for images at URIs, concurrently."""
        addresses = [str(sample.held.uri) for sample in samples if sample.held is not None]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            marks = list(pool.map(mark_of, addresses))
            # The address may hold a secret.
            keys = [f"uri {hashlib.sha256(name_bytes(address)).hexdigest()}" for address in addresses]
            stats = [None if mark is None else _marked(*mark) for mark in marks]
            known = [None if stat is None else self._known(key, stat) for key, stat in zip(keys, stats, strict=True)]
            read = pool.map(_content_digest, [s for s, digest in zip(samples, known, strict=True) if digest is None])
            for key, stat, digest in zip(keys, stats, known, strict=True):
                if digest is None:
                    digest = next(read)
                    if digest is None:
                        digest = f"{UNREAD} {uuid.uuid4().hex}"
                    else:
                        self.hashed += 1
                        if stat is not None:
                            self._record(key, stat, time.time_ns(), digest)
                yield digest

    def _digest(self, key: str, path: str, read: Callable[[], str]) -> str:
        """Return the digest that `read` computes for `key`, whose bytes are in the file at `path`."""
        try:
            stat = _stat(path)
            known = self._known(key, stat)
            if known is not None:
                return known
            recorded = time.time_ns()
            digest = read()
            if key == path and self._execute(_RECORDED, (shown_name(path),)) not in (None, digest):
                self.changed.append(Path(path))
            if _stat(path) == stat:
                self._record(key, stat, recorded, digest)
        except (OSError, ImageError):
            return f"{UNREAD} {uuid.uuid4().hex}"
        self.hashed += 1
        return digest

    def _known(self, path: str, stat: Stat) -> str | None:
        return self._execute(_FIND, (shown_name(path), *stat, RACY_NS))

    def _record(self, path: str, stat: Stat, recorded: int, digest: str) -> None:
        self._execute(_RECORD, (shown_name(path), *stat, recorded, digest))

    def _execute(self, statement: str, values: tuple[object, ...]) -> str | None:
        """Return the rows. After a failure the database is no longer used; a damaged one is deleted."""
        row = None
        if self._database is not None:
            try:
                row = self._database.execute(statement, values).fetchone()
            except sqlite3.DatabaseError as error:
                self._fail(error)
        return None if row is None else str(row[0])

    def _commit(self) -> None:
        if self._database is not None:
            try:
                self._database.commit()
            except sqlite3.DatabaseError as error:
                self._fail(error)

    def _fail(self, error: sqlite3.DatabaseError) -> None:
        self._close()
        if not isinstance(error, sqlite3.OperationalError):
            _discard(self._file)

    def _close(self) -> None:
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None


def _held_sha256(held: HeldImage, name: str) -> str:
    return hashlib.sha256(held.read(name)).hexdigest()


def _content_digest(sample: Sample) -> str | None:
    """Return the digest of what `read` returns; None if it cannot be read."""
    try:
        return hashlib.sha256(sample.content()).hexdigest()
    except ImageError:
        return None


def _marked(size: int, mark: str) -> Stat:
    """Return negative numbers for use as file times: they never count as too recent."""
    parts = hashlib.sha256(mark.encode()).digest()
    first, second, third = (-1 - (int.from_bytes(parts[i : i + 8], "big") >> 2) for i in (0, 8, 16))
    return size, first, second, third


def _opened(file: Path) -> sqlite3.Connection:
    """Return the database with its table.

    Raises:
        sqlite3.OperationalError: it cannot be read or written now.
        sqlite3.DatabaseError: it is damaged, or was created by another program.
    """
    database = sqlite3.connect(file, timeout=BUSY_SECONDS)
    try:
        marks = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        empty = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if not empty and marks != [APPLICATION, VERSION]:
            raise sqlite3.DatabaseError("created by another program or version")
        if empty:
            database.execute(f"PRAGMA application_id = {APPLICATION}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        database.execute(_TABLE)
        database.commit()
    except BaseException:
        database.close()
        raise
    return database


def _discard(file: Path) -> None:
    """Remove the database; its journal first, which SQLite would otherwise apply to the next one."""
    for name in (f"{file.name}-journal", file.name):
        file.with_name(name).unlink(missing_ok=True)


def _stat(path: str) -> Stat:
    found = os.stat(path)  # noqa: PTH116 - not a Path for each of a million files
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, _signed(found.st_ino)


def _signed(number: int) -> int:
    """Convert to SQLite's signed integers."""
    return number - (1 << 64) if number >= 1 << 63 else number
