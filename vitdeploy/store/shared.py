"""A store that several machines share: artifacts behind any URL that fsspec opens, beside each machine's own store.

<url>/artifacts/<first two of key>/<key>.json     the artifact's record, written when all its files are there
<url>/files/<first two of digest>/<SHA-256>       the bytes, once for all artifacts that have them
<url>/.tmp/                                       being written

Nothing has its final name before it is whole, and nothing changes under its name but by the same bytes, or in a record
by who has made them: so any number of machines write at once, without locks. Whatever is read is checked by size and
SHA-256; what is damaged counts as absent, and is written again by whoever makes the artifact next.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import itertools
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from vitdeploy.bundle.read import plain_path, verify_file
from vitdeploy.errors import DigestError, MissingPackageError, StorageError
from vitdeploy.publish import storage_error
from vitdeploy.spec import FileEntry, decode, encode
from vitdeploy.store.key import canonical_json
from vitdeploy.store.record import RECORD_FILE, Record
from vitdeploy.store.uri import shown_uri

if TYPE_CHECKING:
    import fsspec

T = TypeVar("T")
# How long one answer of the store is waited for, and what it has to bring of a file in a second.
PATIENCE_SECONDS, SLOWEST_BYTES = 60.0, 256 << 10
MAX_RECORD_BYTES = 16 << 20
# Of a disk of this machine, when something is brought.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Where the packages of these protocols find who the user is.
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@dataclass
class SharedStore:
    """The store at `url`, such as "s3://bucket/vitdeploy" or "file:///mnt/team/vitdeploy"; opened when first used."""

    url: str
    _opened: tuple[fsspec.AbstractFileSystem, str] | None = field(default=None, repr=False, compare=False)
    # Records that are there, by key; and those, with the files, that were found damaged there.
    _known: set[str] = field(default_factory=set, repr=False, compare=False)
    _damaged: set[str] = field(default_factory=set, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]  # connections stay with their process

    @property
    def name(self) -> str:
        """The URL without what may be a secret in it."""
        return shown_uri(self.url)

    def fetch(self, key: str, folder: Path) -> Record | None:
        """Bring an artifact, with its record, into an empty folder; None if it is not there whole.

        Raises:
            StorageError: the store does not answer, or refuses; or the folder's disk is full.
            MissingPackageError: fsspec, or what it needs for this protocol, is not installed.
        """
        record = self.record(key)
        if record is None:
            return None
        for entry in record.files:
            if not self._bring(entry, folder):
                self._damaged |= {key, entry.sha256}
                return None
        (folder / RECORD_FILE).write_text(canonical_json(encode(record)) + "\n", encoding="utf-8")
        self._known.add(key)
        return record

    def offer(self, folder: Path, record: Record) -> None:
        """Put a finished artifact there, if it is not there yet; errors as `fetch`."""
        if record.key in self._known:
            return
        place = _record_path(record.key)
        if record.key in self._damaged or self._size(place) is None:
            for entry in record.files:
                path = _file_path(entry.sha256)
                if entry.sha256 in self._damaged or self._size(path) != entry.bytes:
                    self._put(path, folder / entry.path, entry.bytes)
            text = (canonical_json(encode(record)) + "\n").encode()
            self._put(place, text, len(text))
            self._damaged -= {record.key, *(entry.sha256 for entry in record.files)}
        self._known.add(record.key)

    def record(self, key: str) -> Record | None:
        """The record of an artifact, None if there is none that is whole; errors as `fetch`."""
        place = _record_path(key)
        size = self._size(place)
        if size is None:
            return None
        text = self._ask(lambda files, at: files.cat_file(f"{at}/{place}"), size) if size <= MAX_RECORD_BYTES else b""
        try:
            record = decode(Record, json.loads(text))
        except (ValueError, RecursionError):  # of JSON, and of what was decoded
            record = None
        names = [] if record is None else [entry.path for entry in record.files]
        allowed = all(plain_path(name) and name != RECORD_FILE for name in names) and len(set(names)) == len(names)
        if record is None or record.key != key or not allowed:
            self._damaged.add(key)
            return None
        return record

    def _bring(self, entry: FileEntry, folder: Path) -> bool:
        """Whether the file came as its record says."""
        source, target = _file_path(entry.sha256), folder / entry.path
        if self._size(source) != entry.bytes:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        self._ask(lambda files, at: files.get_file(f"{at}/{source}", str(target)), entry.bytes, here=folder)
        try:
            verify_file(folder, entry)
        except DigestError:
            return False
        return True

    def _put(self, place: str, content: Path | bytes, size: int) -> None:
        """Write under a name of its own, then give it the final one: a reader never sees a part."""

        def write(files: fsspec.AbstractFileSystem, at: str) -> None:
            passing, final = f"{at}/.tmp/{uuid.uuid4().hex}", f"{at}/{place}"
            files.makedirs(f"{at}/.tmp", exist_ok=True)
            files.makedirs(final.rpartition("/")[0], exist_ok=True)
            try:
                if isinstance(content, bytes):
                    files.pipe_file(passing, content)
                else:
                    files.put_file(str(content), passing)
                files.mv(passing, final)
            except BaseException:
                with contextlib.suppress(Exception):
                    files.rm_file(passing)
                raise

        self._ask(write, size)

    def _size(self, place: str) -> int | None:
        """In bytes; None if it is not there."""

        def ask(files: fsspec.AbstractFileSystem, at: str) -> int | None:
            files.invalidate_cache()  # of listings: others write here
            try:
                return int(files.info(f"{at}/{place}")["size"])
            except FileNotFoundError:
                return None

        return self._ask(ask, 0)

    def _ask(self, question: Callable[[fsspec.AbstractFileSystem, str], T], size: int, here: Path | None = None) -> T:
        """What the store answers, in the time that so many bytes may take. `here`: where they are written."""
        seconds = PATIENCE_SECONDS + size / SLOWEST_BYTES
        try:
            if self._opened is None:
                self._opened = _open(self.url)
            files, at = self._opened
            return _within(seconds, lambda: question(files, at))
        except (StorageError, MissingPackageError):
            raise
        except concurrent.futures.TimeoutError:
            raise self._failed(f"no answer for {seconds:.0f} s", "the same command goes on where it was") from None
        except Exception as error:  # each protocol has its own
            if here is not None and isinstance(error, OSError) and error.errno in FULL:
                raise storage_error(error, here) or error from None
            where = CREDENTIALS.get(urlsplit(self.url).scheme)
            fix = f"credentials are taken from {where}" if where else "look whether the address is right, and writable"
            raise self._failed(f"{type(error).__name__}: {self._unsecret(str(error))}"[:300], fix) from None

    def _unsecret(self, text: str) -> str:
        """What a library says, without what is secret of the URL."""
        text = text.replace(self.url, self.name)
        place, _, query = self.url.partition("?")
        user = place.rpartition("@")[0].partition("://")[2]
        for secret in (user, user.partition(":")[2], query):
            text = text.replace(secret, "...") if secret else text
        return text

    def _failed(self, found: str, fix: str) -> StorageError:
        return StorageError(f"the shared store {self.name} cannot be used", found=found, wanted="an answer", fix=fix)


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise MissingPackageError("fsspec", "shared", "a shared store") from None
    try:
        files, at = fsspec.core.url_to_fs(url)
    except ImportError as error:  # such as "Install s3fs to access S3"
        raise MissingPackageError(_package(error), "", f"a shared store at {urlsplit(url).scheme}://") from None
    return files, at.rstrip("/")


def _package(error: ImportError) -> str:
    words = str(error).split()
    follows = [word for before, word in itertools.pairwise(words) if before.lower() == "install"]
    return error.name or next(iter(follows), "that fsspec asks for")


def _within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, in a thread that is left alone where it takes longer: no protocol promises to give up.

    Raises:
        TimeoutError: of concurrent.futures. Errors of `work` propagate.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="vitdeploy-shared-store", daemon=True).start()
    return future.result(seconds)


def _record_path(key: str) -> str:
    return f"artifacts/{key[:2]}/{key}.json"


def _file_path(digest: str) -> str:
    return f"files/{digest[:2]}/{digest}"
