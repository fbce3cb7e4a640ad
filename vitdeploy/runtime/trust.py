"""Decides which TensorRT plans may be loaded. A plan is code: deserialising one runs what its maker put into it.

Source: NVIDIA, "Security" of the TensorRT 11.4 documentation: only engines of one's own or signed ones; TensorRT's own
validity check is no detection of tampering. So a plan is loaded only if its SHA-256 stands in a registry of this user
on this machine: a folder that only the user can enter, outside of any bundle, with a file for each digest, which
`compile` writes; or if a caller that has verified the signature of a bundle says so (`trusted` of `read_trusted`). A
digest inside a bundle proves that the file is intact, never who made it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from vitdeploy.errors import MissingFileError, StorageError, UntrustedEngineError, quoted
from vitdeploy.runtime.atomic import write_atomic
from vitdeploy.runtime.private import is_private, private_folder, user_cache

REGISTRY = "trusted-engines"
_DIGEST = re.compile(r"[0-9a-f]{64}")


def rebuild(plan: Path) -> str:
    """The command that makes the plan of a bundle again."""
    return f"vitdeploy compile {quoted(plan.parent / 'graph.onnx')} --target tensorrt -o DIR"


def registry() -> Path:
    """The folder of trusted digests, whether it is there or not."""
    return user_cache() / REGISTRY


def is_trusted(digest: str) -> bool:
    """Whether the plan with this SHA-256 (lower-case hex) may be loaded by this user on this machine."""
    entry = registry() / f"{digest}.json"
    return bool(_DIGEST.fullmatch(digest)) and is_private(registry()) and _own_file(entry)


def register(digest: str, facts: Mapping[str, str]) -> None:
    """Trust the plan with this SHA-256 from now on. `facts` say why, for people: by whom and for what it was built.

    Raises:
        ValueError: no SHA-256 in lower-case hex.
        UnsafeError: others could write the registry.
        StorageError: it cannot be written.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a SHA-256: {digest!r}")
    folder = private_folder(REGISTRY)
    try:
        text = json.dumps(dict(facts), indent=1, sort_keys=True) + "\n"
        write_atomic(folder / f"{digest}.json", text.encode(), 0o600)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written",
            found=error.strerror or str(error),
            wanted="a writable folder",
            fix="set XDG_CACHE_HOME to one",
        ) from error


def read_trusted(plan: Path, trusted: Callable[[str], bool] = is_trusted) -> bytes:
    """The bytes of a plan that may be loaded: those that were hashed, whatever becomes of the file.

    Raises:
        MissingFileError: there is no such file.
        UntrustedEngineError: its digest is not trusted.
    """
    try:
        data = plan.read_bytes()
    except OSError as error:
        raise MissingFileError(f"{plan} cannot be read", found=error.strerror or str(error)) from None
    digest = hashlib.sha256(data).hexdigest()
    if not trusted(digest):
        raise UntrustedEngineError(
            f"{plan} is not loaded: an engine is code, and this one was not built by this user on this machine",
            found=f"sha256 {digest[:16]}..., {len(data):,} bytes, not in {registry()}",
            wanted="an engine built here, unchanged since, or one signed by an identity that you name",
            fix=f"rebuild it: {rebuild(plan)}",
        )
    return data


def _own_file(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(facts.st_mode) and _ours(facts)


def _ours(facts: os.stat_result) -> bool:
    return os.name != "posix" or facts.st_uid == os.geteuid()
