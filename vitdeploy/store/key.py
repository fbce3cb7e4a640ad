"""Keys: what an artifact is a function of, where it lies, what is recorded of it."""

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
    """The one text of a JSON value: sorted keys, no spaces, finite numbers only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


@dataclass(frozen=True)
class Identity:
    """What an artifact is a function of: `kind` of the stage, its `config`, inputs with these digests, and tools with
    these versions. `key`: SHA-256 over all of it, by which the artifact is found."""

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


# --- The version of our own code, a part of every key: a digest of the package's files that nobody has to raise -------
# One digest stands for all that artifacts are made by. Whole files count, with their comments: to make a folder once
# more is cheap beside reusing one that is out of date. A release makes everything again once, and so does a commit that
# touches the package below reports and doors.


PACKAGE = Path(vitdeploy.__file__).parent
# Folders that no stage imports, which an import contract holds: reports, doors and wings. What is stored of a result of
# `workflows` has `everything` in its key.
ABOVE = ("api", "cli", "devices", "embed", "history", "qat", "report", "releases", "serve", "workflows")


@functools.cache
def code_version(package: Path = PACKAGE, *, everything: bool = False) -> str:
    """SHA-256 over the files of the package, without those `ABOVE` unless `everything` counts.

    The same on every machine and for all line endings.
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


# --- What a finished artifact says of itself --------------------------------------------------------------------------


RECORD_FILE = "artifact.json"


@dataclass(frozen=True)
class Made:
    """How an artifact was made: `name` of the stage, as plans have it; `when` it was finished, in UTC by the clock of
    the machine; `host` and `pid` of the process; its `seconds`; `cpu` and `cores` that it had; and by `about` how much
    work it was, such as the number of images. Nothing of this is part of a key or a digest."""

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
    """`artifact.json`: what the artifact is, what it is a function of, and its files. `made` is None in records of
    older releases."""

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
        """Of all files."""
        return sum(entry.bytes for entry in self.files)
