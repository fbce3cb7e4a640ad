"""A packed bundle becomes the folder that an app loads: whole and checked, or not at all."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.bundle.archive import Packed, Progress, read_packed, silent
from vitdeploy.bundle.digests import digest_hex
from vitdeploy.bundle.read import MANIFEST_FILE, is_bundle, read_bundle
from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_by
from vitdeploy.errors import ManifestError
from vitdeploy.publish import replacing


def unpack(
    file: str | Path,
    folder: str | Path,
    *,
    expect_digest: str | None = None,
    trust: str | Path | None = None,
    progress: Progress = silent,
) -> Packed:
    """Make the folder of a packed bundle, as `vitdeploy bundle unpack` does; `load(folder)` takes it then.

    Every byte of the file is checked, and each file's digest, before the folder is there. A bundle that is at `folder`
    already is replaced, anything else is not. The folder's parents are made.

    Args:
        expect_digest: the SHA-256 of the file, "sha256:HEX" or "HEX", from whoever packed it: no other one is taken.
        trust: the file of a public key or certificate (PEM): the bundle must be signed by it (`bundle.sign.signed_by`).
        progress: called with what is done, the bytes so far and the bytes in all.

    Raises:
        MissingFileError: no such file, or none of the identity to trust.
        ArchiveError, ManifestError, DigestError: not an intact packed bundle, or not the expected one.
        SignatureError: not signed by `trust`.
        OutputError: `folder` holds something that is no bundle.
        InputError: `expect_digest` is no SHA-256, or `trust` no key or certificate.
        HostError: a full or read-only disk; with `trust`, model-signing is not installed.
    """
    file, folder = Path(file), Path(folder)
    expect = None if expect_digest is None else digest_hex(expect_digest)
    with replacing(folder, _own_names(folder)) as work:
        packed = read_packed(file, work, expect, progress)
        signed_by(work, None if trust is None else Path(trust), called=file)
    return packed


def _own_names(folder: Path) -> tuple[str, ...]:
    """The top-level names of a bundle's folder, which another bundle replaces; nothing if it is not a bundle."""
    try:
        listed = [entry.path.partition("/")[0] for entry in read_bundle(folder).files] if is_bundle(folder) else None
    except ManifestError:
        return ()
    return () if listed is None else (MANIFEST_FILE, SIGNATURE_FILE, *listed)
