"""SHA-256 as people pass it on: "sha256:HEX"."""

from __future__ import annotations

import re
from pathlib import Path

from vitdeploy.errors import DigestError, InputError


def digest_hex(text: object) -> str:
    """The hex, in lower case, of a SHA-256 that is given as "sha256:HEX" or "HEX".

    Raises:
        InputError: it is none.
    """
    found = text.removeprefix("sha256:").lower() if isinstance(text, str) else ""
    if not re.fullmatch(r"[0-9a-f]{64}", found):
        raise InputError(f"{str(text)[:80]!r} is no SHA-256", wanted="sha256: and 64 hexadecimal digits")
    return found


def check_digest(path: Path, found: str, wanted: str, of: str) -> None:
    """Raise DigestError unless the SHA-256 of what `of` says is the one that the user expects."""
    if found != wanted:
        raise DigestError(
            f"{path} is not the bundle that was expected",
            found=f"sha256:{found} of the {of}",
            wanted=f"sha256:{wanted}",
            fix="get it again from whoever gave you the digest",
        )
