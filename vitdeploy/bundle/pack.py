"""A bundle as one file."""

import contextlib
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitdeploy.bundle import layout, sign
from vitdeploy.bundle.read import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    file_sha256,
    is_bundle,
    other_file,
    parse_manifest,
    read_bundle,
    regular_file,
)
from vitdeploy.errors import ArchiveError, ManifestError, MissingFileError, SignatureError, quoted
from vitdeploy.progress import Progress, silent
from vitdeploy.publish import replacing
from vitdeploy.spec import FileEntry, Manifest

# --- Read a packed bundle, wherever it comes from: only the very bytes that `bundle pack` writes are one --------------
# The file is read once, from its first byte to its last. `manifest.json` comes first and lists the other files, so the
# reader knows every name and size that must follow; it looks nothing up in the archive and skips nothing. What stands
# between the contents is made again (`layout`) and compared. So a path that leads out of the folder, a link, a name
# that comes twice, a compressed or encrypted file, a second directory or bytes that belong to nothing are all one case:
# not the file that would have been written. As nothing is compressed, nothing can be larger than the file that holds
# it.


MAX_SIGNATURE_BYTES = 16 * 1024 * 1024
BLOCK = 1 << 20


@dataclass(frozen=True)
class Packed:
    """A packed bundle: its size in bytes, the SHA-256 of the whole file and of its manifest (hex), what it holds."""

    bytes: int
    sha256: str
    manifest_sha256: str
    signed: bool
    manifest: Manifest


def read_packed(
    file: Path, folder: Path | None = None, expect: str | None = None, progress: Progress = silent
) -> Packed:
    """Read a packed bundle to its end, and write its files into `folder` unless that is None.

    Nothing is to be used before this returns: the folder is new and empty, and published by the caller.

    Args:
        expect: the SHA-256 of the file, hex, from whoever packed it.

    Raises:
        MissingFileError: no such file.
        ArchiveError: not a packed bundle, or not byte for byte as one is written.
        ManifestError: its manifest breaks a rule.
        DigestError: a file in it is not as the manifest records, or the whole is not the expected one.
    """
    if not file.is_file():
        found = "a folder" if file.is_dir() else "no such file"
        raise MissingFileError(
            f"{file} is not a packed bundle", found=found, expected="a file of `vitdeploy bundle pack`"
        )
    with file.open("rb") as raw:
        reader = _Reader(file, raw, folder, progress)
        manifest, digest = reader.manifest()
        entries = packed_order(manifest, file / MANIFEST_FILE)
        signed = reader.at(sign.SIGNATURE_FILE)
        if signed:
            reader.member(sign.SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES)
        reader.check_size(entries)
        for entry in entries:
            if reader.member(entry.path, entry.bytes) != entry.sha256:
                raise other_file(file / entry.path, entry, "another SHA-256")
        reader.end()
    packed = Packed(reader.offset, reader.digest.hexdigest(), digest, signed, manifest)
    if expect is not None:
        layout.check_digest(file, packed.sha256, expect, "file")
    return packed


def packed_order(manifest: Manifest, path: Path) -> list[FileEntry]:
    """The listed files in the order in which they are packed; `path` is what errors call the manifest.

    Raises:
        ManifestError: two names cannot be told apart where case is not looked at, or one is a folder of the other.
    """
    seen: dict[str, tuple[str, bool, str]] = {}
    for name in (MANIFEST_FILE, sign.SIGNATURE_FILE, *(entry.path for entry in manifest.files)):
        segments = name.split("/")
        for depth in range(1, len(segments) + 1):
            place, is_file = "/".join(segments[:depth]), depth == len(segments)
            first = seen.setdefault(place.lower(), (place, is_file, name))
            if first[:2] != (place, is_file) or (is_file and first[2] is not name):
                raise ManifestError(
                    f"{path} lists names that cannot lie in one folder everywhere",
                    found=f"{first[2]} and {name}",
                    expected="names that differ in more than case, none of them a folder of another",
                )
    return sorted(manifest.files, key=lambda entry: entry.path)


class _Reader:
    """Goes through the file once; `offset` is the byte that it has come to, `digest` the SHA-256 of all before it."""

    def __init__(self, file: Path, raw: BinaryIO, folder: Path | None, progress: Progress) -> None:
        self.file, self.raw, self.folder, self.progress = file, raw, folder, progress
        self.verb = "check" if folder is None else "unpack"
        self.size = file.stat().st_size
        self.offset = 0
        self.digest = hashlib.sha256()
        self.members: list[layout.PackedMember] = []

    def manifest(self) -> tuple[Manifest, str]:
        """The first file, and its SHA-256."""
        if not self.at(MANIFEST_FILE):
            raise self.refusal(f"it does not begin with {MANIFEST_FILE}, stored")
        kept: list[bytes] = []
        digest = self.member(MANIFEST_FILE, limit=MAX_MANIFEST_BYTES, keep=kept.append)
        return parse_manifest(b"".join(kept), self.file / MANIFEST_FILE), digest

    def at(self, name: str) -> bool:
        """Whether a file with this name comes next."""
        data = self.raw.read(64)
        self.raw.seek(self.offset)
        return layout.begins_with(data, name)

    def member(
        self, name: str, size: int | None = None, limit: int = 0, keep: Callable[[bytes], object] = lambda block: None
    ) -> str:
        """Read, check and write the next file, of `size` bytes, or as many as its header says, at most `limit`. Its
        SHA-256."""
        header = self.read(len(layout.local_header(layout.PackedMember(name, size or 0))))
        member, difference = layout.read_local_header(header, name, size, self.offset - len(header))
        if difference:
            raise self.refusal(f"{name} at byte {member.offset:,} has {difference}")
        if size is None and member.bytes > limit:
            raise self.refusal(f"{name} has {member.bytes:,} bytes, more than {limit:,}")
        crc, digest, left = 0, hashlib.sha256(), member.bytes
        path = self.folder / name if self.folder is not None else None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") if path is not None else contextlib.nullcontext() as out:
            while left:
                block = self.read(min(left, BLOCK))
                left -= len(block)
                crc = zlib.crc32(block, crc)
                digest.update(block)
                keep(block)
                if out is not None:
                    out.write(block)
                self.progress(self.verb, self.offset, self.size)
        if crc != member.crc:
            raise self.refusal(f"{name} at byte {member.offset:,} has another CRC-32 than its header says")
        self.members.append(member)
        return digest.hexdigest()

    def check_size(self, entries: list[FileEntry]) -> None:
        """Check early that the file is as long as its contents require."""
        members, offset = list(self.members), self.offset
        for entry in entries:
            members.append(layout.PackedMember(entry.path, entry.bytes, 0, offset))
            offset += len(layout.local_header(members[-1])) + entry.bytes
        expected = offset + len(layout.directory(members))
        if self.size != expected:
            what = "cut short" if self.size < expected else "followed by other bytes"
            raise self.refusal(f"{self.size:,} bytes: {what}", f"{expected:,} bytes, by its manifest")

    def end(self) -> None:
        expected = layout.directory(self.members)
        start = self.offset
        found = self.read(len(expected))
        if found != expected:
            place = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
            raise self.refusal(f"byte {start + place:,} of its directory is not what the files before it give")

    def read(self, count: int) -> bytes:
        data = self.raw.read(count)
        if len(data) != count:
            raise self.refusal(f"it ends at byte {self.offset + len(data):,}")
        self.offset += count
        self.digest.update(data)
        return data

    def refusal(self, found: str, expected: str = "byte for byte a file of `vitdeploy bundle pack`") -> ArchiveError:
        fix = "get it again from whoever packed it"
        return ArchiveError(f"{self.file} is not an intact packed bundle", found=found, expected=expected, fix=fix)


# --- Pack a bundle folder into one file, the same bytes wherever it is done (`layout`) --------------------------------


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
    if (folder / sign.SIGNATURE_FILE).exists():
        _check_signature(folder, manifest, before[0])
        before.append(_entry_of(folder, sign.SIGNATURE_FILE))
    entries = [*before, *entries]
    total, done = sum(entry.bytes for entry in entries), 0
    members: list[layout.PackedMember] = []
    with file.open("xb") as out:
        for entry in entries:
            members.append(_append(out, folder, entry))
            done += entry.bytes
            progress("pack", done, total)
        out.write(layout.directory(members))
    return read_packed(file, progress=progress)


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """What lies in a bundle's folder, but belongs neither to the bundle nor to its signature: paths, sorted."""
    known = {MANIFEST_FILE, sign.SIGNATURE_FILE, *(entry.path for entry in manifest.files)}
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
        signed = sign.digests_in((folder / sign.SIGNATURE_FILE).read_bytes())
        differing = sorted({name for name, _ in signed.items() ^ packed.items()})
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refusal(folder, f"a signature that cannot be read: {error!r:.200}") from None
    if differing:
        raise _refusal(
            folder, f"{', '.join(map(ascii, differing[:5]))}: changed, added or removed since, or not of the bundle"
        )


def _refusal(folder: Path, found: str) -> SignatureError:
    return SignatureError(
        f"{folder / sign.SIGNATURE_FILE} is not of the files that are packed",
        found=found,
        expected="a signature of manifest.json and the files that it lists, and of no other",
        fix=f"remove files that are not of the bundle, then vitdeploy bundle sign {quoted(folder)} --key KEY.pem",
    )


def _append(out: BinaryIO, folder: Path, entry: FileEntry) -> layout.PackedMember:
    """Write one file with its header, which holds the CRC-32 and so is written again at the end."""
    path, start, crc, digest = regular_file(folder, entry), out.tell(), 0, hashlib.sha256()
    out.write(layout.local_header(layout.PackedMember(entry.path, entry.bytes, 0, start)))
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != entry.sha256:
        raise other_file(path, entry, "another SHA-256")
    member, end = layout.PackedMember(entry.path, entry.bytes, crc, start), out.tell()
    out.seek(start)
    out.write(layout.local_header(member))
    out.seek(end)
    return member


# --- A packed bundle becomes the folder that an app loads: whole and checked, or not at all ---------------------------


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
    expect = None if expect_digest is None else layout.digest_hex(expect_digest)
    with replacing(folder, _own_names(folder)) as work:
        packed = read_packed(file, work, expect, progress)
        sign.signed_by(work, None if trust is None else Path(trust), called=file)
    return packed


def _own_names(folder: Path) -> tuple[str, ...]:
    """The top-level names of a bundle's folder, which another bundle replaces; nothing if it is not a bundle."""
    try:
        listed = [entry.path.partition("/")[0] for entry in read_bundle(folder).files] if is_bundle(folder) else None
    except ManifestError:
        return ()
    return () if listed is None else (MANIFEST_FILE, sign.SIGNATURE_FILE, *listed)
