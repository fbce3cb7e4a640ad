"""The files of one bundle while it is loaded: which digests are checked, and of which bytes.

What vitdeploy parses by itself (the manifest, labels, a tokenizer, golden arrays, the reference of a monitor, plans of
TensorRT) is read once: the bytes that were hashed are those that are used. A runtime opens its graphs and weights by
itself, by their names. These are hashed before, and looked at again once the engine has answered: another file, size or
time of change than that of the descriptor that was hashed means that somebody wrote to the bundle in between, and the
engine is refused.

A bundle that is replaced while it is loaded (`publish.replacing`) is refused in the same way, as some files are of the
old one and some of the new. Whoever loads one reads it again then (`retry_if_replaced`).
"""

import hashlib
import os
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, TypeVar

from vitdeploy.bundle import layout, sign
from vitdeploy.bundle.read import MANIFEST_FILE, manifest_bytes, other_file, parse_manifest, regular_file, too_large
from vitdeploy.errors import DigestError, InputError, SignatureError, VitdeployError
from vitdeploy.paths import is_dir
from vitdeploy.publish import identity
from vitdeploy.spec import Manifest

T = TypeVar("T")
Verify = Literal["all", "used", "none"]
BLOCK = 1 << 20
# Of a file that is read into memory. The largest tokenizer known to us has 34 MB.
MAX_READ = 256 << 20
READS = 3


# What tells a file from another one of the same name, and from itself once it was written to: device, inode, bytes, and
# when it was modified and changed.
_Stamp = tuple[int, int, int, int, int]


class CheckedFiles:
    """The files of the bundle in `folder`.

    `verify` "used": the SHA-256 of each file that is read. "all": of every file of the manifest, at once. "none": of no
    file; sizes are checked, that no file is a link, and that no other folder has taken the bundle's place.

    `digest` is the SHA-256 of manifest.json in hex, `place` the folder that it was read in, both of `open_checked`.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        verify: Verify = "used",
        *,
        digest: str = "",
        place: tuple[int, int] | None = None,
    ) -> None:
        self.folder, self.manifest, self.verify, self.digest = folder, manifest, verify, digest
        self._place = place
        self._entries = {entry.path: entry for entry in manifest.files}
        self._stamps: dict[str, _Stamp] = {}

    @property
    def hashed(self) -> bool:
        """Whether what is read is what the manifest's digests are of."""
        return self.verify != "none"

    def require(self, names: Iterable[str] | None = None) -> None:
        """Check the files in `names`, or all, each once.

        Raises:
            DigestError: a file is missing, is no regular file, or differs from what the manifest records.
        """
        for name in self._entries if names is None else names:
            entry = self._entries[name]
            path = regular_file(self.folder, entry)
            if not self.hashed or name in self._stamps:
                continue
            digest = hashlib.sha256()
            with path.open("rb") as file:
                stamp = _stamp(os.fstat(file.fileno()))
                while block := file.read(BLOCK):
                    digest.update(block)
            if digest.hexdigest() != entry.sha256:
                raise other_file(path, entry, "another SHA-256")
            self._stamps[name] = stamp

    def read(self, name: str, most: int = MAX_READ) -> bytes:
        """The bytes of a listed file, once they are found to be the recorded ones.

        Raises:
            DigestError: as `require`. ManifestError: more than `most` bytes.
        """
        entry = self._entries[name]
        if entry.bytes > most:
            raise too_large(self.folder / name, entry.bytes, most)
        path = regular_file(self.folder, entry)
        with path.open("rb") as file:
            data = file.read(entry.bytes + 1)
        if len(data) != entry.bytes:
            raise other_file(path, entry, "another number of bytes")
        if self.hashed and hashlib.sha256(data).hexdigest() != entry.sha256:
            raise other_file(path, entry, "another SHA-256")
        return data

    def require_unchanged(self, names: Iterable[str]) -> None:
        """Check that nobody wrote to these files, or put others in their places, since `require` hashed them; of a
        bundle whose files are not hashed, that it is the same folder.

        Raises:
            DigestError: somebody did.
        """
        if not self.hashed and _place(self.folder) != self._place:
            raise _changed(self.folder, "another folder than the manifest was read in")
        for name in names:
            path = self.folder / name
            try:
                found = _stamp(path.lstat())
            except OSError:
                found = None
            if name in self._stamps and found != self._stamps[name]:
                raise _changed(path, "another file, size or time of change than when its SHA-256 was checked")


def retry_if_replaced(folder: Path, read: Callable[[], T]) -> T:
    """What `read` makes of the bundle in `folder`. Where that fails, and another folder has got the name meanwhile, it
    is read again.

    Raises:
        What `read` raises, of a bundle that stays or at the last time of READS.
    """
    for _ in range(READS - 1):
        before = _place(folder)
        try:
            return read()
        except (VitdeployError, OSError):
            if _place(folder) == before:
                raise
    return read()


def open_checked(
    folder: Path, verify: Verify = "used", expect_digest: str | None = None, trust: Path | None = None
) -> CheckedFiles:
    """The files of a bundle, its manifest read and checked.

    Args:
        expect_digest: the SHA-256 of its manifest.json, "sha256:HEX" or "HEX", which no other digest is above.
        trust: the file of a public key or certificate (PEM): the bundle must be signed by it, and its manifest be the
            one that was signed.

    Raises:
        MissingFileError, ManifestError: no bundle.
        DigestError: another manifest than the expected one; with "all", a file that is not the recorded one.
        SignatureError: not signed by `trust`.
        InputError: no such `verify`, or no SHA-256.
    """
    if verify not in typing.get_args(Verify):
        raise InputError(
            "verify says whose digests are checked",
            found=repr(verify)[:80],
            expected='"used": of each file that is read; "all": of every file of the bundle; "none"',
        )
    expected = None if expect_digest is None else layout.digest_hex(expect_digest)
    place = _place(folder)
    text = manifest_bytes(folder)
    found = hashlib.sha256(text).hexdigest()
    if expected is not None:
        layout.check_digest(folder, found, expected, MANIFEST_FILE)
    files = CheckedFiles(folder, parse_manifest(text, folder / MANIFEST_FILE), verify, digest=found, place=place)
    if trust is not None and found not in sign.signed_digests(folder, trust):
        raise SignatureError(
            f"{folder / MANIFEST_FILE} changed while the bundle was loaded",
            found=f"sha256 {found[:16]}..., which the signature does not have",
            expected="the manifest that was signed",
            fix="load it again",
        )
    if verify == "all":
        files.require()
    return files


def _stamp(facts: os.stat_result) -> _Stamp:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _place(folder: Path) -> tuple[int, int] | None:
    """Which folder has the name now; None if there is none, or can be none."""
    return identity(folder) if is_dir(folder) else None


def _changed(path: Path, found: str) -> DigestError:
    return DigestError(
        f"{path} changed while it was loaded",
        found=found,
        expected="a bundle that nobody writes to while it is loaded",
        fix="load it again; a new bundle is best put in the place of an old one by renaming its folder",
    )
