"""Pack a bundle folder into one file, the same bytes wherever it is done (`layout`)."""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import BinaryIO

from vitdeploy.bundle.archive import BLOCK, Packed, Progress, packed_order, read_packed, silent
from vitdeploy.bundle.layout import Member, directory, local_header
from vitdeploy.bundle.read import MANIFEST_FILE, file_sha256, other_file, read_bundle, regular_file
from vitdeploy.bundle.sign import SIGNATURE_FILE, digests_in
from vitdeploy.errors import SignatureError, quoted
from vitdeploy.spec import FileEntry, Manifest


def pack_bundle(folder: Path, file: Path, progress: Progress = silent) -> Packed:
    """Write the bundle in `folder` to the new file `file`, and read it back as whoever gets it will.

    In it are `manifest.json`, the signature if there is one, and what the manifest lists; each file is checked against
    its digest while it is copied. The caller gives the file its final name (`publish.replacing_file`).

    Raises:
        MissingFileError, ManifestError, DigestError: no bundle, or not an intact one.
        SignatureError: the signature is of other files.
    """
    manifest = read_bundle(folder)
    entries = packed_order(manifest, folder / MANIFEST_FILE)
    before = [_entry_of(folder, MANIFEST_FILE)]
    if (folder / SIGNATURE_FILE).exists():
        _check_signature(folder, manifest, before[0])
        before.append(_entry_of(folder, SIGNATURE_FILE))
    entries = [*before, *entries]
    total, done = sum(entry.bytes for entry in entries), 0
    members: list[Member] = []
    with file.open("xb") as out:
        for entry in entries:
            members.append(_append(out, folder, entry))
            done += entry.bytes
            progress("pack", done, total)
        out.write(directory(members))
    return read_packed(file, progress=progress)


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """What lies in a bundle's folder, but belongs neither to the bundle nor to its signature: paths, sorted."""
    known = {MANIFEST_FILE, SIGNATURE_FILE, *(entry.path for entry in manifest.files)}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - known)


def _entry_of(folder: Path, name: str) -> FileEntry:
    """A file that the manifest does not list, as it is now."""
    entry = FileEntry(name, (folder / name).stat().st_size, file_sha256(folder / name))
    regular_file(folder, entry)
    return entry


def _check_signature(folder: Path, manifest: Manifest, own: FileEntry) -> None:
    """Whether the signature is of the files that are packed: one of others is no use to whoever unpacks them.

    Who signed is not asked here.
    """
    packed = {entry.path: entry.sha256 for entry in (own, *manifest.files)}
    try:
        signed = digests_in((folder / SIGNATURE_FILE).read_bytes())
        differing = sorted({name for name, _ in signed.items() ^ packed.items()})
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refusal(folder, f"a signature that cannot be read: {error!r:.200}") from None
    if differing:
        raise _refusal(
            folder, f"{', '.join(map(ascii, differing[:5]))}: changed, added or removed since, or not of the bundle"
        )


def _refusal(folder: Path, found: str) -> SignatureError:
    return SignatureError(
        f"{folder / SIGNATURE_FILE} is not of the files that are packed",
        found=found,
        wanted="a signature of manifest.json and the files that it lists, and of no other",
        fix=f"remove files that are not of the bundle, then vitdeploy bundle sign {quoted(folder)} --key KEY.pem",
    )


def _append(out: BinaryIO, folder: Path, entry: FileEntry) -> Member:
    """Write one file with its header, which holds the CRC-32 and so is written again at the end."""
    path, start, crc, digest = regular_file(folder, entry), out.tell(), 0, hashlib.sha256()
    out.write(local_header(Member(entry.path, entry.bytes, 0, start)))
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != entry.sha256:
        raise other_file(path, entry, "another SHA-256")
    member, end = Member(entry.path, entry.bytes, crc, start), out.tell()
    out.seek(start)
    out.write(local_header(member))
    out.seek(end)
    return member
