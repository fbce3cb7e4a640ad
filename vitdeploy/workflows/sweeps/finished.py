"""Which recipes of a sweep are done: a file beside their bundles, by which the same command goes on.

`finished.jsonl` has a line for each bundle, appended when that has its name. A line counts while what the recipe would
make is the same, and while the bundle is the one that it was written for.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.bundle.read import file_sha256
from vitdeploy.document.read import read_report
from vitdeploy.document.report import Report
from vitdeploy.publish import storage_errors
from vitdeploy.spec import DecodeError, decode, encode
from vitdeploy.store.key import canonical_json
from vitdeploy.workflows.sweeps.entries import Outlined

FINISHED_FILE = "finished.jsonl"
_FILES = ("manifest.json", "report.json")


@dataclass(frozen=True)
class Finished:
    """A bundle that is done: the name of its recipe, `key` of `Outlined`, `files`: SHA-256 of its manifest.json and
    report.json, which has all other digests; `host`: the name of the machine that measured, if that was another one."""

    name: str
    key: str
    files: dict[str, str]
    host: str | None


class FinishedRecipes:
    """Those of the folder `home`."""

    def __init__(self, home: Path) -> None:
        self._home, self._path = home, home / FINISHED_FILE
        self._known: dict[str, Finished] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in self._path.read_bytes().splitlines():
                with contextlib.suppress(DecodeError, ValueError, RecursionError):  # cut off by a crash
                    found = decode(Finished, json.loads(line))
                    self._known[found.name] = found

    def find(self, outlined: Outlined) -> tuple[Report, str | None] | None:
        """The report of a recipe whose bundle is done, with the host that measured it."""
        name = outlined.recipe.name
        found = self._known.get(name)
        if found is None or found.key != outlined.key or _digests(self._home / name) != found.files:
            return None
        return read_report(self._home / name / "report.json"), found.host

    def add(self, outlined: Outlined, host: str | None) -> None:
        """A recipe whose bundle is at its place.

        Raises:
            StorageError: the disk is full, or not writable.
        """
        name = outlined.recipe.name
        line = Finished(name, outlined.key, _digests(self._home / name) or {}, host)
        data = b"\n" * self._torn() + canonical_json(encode(line)).encode() + b"\n"
        with storage_errors(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        self._known[name] = line

    def _torn(self) -> bool:
        """Whether a crash has cut off the last line."""
        with contextlib.suppress(FileNotFoundError, OSError), self._path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
        return False


def _digests(bundle: Path) -> dict[str, str] | None:
    try:
        return {name: file_sha256(bundle / name) for name in _FILES}
    except OSError:
        return None
