"""Read a packed bundle, wherever it comes from: only the very bytes that `bundle pack` writes are one.

The file is read once, from its first byte to its last. `manifest.json` comes first and lists the other files, so the
reader knows every name and size that must follow; it looks nothing up in the archive and skips nothing. What stands
between the contents is made again (`layout`) and compared. So a path that leads out of the folder, a link, a name that
comes twice, a compressed or encrypted file, a second directory or bytes that belong to nothing are all one case: not
the file that would have been written. As nothing is compressed, nothing can be larger than the file that holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitdeploy.bundle.digests import check_digest
from vitdeploy.bundle.layout import Member, begins_with, directory, local_header, read_local_header
from vitdeploy.bundle.read import MANIFEST_FILE, MAX_MANIFEST_BYTES, other_file, parse_manifest
from vitdeploy.bundle.sign import SIGNATURE_FILE
from vitdeploy.errors import ArchiveError, ManifestError, MissingFileError
from vitdeploy.spec import FileEntry, Manifest

MAX_SIGNATURE_BYTES = 16 * 1024 * 1024
BLOCK = 1 << 20

Progress = Callable[[str, int, int], None]  # what is done, bytes so far, bytes in all


def silent(text: str, done: int, total: int) -> None:
    """No progress."""


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
            f"{file} is not a packed bundle", found=found, wanted="a file of `vitdeploy bundle pack`"
        )
    with file.open("rb") as raw:
        reader = _Reader(file, raw, folder, progress)
        manifest, digest = reader.manifest()
        entries = packed_order(manifest, file / MANIFEST_FILE)
        signed = reader.at(SIGNATURE_FILE)
        if signed:
            reader.member(SIGNATURE_FILE, limit=MAX_SIGNATURE_BYTES)
        reader.check_size(entries)
        for entry in entries:
            if reader.member(entry.path, entry.bytes) != entry.sha256:
                raise other_file(file / entry.path, entry, "another SHA-256")
        reader.end()
    packed = Packed(reader.offset, reader.digest.hexdigest(), digest, signed, manifest)
    if expect is not None:
        check_digest(file, packed.sha256, expect, "file")
    return packed


def packed_order(manifest: Manifest, path: Path) -> list[FileEntry]:
    """The listed files in the order in which they are packed; `path` is what errors call the manifest.

    Raises:
        ManifestError: two names cannot be told apart where case is not looked at, or one is a folder of the other.
    """
    seen: dict[str, tuple[str, bool, str]] = {}
    for name in (MANIFEST_FILE, SIGNATURE_FILE, *(entry.path for entry in manifest.files)):
        segments = name.split("/")
        for depth in range(1, len(segments) + 1):
            place, is_file = "/".join(segments[:depth]), depth == len(segments)
            first = seen.setdefault(place.lower(), (place, is_file, name))
            if first[:2] != (place, is_file) or (is_file and first[2] is not name):
                raise ManifestError(
                    f"{path} lists names that cannot lie in one folder everywhere",
                    found=f"{first[2]} and {name}",
                    wanted="names that differ in more than case, none of them a folder of another",
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
        self.members: list[Member] = []

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
        return begins_with(data, name)

    def member(
        self, name: str, size: int | None = None, limit: int = 0, keep: Callable[[bytes], object] = lambda block: None
    ) -> str:
        """Read, check and write the next file, of `size` bytes, or as many as its header says, at most `limit`. Its
        SHA-256."""
        header = self.read(len(local_header(Member(name, size or 0))))
        member, difference = read_local_header(header, name, size, self.offset - len(header))
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
            members.append(Member(entry.path, entry.bytes, 0, offset))
            offset += len(local_header(members[-1])) + entry.bytes
        wanted = offset + len(directory(members))
        if self.size != wanted:
            what = "cut short" if self.size < wanted else "followed by other bytes"
            raise self.refusal(f"{self.size:,} bytes: {what}", f"{wanted:,} bytes, by its manifest")

    def end(self) -> None:
        wanted = directory(self.members)
        start = self.offset
        found = self.read(len(wanted))
        if found != wanted:
            place = next(i for i, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
            raise self.refusal(f"byte {start + place:,} of its directory is not what the files before it give")

    def read(self, count: int) -> bytes:
        data = self.raw.read(count)
        if len(data) != count:
            raise self.refusal(f"it ends at byte {self.offset + len(data):,}")
        self.offset += count
        self.digest.update(data)
        return data

    def refusal(self, found: str, wanted: str = "byte for byte a file of `vitdeploy bundle pack`") -> ArchiveError:
        fix = "get it again from whoever packed it"
        return ArchiveError(f"{self.file} is not an intact packed bundle", found=found, wanted=wanted, fix=fix)
