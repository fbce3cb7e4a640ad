"""The version of our own code, a part of every key: a digest of the package's files that nobody has to raise.

One digest stands for all that artifacts are made by. Whole files count, with their comments: to make a folder once more
is cheap beside reusing one that is out of date. A release makes everything again once, and so does a commit that
touches the package below reports and doors.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import vitdeploy

PACKAGE = Path(vitdeploy.__file__).parent
# Folders that no stage imports, which an import contract holds: reports, doors and wings. What is stored of a result of
# `workflows` has `everything` in its key.
ABOVE = ("api", "cli", "devices", "embed", "history", "qat", "report", "serve", "workflows")


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
