"""Pack a bundle into one file, and unpack it."""

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

# --- Read a packed bundle from any source: only the exact bytes that `bundle pack` writes are accepted ----------------
# The file is read once, from its first byte to its last. `manifest.json` comes first and lists the other files, so the
# reader knows every name and size that must follow; it looks nothing up in the archive and skips nothing. The bytes
# between the contents are generated again (`layout`) and compared. So a path outside the folder, a link, a duplicate
# name, a compressed or encrypted file, a second directory and stray bytes are all one case: not the file that would
# have been written. Nothing is compressed, so no content can be larger than the archive.


MAX_SIGNATURE_BYTES = 16 * 1024 * 1024
BLOCK = 1 << 20


@dataclass(frozen=True)
class Packed:
    """A packed bundle: its size in `bytes`, the SHA-256 (hex) of the whole file, `sha256`, and of its manifest,
    `manifest_sha256`; its manifest, and whether it is `signed`."""

    bytes: int
    sha256: str
    manifest_sha256: str
    signed: bool
    manifest: Manifest


def read_packed(
    file: Path, folder: Path | None = None, expect: str | None = None, progress: Progress = silent
) -> Packed:
    """Read a packed bundle to its end, and write its files into `folder` unless that is None.

    Use none of the files before this returns. `folder` is new and empty; the caller publishes it.

    Args:
        expect: the SHA-256 of the file, hex, as its publisher gives it.

    Raises:
        MissingFileError: the file does not exist.
        ArchiveError: not byte for byte a file that `bundle pack` writes.
        ManifestError: its manifest breaks a rule.
        DigestError: a file in it differs from the manifest's record, or the archive is not the expected one.
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
                raise other_file(file / entry.path, entry, "a different SHA-256")
        reader.end()
    packed = Packed(reader.offset, reader.digest.hexdigest(), digest, signed, manifest)
    if expect is not None:
        layout.check_digest(file, packed.sha256, expect, "file")
    return packed


def packed_order(manifest: Manifest, path: Path) -> list[FileEntry]:
    """Return the listed files in packing order; `path` names the manifest in errors.

    Raises:
        ManifestError: two names differ only in case, or one is a folder of the other.
    """
    seen: dict[str, tuple[str, bool, str]] = {}
    for name in (MANIFEST_FILE, sign.SIGNATURE_FILE, *(entry.path for entry in manifest.files)):
        segments = name.split("/")
        for depth in range(1, len(segments) + 1):
            place, is_file = "/".join(segments[:depth]), depth == len(segments)
            first = seen.setdefault(place.lower(), (place, is_file, name))
            if first[:2] != (place, is_file) or (is_file and first[2] is not name):
                raise ManifestError(
                    f"{path} lists names that clash on some file systems",
                    found=f"{first[2]} and {name}",
                    expected="names that differ in more than case, none of them a folder of another",
                )
    return sorted(manifest.files, key=lambda entry: entry.path)


class _Reader:
    """Reads the file once; `offset` is the current position in bytes, `digest` the SHA-256 of everything before it."""

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
            raise self.refusal(f"it does not begin with an uncompressed {MANIFEST_FILE}")
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
        """Read, check and write the next file and return its SHA-256. Its size is `size` bytes, or what its header
        says, at most `limit`."""
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
            raise self.refusal(f"{name} at byte {member.offset:,} does not match the CRC-32 in its header")
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
            what = "truncated" if self.size < expected else "trailing data"
            raise self.refusal(f"{self.size:,} bytes: {what}", f"{expected:,} bytes according to its manifest")

    def end(self) -> None:
        expected = layout.directory(self.members)
        start = self.offset
        found = self.read(len(expected))
        if found != expected:
            place = next(i for i, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)
            raise self.refusal(f"byte {start + place:,} (in its directory) does not match the files")

    def read(self, count: int) -> bytes:
        data = self.raw.read(count)
        if len(data) != count:
            raise self.refusal(f"it ends at byte {self.offset + len(data):,}")
        self.offset += count
        self.digest.update(data)
        return data

    def refusal(self, found: str, expected: str = "byte for byte a file of `vitdeploy bundle pack`") -> ArchiveError:
        fix = "download or copy it again"
        return ArchiveError(f"{self.file} is not an intact packed bundle", found=found, expected=expected, fix=fix)


# --- Pack a bundle folder into one file, with the same bytes on every machine (`layout`) ------------------------------


def pack_bundle(folder: Path, file: Path, progress: Progress = silent) -> Packed:
    """Write the bundle in `folder` to the new file `file`, and read it back as a recipient would.

    The file holds `manifest.json`, the signature if there is one, and the files that the manifest lists; each is
    checked against its digest while it is copied. The caller gives the file its final name (`publish.replacing_file`).

    Raises:
        MissingFileError, ManifestError, DigestError: not a bundle, or not an intact one.
        SignatureError: the signature does not match the files.
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
    """Return the sorted paths of files in a bundle's folder that are neither listed in the manifest nor the
    signature."""
    known = {MANIFEST_FILE, sign.SIGNATURE_FILE, *(entry.path for entry in manifest.files)}
    found = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted({path.relative_to(folder).as_posix() for path in found} - known)


def _entry_of(folder: Path, name: str) -> FileEntry:
    """The entry of a file that the manifest does not list."""
    entry = FileEntry(name, (folder / name).stat().st_size, file_sha256(folder / name))
    regular_file(folder, entry)
    return entry


def _check_signature(folder: Path, manifest: Manifest, own: FileEntry) -> None:
    """Raise SignatureError unless the signature covers exactly the packed files. The signer is not checked here."""
    packed = {entry.path: entry.sha256 for entry in (own, *manifest.files)}
    try:
        signed = sign.digests_in((folder / sign.SIGNATURE_FILE).read_bytes())
        differing = sorted({name for name, _ in signed.items() ^ packed.items()})
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _refusal(folder, f"an unreadable signature: {error!r:.200}") from None
    if differing:
        raise _refusal(folder, f"{', '.join(map(ascii, differing[:5]))}: changed, added or removed after signing")


def _refusal(folder: Path, found: str) -> SignatureError:
    return SignatureError(
        f"{folder / sign.SIGNATURE_FILE} does not match the bundle's files",
        found=found,
        expected="a signature of manifest.json and exactly the files that it lists",
        fix=f"remove files that the manifest does not list, then vitdeploy bundle sign {quoted(folder)} --key KEY.pem",
    )


def _append(out: BinaryIO, folder: Path, entry: FileEntry) -> layout.PackedMember:
    """Write one file after its header; the header holds the CRC-32, so it is written again at the end."""
    path, start, crc, digest = regular_file(folder, entry), out.tell(), 0, hashlib.sha256()
    out.write(layout.local_header(layout.PackedMember(entry.path, entry.bytes, 0, start)))
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            crc = zlib.crc32(block, crc)
            digest.update(block)
            out.write(block)
    if digest.hexdigest() != entry.sha256:
        raise other_file(path, entry, "a different SHA-256")
    member, end = layout.PackedMember(entry.path, entry.bytes, crc, start), out.tell()
    out.seek(start)
    out.write(layout.local_header(member))
    out.seek(end)
    return member


# --- Unpack a bundle into the folder that an app loads: complete and checked, or not at all ---------------------------


def unpack(
    file: str | Path,
    folder: str | Path,
    *,
    expect_digest: str | None = None,
    trust: str | Path | None = None,
    progress: Progress = silent,
) -> Packed:
    """Unpack a bundle file into a folder for `load(folder)`, as `vitdeploy bundle unpack` does.

    Every byte and every digest is checked before the folder appears. An existing bundle at `folder` is replaced;
    anything else raises OutputError. Missing parent folders are created.

    Args:
        expect_digest: the SHA-256 of the file, "sha256:HEX" or "HEX", as its publisher gives it; another file is
        refused.
        trust: the file of a public key or certificate (PEM): the bundle must be signed by it (`bundle.sign.signed_by`).
        progress: called with the name of the step, the bytes done and the total bytes.

    Raises:
        MissingFileError: the bundle file or the `trust` file does not exist.
        ArchiveError, ManifestError, DigestError: not an intact packed bundle, or not the expected one.
        SignatureError: not signed by `trust`.
        OutputError: `folder` holds something other than a bundle.
        InputError: `expect_digest` is not a SHA-256, or `trust` is not a key or certificate.
        HostError: a full or read-only disk; with `trust`, model-signing is not installed.
    """
    file, folder = Path(file), Path(folder)
    expect = None if expect_digest is None else layout.digest_hex(expect_digest)
    with replacing(folder, _own_names(folder)) as work:
        packed = read_packed(file, work, expect, progress)
        sign.signed_by(work, None if trust is None else Path(trust), called=file)
    return packed


def _own_names(folder: Path) -> tuple[str, ...]:
    """The top-level names in a bundle's folder, which an unpacked bundle may replace; () if it is not a bundle."""
    try:
        listed = [entry.path.partition("/")[0] for entry in read_bundle(folder).files] if is_bundle(folder) else None
    except ManifestError:
        return ()
    return () if listed is None else (MANIFEST_FILE, sign.SIGNATURE_FILE, *listed)
