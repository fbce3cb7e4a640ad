"""Bundles whose manifests must have a SHA-256 that somebody was told of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vitdeploy.errors import InputError


def require_pinned(expect_digest: str | None, named: Iterable[str | Path]) -> None:
    """Check that the bundle among `named`, which is one, has this manifest, and every file that it lists. None: nothing
    is asked.

    Raises:
        InputError: none of them is a bundle, or several are.
        DigestError: another manifest, or a file that is not the recorded one.
    """
    if expect_digest is None:
        return
    from vitdeploy.bundle.checked import open_checked
    from vitdeploy.bundle.read import is_bundle

    bundles = [Path(each) for each in named if is_bundle(Path(each))]
    if len(bundles) != 1:
        raise InputError(
            "a digest pins the manifest of one bundle",
            found=", ".join(map(str, bundles)) or "no bundle",
            wanted="one bundle's folder",
            fix="vitdeploy bundle verify BUNDLE --expect-digest pins one bundle after the other" if bundles else "",
        )
    open_checked(bundles[0], "all", expect_digest)
