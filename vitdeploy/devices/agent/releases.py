"""Deployed bundles on a device: whole releases beside each other, and a link to the one that apps load.

    ~/.local/share/vitdeploy/deployed/NAME/
      releases/<SHA-256 of manifest.json>/    a bundle each, which appears whole or not at all, and is never changed
      current -> releases/<SHA-256>           what apps load; moved in one step
      record.json                             what came before, how often the link was moved, a move that is under way
      .lock                                   held by whoever changes any of it

Before the link is moved, the record says so, on disk; it says that all is well only once the release has answered
rightly through the link. What a power cut leaves is therefore a link to the old release or to the new one, and a record
by which the next command here points it back. No time of day is used: moves are counted.
"""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.bundle.read import (
    MANIFEST_FILE,
    file_sha256,
    plain_path,
    read_bundle,
    regular_file,
    verify_file,
    verify_files,
)
from vitdeploy.devices.agent.documents import DEPLOYMENT, RELEASE, Deployed
from vitdeploy.devices.agent.state import Process
from vitdeploy.errors import DeviceError, DigestError, HostError, StorageError, VitdeployError, quoted
from vitdeploy.publish import flush, point, replacing, replacing_file, storage_errors
from vitdeploy.spec import DecodeError, FileEntry, decode, encode

FORMAT = 1
LINK, RELEASES, RECORD_FILE, LOCK_FILE = "current", "releases", "record.json", ".lock"


@dataclass(frozen=True)
class Move:
    """A move of the link to a release that is under way, and the process that makes it."""

    release: str
    process: Process


@dataclass(frozen=True)
class DeploymentRecord:
    """`current`: the release that the link was at when all was well; `previous`: the one before it; "" for none.
    `counter`: how often the link was moved for good."""

    format: int = FORMAT
    current: str = ""
    previous: str = ""
    counter: int = 0
    move: Move | None = None


def deployed_home() -> Path:
    return Path("~/.local/share/vitdeploy/deployed").expanduser()


def deployments() -> list[Deployed]:
    """What is deployed here, by name; a move that a power cut ended is undone first."""
    home = deployed_home()
    names = sorted(path.name for path in home.iterdir() if DEPLOYMENT.fullmatch(path.name)) if home.is_dir() else []
    return [DeploymentFolder(name).look() for name in names]


class DeploymentFolder:
    """One deployment here, by its name, which need not be there yet; `home` has all of them."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        if not DEPLOYMENT.fullmatch(name):
            raise VitdeployError(f"{name[:80]!r} names no deployment")
        self.name = name
        self.folder = (home or deployed_home()) / name
        self.link, self.releases = self.folder / LINK, self.folder / RELEASES

    def folder_of(self, release: str) -> Path:
        if not RELEASE.fullmatch(release):
            raise VitdeployError(f"{release[:80]!r} names no release")
        return self.releases / release

    def look(self) -> Deployed:
        """How it stands. Where nobody works on it, what a power cut left is mended first.

        Raises:
            StorageError: what is there cannot be read.
        """
        if not self.folder.is_dir():
            return Deployed(self.name)
        try:
            with self.held(wait=False):
                record = self.settled()
        except BlockingIOError:
            record = self._read()
        moving = record.move.release if record.move is not None else ""
        return Deployed(self.name, self._pointed(), record.previous, record.counter, moving)

    @contextlib.contextmanager
    def held(self, *, wait: bool = True) -> Iterator[None]:
        """Nobody else changes it in this block.

        Raises:
            BlockingIOError: without `wait`, where somebody does. StorageError: the disk is full or not writable.
        """
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / LOCK_FILE).open("w")
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))  # given back when it is closed
            except BlockingIOError:
                raise
            except OSError:  # not every file system has locks; the move's own process tells whether it goes on
                pass
            yield
        finally:
            with contextlib.suppress(OSError):  # nothing was written to it
                lock.close()

    # --- releases -----------------------------------------------------------------------------------------------------

    def missing(self, entries: Sequence[FileEntry]) -> list[str]:
        """The paths of those files of a release that none of the releases here has."""
        found = self._found(entries)
        return [entry.path for entry in entries if entry.sha256 not in found]

    def _found(self, entries: Sequence[FileEntry]) -> dict[str, Path]:
        """By SHA-256, where such files lie in the releases here. Each was read and has the digest."""
        expected, found = {entry.sha256 for entry in entries}, dict[str, Path]()
        for release in sorted(self.releases.glob("*")):
            if not RELEASE.fullmatch(release.name):
                continue
            try:
                listed = read_bundle(release).files
                listed = (*listed, *(entry for entry in entries if (release / entry.path).is_file()))
            except (VitdeployError, OSError):
                continue
            for entry in listed:
                if entry.sha256 in expected and entry.sha256 not in found:
                    with contextlib.suppress(DigestError, OSError):
                        verify_file(release, entry)
                        found[entry.sha256] = release / entry.path
        return found

    def add(self, release: str, entries: Sequence[FileEntry], sent: Path) -> Path:
        """The folder of a release, whole: made of the files that were `sent`, and of those that other releases here
        have. Hold it first.

        Raises:
            DigestError: a file has another SHA-256, or is nowhere.
            StorageError: the disk is full or not writable.
        """
        final = self.folder_of(release)
        if is_whole(final, entries):
            return final
        odd = [entry.path for entry in entries if not plain_path(entry.path)]
        if odd:
            raise VitdeployError(f"{odd[0][:120]!r} is no path of a release")
        found = self._found(entries)
        names = tuple({entry.path.split("/")[0] for entry in entries})
        with replacing(final, names) as work:
            for entry in entries:
                arrived, target = sent / entry.path, work / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                source = arrived if arrived.is_file() else found.get(entry.sha256)
                if source is None:
                    raise DigestError(f"{entry.path} was not sent", fix="run the command again")
                # Copied, never linked: ONNX refuses weights that have two names, and a release owns its files.
                shutil.copyfile(source, target)
                verify_file(work, entry)
            _require_release(work, release)
        return final

    def keep(self, *releases: str) -> None:
        """Remove all releases but these."""
        for path in self.releases.glob("*"):
            if RELEASE.fullmatch(path.name) and path.name not in releases:
                shutil.rmtree(path, ignore_errors=True)

    # --- the link -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def moved(self, release: str, expected: str, counter: int) -> Iterator[tuple[Path, Path | None]]:
        """Move the link to a release, and keep it there if the block ends without an error; otherwise it points again
        to what it did before. Gives the link, and the folder of the release before, None if there was none.

        The release and the one before are kept, others removed.

        Raises:
            DeviceError: the link is not at `expected`, or was moved another number of times than `counter`.
            DigestError, ManifestError: the release is not whole.
        """
        folder = self.folder_of(release)
        with self.held():
            record = self.standing(expected, counter)
            verify_files(folder, read_bundle(folder))
            _require_release(folder, release)
            self._write(dataclasses.replace(record, move=Move(release, Process.current())))
            try:
                point(self.link, Path(RELEASES) / release)
                yield self.link, self.folder_of(record.current) if record.current else None
            except BaseException:
                self._undo(record)
                raise
            before = record.previous if release == record.current else record.current
            self._write(DeploymentRecord(FORMAT, release, before, record.counter + 1))
            self.keep(release, before)

    def standing(self, expected: str, counter: int) -> DeploymentRecord:
        """The record, if it is as somebody takes it to be. Hold it first.

        Raises:
            DeviceError: it is not.
        """
        record = self.settled()
        self._require(record, expected, counter)
        return record

    def _require(self, record: DeploymentRecord, expected: str, counter: int) -> None:
        if record.move is not None or (record.current, record.counter) != (expected, counter):
            raise DeviceError(
                f"somebody else has deployed {self.name} here meanwhile",
                found=f"release {record.current[:12] or 'none'}, moved {record.counter} times",
                expected=f"release {expected[:12] or 'none'}, moved {counter} times",
                fix="run the command again; `vitdeploy devices status` says what runs where",
            )

    def settled(self) -> DeploymentRecord:
        """The record, once a move whose process is gone was undone, and with the release that the link is really at.
        Hold it first."""
        record = self._read()
        if record.move is not None and not record.move.process.alive():
            record = dataclasses.replace(record, move=None)
            self._undo(record)
        pointed = self._pointed()
        if record.move is None and pointed != record.current:  # somebody moved it by hand
            record = dataclasses.replace(record, current=pointed, previous="")
        return record

    def _undo(self, record: DeploymentRecord) -> None:
        if record.current:
            point(self.link, Path(RELEASES) / record.current)
        else:
            with storage_errors(self.link):
                self.link.unlink(missing_ok=True)
                flush(self.folder)
        self._write(dataclasses.replace(record, move=None))

    def _pointed(self) -> str:
        """The release that the link is at, "" without a link.

        Raises:
            StorageError: it is no link of ours.
        """
        try:
            target = self.link.readlink()
        except FileNotFoundError:
            return ""
        except OSError:
            target = Path()
        if target.parent != Path(RELEASES) or not RELEASE.fullmatch(target.name):
            raise StorageError(
                f"{self.link} is not a link of vitdeploy",
                found=f"a link to {target}" if self.link.is_symlink() else "something that is no link",
                expected=f"a link into {RELEASES}, or nothing",
                fix=f"move it away: mv {quoted(self.link)} {quoted(f'{self.link}.old')}",
            )
        return target.name

    def _read(self) -> DeploymentRecord:
        path = self.folder / RECORD_FILE
        try:
            record = decode(DeploymentRecord, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return DeploymentRecord()
        except (OSError, ValueError, DecodeError) as error:
            raise StorageError(
                f"{path} cannot be read",
                found=str(error)[:200],
                fix=f"remove it: the link says what runs; rm {quoted(path)}",
            ) from None
        if record.format != FORMAT:
            raise HostError(f"{path} is of another version of vitdeploy", found=str(record.format), expected=str(FORMAT))
        return record

    def _write(self, record: DeploymentRecord) -> None:
        with replacing_file(self.folder / RECORD_FILE, lambda path: True) as file:
            file.write_text(json.dumps(encode(record), allow_nan=False) + "\n", encoding="utf-8")


def is_whole(folder: Path, entries: Sequence[FileEntry]) -> bool:
    """Whether a folder has all these files with their digests."""
    try:
        for entry in entries:
            regular_file(folder, entry)  # which is quick, and most that is missing is missing altogether
        for entry in entries:
            verify_file(folder, entry)
    except (DigestError, OSError):
        return False
    return True


def _require_release(folder: Path, release: str) -> None:
    """Raise an error unless a folder is the bundle that has this name."""
    read_bundle(folder)
    found = file_sha256(folder / MANIFEST_FILE)
    if found != release:
        raise DigestError(f"{folder} is another release", found=found, expected=release, fix="run the command again")
