"""A store shared by several machines: artifacts behind any URL that fsspec opens, in addition to each machine's store.

<url>/artifacts/<first two of key>/<key>.json     the artifact's record, written after all its files
<url>/files/<first two of digest>/<SHA-256>       the bytes, stored once for all artifacts that contain them
<url>/.tmp/                                       files being written

Files get their final name only when complete, and are only ever replaced by the same bytes (a record may differ in who
made the artifact). So any number of machines can write at once, without locks. Everything read is checked by size and
SHA-256; damaged files count as absent, and are written again by the next machine that makes the artifact.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.bundle.read import plain_path, verify_file
from vitdeploy.errors import DigestError
from vitdeploy.remote import Remote, shown_uri
from vitdeploy.spec import FileEntry, decode, encode
from vitdeploy.store.key import RECORD_FILE, Record, canonical_json

if TYPE_CHECKING:
    import fsspec

MAX_RECORD_BYTES = 16 << 20
PASSING = ".tmp"


@dataclass
class SharedStore:
    """The store at `url`, such as "s3://bucket/vitdeploy" or "file:///mnt/team/vitdeploy"; opened when first used."""

    url: str
    _remote: Remote = field(init=False, repr=False, compare=False)
    # Keys of existing records; and the keys of records and digests of files that were found damaged.
    _known: set[str] = field(default_factory=set, repr=False, compare=False)
    _damaged: set[str] = field(default_factory=set, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._remote = Remote(self.url, "shared store")

    @property
    def name(self) -> str:
        """The URL without possible secrets."""
        return shown_uri(self.url)

    def fetch(self, key: str, folder: Path) -> Record | None:
        """Download an artifact and its record into an empty folder; None if it is not complete in the store.

        Raises:
            StorageError: the store does not answer, or refuses; or the folder's disk is full.
            MissingPackageError: fsspec, or its package for this protocol, is not installed.
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
        """Upload a finished artifact if the store lacks it; errors as in `fetch`."""
        if record.key in self._known:
            return
        place = _record_path(record.key)
        if record.key in self._damaged or self._size(place) is None:
            for entry in record.files:
                path = _file_path(entry.sha256)
                if entry.sha256 in self._damaged or self._size(path) != entry.bytes:
                    self._remote.publish(path, folder / entry.path, entry.bytes, aside=PASSING)
            text = (canonical_json(encode(record)) + "\n").encode()
            self._remote.publish(place, text, len(text), aside=PASSING)
            self._damaged -= {record.key, *(entry.sha256 for entry in record.files)}
        self._known.add(record.key)

    def record(self, key: str) -> Record | None:
        """The record of an artifact; None if it is missing or damaged; errors as in `fetch`."""
        place = _record_path(key)
        size = self._size(place)
        if size is None:
            return None
        text = b""
        if size <= MAX_RECORD_BYTES:
            text = self._remote.ask(lambda files, at: files.cat_file(f"{at}/{place}"), size)
        try:
            record = decode(Record, json.loads(text))
        except (ValueError, RecursionError):  # from JSON and from decoding
            record = None
        names = [] if record is None else [entry.path for entry in record.files]
        allowed = all(plain_path(name) and name != RECORD_FILE for name in names) and len(set(names)) == len(names)
        if record is None or record.key != key or not allowed:
            self._damaged.add(key)
            return None
        return record

    def _bring(self, entry: FileEntry, folder: Path) -> bool:
        """Download a file; return whether it matches its record."""
        source, target = _file_path(entry.sha256), folder / entry.path
        if self._size(source) != entry.bytes:
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        self._remote.ask(lambda files, at: files.get_file(f"{at}/{source}", str(target)), entry.bytes, here=folder)
        try:
            verify_file(folder, entry)
        except DigestError:
            return False
        return True

    def _size(self, place: str) -> int | None:
        """Size in bytes; None if it does not exist."""

        def ask(files: fsspec.AbstractFileSystem, at: str) -> int | None:
            files.invalidate_cache()  # cached listings: other machines write here
            try:
                return int(files.info(f"{at}/{place}")["size"])
            except FileNotFoundError:
                return None

        return self._remote.ask(ask)


def _record_path(key: str) -> str:
    return f"artifacts/{key[:2]}/{key}.json"


def _file_path(digest: str) -> str:
    return f"files/{digest[:2]}/{digest}"
