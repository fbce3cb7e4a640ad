"""What a finished artifact says of itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vitdeploy.spec import SPARSE, FileEntry

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
