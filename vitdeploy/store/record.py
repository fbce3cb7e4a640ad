"""What a finished artifact says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitdeploy.spec import FileEntry

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
