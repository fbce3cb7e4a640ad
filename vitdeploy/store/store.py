"""A folder of artifacts by key. An entry either is not there or is complete; it is verified whenever it is read.

<root>/artifacts/<first two of key>/<key>/   files + artifact.json
<root>/artifacts/<first two of key>/.tmp-*   being written
<root>/unfinished/<key>/                     what an interrupted stage left, to go on with when it is run again
<root>/quarantine/                           entries whose bytes no longer match; never used again
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import stat
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitdeploy.bundle.read import file_sha256, verify_file
from vitdeploy.errors import DigestError
from vitdeploy.publish import discard, make_folder, publish, remove_abandoned, storage_errors, temporary_folder
from vitdeploy.spec import DecodeError, FileEntry, decode, encode
from vitdeploy.store.key import canonical_json

RECORD_FILE = "artifact.json"


@dataclass(frozen=True)
class Record:
    """`artifact.json`: what the artifact is, what it is a function of, and its files."""

    format: int
    key: str
    kind: str
    config: dict[str, Any]
    inputs: dict[str, str]
    tools: dict[str, str]
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class Artifact:
    """A finished, verified folder. `digest` depends on its files alone, not on how they were made."""

    path: Path
    key: str
    digest: str


class Store:
    """Artifacts under `root`, which is made when first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, key: str) -> Artifact | None:
        """The artifact with this key if it is there and intact; a damaged one is put into quarantine."""
        folder = self._folder(key)
        judged = _identity(folder)
        if judged is None:
            return None
        try:
            record = decode(Record, json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")))
            for entry in record.files:
                verify_file(folder, entry)
            intact = record.key == key
        except (OSError, ValueError, DecodeError, DigestError):
            intact = False
        if intact:
            return Artifact(folder, key, files_digest(record.files))
        with storage_errors(self.root):
            quarantine = self.root / "quarantine"
            quarantine.mkdir(parents=True, exist_ok=True)
            if _identity(folder) == judged:  # else another process has put it there already, or made it again
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(quarantine / f"{key}-{uuid.uuid4().hex[:8]}")
        return None

    def make(
        self,
        key: str,
        kind: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, str],
        tools: Mapping[str, str],
        write: Callable[[Path], None],
    ) -> Artifact:
        """Let `write` fill an empty folder, then publish it under `key`. Whoever is first wins, with what is intact."""
        folder = self._folder(key)
        with storage_errors(self.root):
            make_folder(folder.parent)
            remove_abandoned(folder.parent)
        with temporary_folder(folder.parent) as work, storage_errors(self.root):
            write(work)
            files = list_files(work)
            record = Record(1, key, kind, dict(config), dict(inputs), dict(tools), files)
            (work / RECORD_FILE).write_text(canonical_json(encode(record)) + "\n", encoding="utf-8")
            made = self._publish(work, Artifact(folder, key, files_digest(files)))
        shutil.rmtree(self.unfinished(key), ignore_errors=True)
        return made

    def _publish(self, work: Path, made: Artifact) -> Artifact:
        """Give the folder its name; or take what another process has made meanwhile, with its own digest, if intact."""
        while not publish(work, made.path):
            found = self.find(made.key)
            if found is not None:
                return found
        return made

    def remove(self, key: str) -> None:
        """Remove the artifact and its unfinished parts."""
        with storage_errors(self.root):
            discard(self._folder(key))
        shutil.rmtree(self.unfinished(key), ignore_errors=True)

    def unfinished(self, key: str) -> Path:
        """Where a stage may keep what it needs to go on after an interruption; it goes when the artifact is there."""
        return self.root / "unfinished" / key

    def _folder(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / key


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """What tells a folder from another one that gets its name later; None if there is none."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if stat.S_ISDIR(found.st_mode) else None


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
