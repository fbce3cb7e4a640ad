"""A bundle as one file: packed, unpacked and checked, each as a document and its lines for people."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitdeploy.api.tables import human_bytes
from vitdeploy.progress import Progress

if TYPE_CHECKING:
    from vitdeploy.bundle.archive import Packed

Told = tuple[dict[str, Any], list[str]]


def pack(bundle: Path, output: Path, progress: Progress) -> Told:
    """Make one file of a bundle's folder; a packed bundle that is there is replaced.

    Raises:
        OutputError: the file would lie in the bundle, or another file is there. Errors of `pack_bundle` propagate.
    """
    from vitdeploy.bundle.pack import pack_bundle, unlisted_files
    from vitdeploy.bundle.read import is_packed
    from vitdeploy.errors import OutputError
    from vitdeploy.publish import replacing_file

    if bundle.resolve() in output.resolve().parents:
        raise OutputError(f"{output} would lie in the bundle that it is made of", fix="choose another -o")
    with replacing_file(output, is_packed) as file:
        packed = pack_bundle(bundle, file, _megabytes(progress))
    left_out = unlisted_files(bundle, packed.manifest)
    lines = [*_lines(output, packed), *_told("left out, as the manifest does not list them", left_out)]
    return {**_document(output, packed), "left_out": left_out}, lines


def unpack(file: Path, output: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Make the folder of a packed bundle; arguments and errors as `bundle.unpack.unpack`."""
    from vitdeploy.bundle.unpack import unpack as unpack_file

    packed = unpack_file(file, output, expect_digest=expect, trust=trust, progress=_megabytes(progress))
    document = {**_document(file, packed), "folder": str(output), "signed_by": str(trust) if trust else None}
    return document, [*_lines(file, packed), _signature(packed.signed, trust)]


def check(bundle: Path, expect: str | None, trust: Path | None, progress: Progress) -> Told:
    """Check that a bundle, folder or packed, is unchanged: every digest; with `expect` also its own SHA-256 in hex, and
    with `trust` who signed it. Errors of `read_packed`, `verify_files` and `signed_by` propagate."""
    document, lines = (_verify_file if bundle.is_file() else _verify_folder)(bundle, expect, trust, progress)
    return {**document, "signed_by": str(trust) if trust else None}, lines


def _verify_file(
    file: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.archive import read_packed
    from vitdeploy.bundle.sign import signed_by
    from vitdeploy.publish import storage_errors

    if trust is None:
        packed = read_packed(file, None, expect, _megabytes(progress))
    else:  # OpenSSF's library checks a folder
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as private, storage_errors(Path(private)):
            packed = read_packed(file, Path(private), expect, _megabytes(progress))
            signed_by(Path(private), trust, called=file)
    return _document(file, packed), [*_lines(file, packed), _signature(packed.signed, trust)]


def _verify_folder(
    folder: Path, expect: str | None, trust: Path | None, progress: Progress
) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.checked import open_checked
    from vitdeploy.bundle.pack import unlisted_files
    from vitdeploy.bundle.read import MANIFEST_FILE
    from vitdeploy.bundle.sign import SIGNATURE_FILE, signed_by

    files = open_checked(folder, expect_digest=expect)
    manifest, digest = files.manifest, files.digest
    progress("check", 0, 1)
    files.require()
    signed_by(folder, trust)
    signed, unlisted = (folder / SIGNATURE_FILE).is_file(), unlisted_files(folder, manifest)
    document = {"path": str(folder), "name": manifest.name, "manifest_sha256": digest, "files": len(manifest.files)}
    lines = [
        f"{folder}: bundle {manifest.name}, {_files(len(manifest.files))}, all digests match",
        f"its {MANIFEST_FILE}: sha256:{digest}",
        _signature(signed, trust),
        *_told("not of the bundle, as the manifest does not list them", unlisted),
    ]
    return {**document, "signed": signed, "unlisted": unlisted}, lines


def _megabytes(progress: Progress) -> Progress:
    """Report progress in megabytes: bytes are too small a unit for a bar."""

    def told(text: str, done: int, total: int) -> None:
        progress(f"{text}, MB", done // 1_000_000, total // 1_000_000)

    return told


def _document(file: Path, packed: Packed) -> dict[str, Any]:
    return {
        "path": str(file),
        "name": packed.manifest.name,
        "bytes": packed.bytes,
        "sha256": packed.sha256,
        "manifest_sha256": packed.manifest_sha256,
        "files": len(packed.manifest.files),
        "signed": packed.signed,
    }


def _lines(file: Path, packed: Packed) -> list[str]:
    name, count = packed.manifest.name, _files(len(packed.manifest.files))
    return [
        f"{file}: bundle {name}, {count}, {human_bytes(packed.bytes)}, all digests match",
        f"the file: sha256:{packed.sha256}",
        f"its manifest.json: sha256:{packed.manifest_sha256}",
    ]


def _files(count: int) -> str:
    return f"{count} file" + ("" if count == 1 else "s")


def _told(what: str, names: list[str]) -> list[str]:
    """A line that names files, if there are any."""
    shown = ", ".join(map(ascii, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [f"{what}: {shown}"] if names else []


def _signature(signed: bool, trust: Path | None) -> str:
    if trust is not None:
        return f"signed by {trust}"
    return "signed, by whom was not checked: name a key with --trust" if signed else "not signed"
