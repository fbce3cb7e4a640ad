"""Keys of artifacts, and the records of how they were made."""

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vitdeploy
from vitdeploy.spec import SPARSE, FileEntry

# --- The key of an artifact: SHA-256 over everything that it depends on -----------------------------------------------


FORMAT = 2


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value: sorted keys, no spaces, only finite numbers."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


@dataclass(frozen=True)
class Identity:
    """Everything that an artifact depends on: the `kind` of the stage, its `config`, the digests of its inputs, and the
    versions of its tools. `key`: the SHA-256 of all of it, by which the artifact is found."""

    kind: str
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    tools: Mapping[str, str]
    key: str = ""

    def __post_init__(self) -> None:
        if not self.key:
            parts = {"format": FORMAT, "kind": self.kind, "config": dict(self.config)}
            parts |= {"inputs": dict(self.inputs), "tools": dict(self.tools)}
            object.__setattr__(self, "key", hashlib.sha256(canonical_json(parts).encode()).hexdigest())


# --- The version of our own code, a part of every key: a digest of the package's files, updated automatically ---------
# One digest covers all code that makes artifacts. Whole files count, with their comments: making a folder again is
# cheaper than reusing an outdated one. So artifacts are made again after each release, and after each commit that
# touches files outside `ABOVE`.


PACKAGE = Path(vitdeploy.__file__).parent
# Folders that no stage imports, as an import contract checks: reports, interfaces and wings. Stored results of
# `workflows` have `everything` in their key.
ABOVE = ("api", "cli", "devices", "embed", "history", "qat", "report", "releases", "serve", "workflows")


@functools.cache
def code_version(package: Path = PACKAGE, *, everything: bool = False) -> str:
    """SHA-256 over the files of the package; `everything`: including the folders `ABOVE`.

    It is the same on every machine and for all line endings.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*"), key=lambda path: path.relative_to(package).as_posix()):
        place = path.relative_to(package)
        above = place.parts[0] in ABOVE or (len(place.parts) == 1 and path.name.startswith("__init__."))
        hidden = "__pycache__" in place.parts or path.name.startswith(".")
        if path.is_file() and not hidden and (everything or not above):
            content = path.read_bytes().replace(b"\r\n", b"\n")
            digest.update(f"{place.as_posix()}\n{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


# --- The record of a finished artifact --------------------------------------------------------------------------------


RECORD_FILE = "artifact.json"


@dataclass(frozen=True)
class Made:
    """How an artifact was made: `name` of the stage in plans; `when` it was finished, in UTC by the machine's clock;
    `host` and `pid` of the process; its `seconds`; its `cpu` and `cores`; and `about`, the amount of work, such as the
    number of images. None of this is part of a key or a digest."""

    name: str
    when: str
    host: str
    pid: int
    seconds: float
    cpu: str
    cores: int
    about: dict[str, int]


@dataclass(frozen=True)
class Record:
    """`artifact.json`: the identity of the artifact, and its files. `made` is None in records of older releases."""

    format: int
    key: str
    kind: str
    config: dict[str, Any]
    inputs: dict[str, str]
    tools: dict[str, str]
    files: tuple[FileEntry, ...]
    made: Made | None = field(default=None, metadata=SPARSE)

    @property
    def bytes(self) -> int:
        """Total size of the files."""
        return sum(entry.bytes for entry in self.files)
