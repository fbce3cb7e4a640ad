"""The files of a bundle while it is loaded, and the checks of their digests.

vitdeploy reads the files that it parses (manifest, labels, tokenizer, golden arrays, monitor reference, TensorRT plans)
once: the bytes that it hashes are the bytes that it uses. A runtime opens graphs and weights by path. These are hashed
first, and their metadata is compared again after the engine has answered: a different file, size or modification time
means that another process wrote to the bundle in between, and the engine is refused.

A bundle that is replaced while it is loaded (`publish.replacing`) is refused in the same way, because it mixes old and
new files. The caller then reads it again (`retry_if_replaced`).
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
# Limit for a file that is read into memory. The largest tokenizer that we know has 34 MB.
MAX_READ = 256 << 20
READS = 3


# Distinguishes a file from another one of the same name, and from an earlier version of itself: device, inode, size in
# bytes, and times of modification and change.
_Stamp = tuple[int, int, int, int, int]


class CheckedFiles:
    """The files of the bundle in `folder`.

    `verify` "used" checks the SHA-256 of each file that is read; "all" that of every file in the manifest, at once.
    "none" checks no SHA-256, only that sizes match, that no file is a link and that the folder was not replaced.

    `digest` is the SHA-256 of manifest.json in hex, `place` the identity of the folder it was read from; both come from
    `open_checked`.
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
        """Whether files are checked against the manifest's digests."""
        return self.verify != "none"

    def require(self, names: Iterable[str] | None = None) -> None:
        """Check the files in `names`, or all, each once.

        Raises:
            DigestError: a file is missing, not a regular file, or differs from the manifest's record.
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
                raise other_file(path, entry, "a different SHA-256")
            self._stamps[name] = stamp

    def read(self, name: str, most: int = MAX_READ) -> bytes:
        """Return the bytes of a listed file after checking them against the manifest.

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
            raise other_file(path, entry, "a different number of bytes")
        if self.hashed and hashlib.sha256(data).hexdigest() != entry.sha256:
            raise other_file(path, entry, "a different SHA-256")
        return data

    def require_unchanged(self, names: Iterable[str]) -> None:
        """Check that these files were neither written to nor replaced since `require` hashed them; for a bundle whose
        files are not hashed, check that it is still the same folder.

        Raises:
            DigestError: a file or the folder changed.
        """
        if not self.hashed and _place(self.folder) != self._place:
            raise _changed(self.folder, "the folder was replaced after its manifest was read")
        for name in names:
            path = self.folder / name
            try:
                stamp = _stamp(path.lstat())
            except OSError:
                stamp = None
            if name in self._stamps and stamp != self._stamps[name]:
                raise _changed(path, "the file, its size or its modification time changed after the SHA-256 check")


def retry_if_replaced(folder: Path, read: Callable[[], T]) -> T:
    """Return the result of `read` for the bundle in `folder`. If `read` fails and the folder was replaced meanwhile,
    read it again.

    Raises:
        The error of `read`, if the folder was not replaced or after READS attempts.
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
    """Return the files of a bundle after reading and checking its manifest.

    Args:
        expect_digest: the SHA-256 of its manifest.json, "sha256:HEX" or "HEX"; it covers all other digests.
        trust: the file of a public key or certificate (PEM): the bundle must be signed by it, and its manifest must be
            the signed one.

    Raises:
        MissingFileError, ManifestError: not a bundle.
        DigestError: not the expected manifest; with "all", a file that differs from the manifest's record.
        SignatureError: not signed by `trust`.
        InputError: an unknown `verify`, or not a SHA-256.
    """
    if verify not in typing.get_args(Verify):
        raise InputError(
            'verify must be "used", "all" or "none"',
            found=repr(verify)[:80],
            expected='"used" (check each file that is read), "all" (check every file of the bundle) or "none"',
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
            found=f"sha256 {found[:16]}..., which is not in the signature",
            expected="the manifest that was signed",
            fix="load it again",
        )
    if verify == "all":
        files.require()
    return files


def _stamp(facts: os.stat_result) -> _Stamp:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _place(folder: Path) -> tuple[int, int] | None:
    """Return the identity of the folder at this path now; None without a folder."""
    return identity(folder) if is_dir(folder) else None


def _changed(path: Path, found: str) -> DigestError:
    return DigestError(
        f"{path} changed while it was loaded",
        found=found,
        expected="a bundle that does not change while it is loaded",
        fix="load it again; to replace a bundle safely, rename the new folder over the old one",
    )
