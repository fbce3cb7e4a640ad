"""The agent as one file: the device zone in a zipapp, the same bytes wherever it is packed.

What its modules import beyond the standard library is numpy and Pillow, where images or numbers are touched, and one
runtime. tests/devices/test_package.py imports all of them where nothing else is installed.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import vitdeploy

# Folders go with all that is below them.
ZONE = (
    *("__init__.py", "backends.py", "errors.py", "extensions.py", "limits.py", "paths.py", "zip_members.py"),
    *("publish.py", "exchange.py", "spec", "runtime", "compilation", "benchmark"),
    *(f"bundle/{name}.py" for name in ("__init__", "checked", "digests", "flow", "layout", "read", "sign")),
    *("devices/__init__.py", "devices/agent"),
)
MAIN = "import sys\nfrom vitdeploy.devices.agent.main import main\n\nmain(sys.argv[0])\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Package:
    """`data` is agent.pyz, `digest` its SHA-256."""

    data: bytes
    digest: str


@functools.cache
def agent_package() -> Package:
    """Stored, not deflated: what zlib makes of a text depends on its version."""
    home = Path(vitdeploy.__file__).parent
    files = sorted(file for name in ZONE for file in _files(home / name))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [
            ("__main__.py", MAIN.encode()),
            *((f"vitdeploy/{file.relative_to(home).as_posix()}", file.read_bytes()) for file in files),
        ]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return Package(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))
