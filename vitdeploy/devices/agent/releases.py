"""Deployed bundles on a device: complete releases next to each other, and a link to the one that apps load.

    ~/.local/share/vitdeploy/deployed/NAME/
      releases/<SHA-256 of manifest.json>/    one bundle each, published atomically and never changed
      current -> releases/<SHA-256>           the release that apps load; moved atomically
      record.json                             the previous release, the number of moves, a move in progress
      .lock                                   held during changes

A move is recorded on disk before the link is moved, and completed in the record only after the release has given
correct answers through the link. After a power cut, the link therefore points to the old or the new release, and the
record lets the next command point it back. Moves are counted instead of timed: the clock is not used.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark.machine import take_lock
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
    """A move of the link in progress: the release, and the process that moves it."""

    release: str
    process: Process


@dataclass(frozen=True)
class DeploymentRecord:
    """The record of a deployment. `current`: the last confirmed release of the link; `previous`: the one before it; ""
    for none. `counter`: the number of completed moves."""

    format: int = FORMAT
    current: str = ""
    previous: str = ""
    counter: int = 0
    move: Move | None = None


def deployed_home() -> Path:
    return Path("~/.local/share/vitdeploy/deployed").expanduser()


def deployments() -> list[Deployed]:
    """Return the deployments here, sorted by name; moves interrupted by a power cut are undone first."""
    home = deployed_home()
    names = sorted(path.name for path in home.iterdir() if DEPLOYMENT.fullmatch(path.name)) if home.is_dir() else []
    return [DeploymentFolder(name).look() for name in names]


class DeploymentFolder:
    """The folder of a deployment, which need not exist yet; `home`: the folder of all deployments."""

    def __init__(self, name: str, home: Path | None = None) -> None:
        if not DEPLOYMENT.fullmatch(name):
            raise VitdeployError(f"{name[:80]!r} is not a valid deployment name")
        self.name = name
        self.folder = (home or deployed_home()) / name
        self.link, self.releases = self.folder / LINK, self.folder / RELEASES

    def folder_of(self, release: str) -> Path:
        if not RELEASE.fullmatch(release):
            raise VitdeployError(f"{release[:80]!r} is not a valid release")
        return self.releases / release

    def look(self) -> Deployed:
        """Return the state. If no process is changing it, the effects of a power cut are repaired first.

        Raises:
            StorageError: the record or link cannot be read.
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
        """Hold the deployment's lock for the block.

        Raises:
            BlockingIOError: another process holds it, and `wait` is False. StorageError: the disk is full or not
                writable.
        """
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / LOCK_FILE).open("w")
        try:
            try:
                take_lock(lock.fileno(), wait=wait)
            except BlockingIOError:
                raise
            except OSError:  # some file systems have no locks; the recorded process then shows if a move is running
                pass
            yield
        finally:
            with contextlib.suppress(OSError):  # nothing was written to it
                lock.close()

    # --- releases -----------------------------------------------------------------------------------------------------

    def missing(self, entries: Sequence[FileEntry]) -> list[str]:
        """Return the paths of a release's files that no release here has."""
        found = self._found(entries)
        return [entry.path for entry in entries if entry.sha256 not in found]

    def _found(self, entries: Sequence[FileEntry]) -> dict[str, Path]:
        """Return the paths of these files in the releases here, by SHA-256; each was read and verified."""
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
        """Assemble a release from the files in `sent` and from other releases here; return its folder. Requires `held`.

        Raises:
            DigestError: a file is missing or has the wrong SHA-256.
            StorageError: the disk is full or not writable.
        """
        final = self.folder_of(release)
        if is_whole(final, entries):
            return final
        odd = [entry.path for entry in entries if not plain_path(entry.path)]
        if odd:
            raise VitdeployError(f"{odd[0][:120]!r} is not a valid path in a release")
        found = self._found(entries)
        names = tuple({entry.path.split("/")[0] for entry in entries})
        with replacing(final, names) as work:
            for entry in entries:
                arrived, target = sent / entry.path, work / entry.path
                target.parent.mkdir(parents=True, exist_ok=True)
                source = arrived if arrived.is_file() else found.get(entry.sha256)
                if source is None:
                    raise DigestError(f"{entry.path} was not sent", fix="run the command again")
                # Copied, not linked: ONNX refuses weights with several hard links, and a release owns its files.
                shutil.copyfile(source, target)
                verify_file(work, entry)
            _require_release(work, release)
        return final

    def keep(self, *releases: str) -> None:
        """Remove all other releases."""
        for path in self.releases.glob("*"):
            if RELEASE.fullmatch(path.name) and path.name not in releases:
                shutil.rmtree(path, ignore_errors=True)

    # --- the link -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def moved(self, release: str, expected: str, counter: int) -> Iterator[tuple[Path, Path | None]]:
        """Move the link to a release, and keep it there if the block ends without an error; otherwise move it back.
        Yields the link, and the folder of the previous release (None without one).

        The release and the previous one are kept, others removed.

        Raises:
            DeviceError: the link does not point to `expected`, or was not moved `counter` times.
            DigestError, ManifestError: the release is incomplete.
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
        """Return the record if it matches the caller's expectation. Requires `held`.

        Raises:
            DeviceError: it does not match.
        """
        record = self.settled()
        self._require(record, expected, counter)
        return record

    def _require(self, record: DeploymentRecord, expected: str, counter: int) -> None:
        if record.move is not None or (record.current, record.counter) != (expected, counter):
            raise DeviceError(
                f"another process deployed {self.name} on this device meanwhile",
                found=f"release {record.current[:12] or 'none'}, moved {record.counter} times",
                expected=f"release {expected[:12] or 'none'}, moved {counter} times",
                fix="run the command again; `vitdeploy devices status` shows the releases",
            )

    def settled(self) -> DeploymentRecord:
        """Return the record with the link's actual release, after undoing a move whose process is gone. Requires
        `held`."""
        record = self._read()
        if record.move is not None and not record.move.process.alive():
            record = dataclasses.replace(record, move=None)
            self._undo(record)
        pointed = self._pointed()
        if record.move is None and pointed != record.current:  # the link was moved manually
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
        """Return the release that the link points to, "" without a link.

        Raises:
            StorageError: the link was not made by vitdeploy.
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
                found=f"a link to {target}" if self.link.is_symlink() else "a file or folder",
                expected=f"a link into {RELEASES}, or no file",
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
                fix=f"remove it (the link still shows the release): rm {quoted(path)}",
            ) from None
        if record.format != FORMAT:
            raise HostError(f"{path} has an unknown format", found=str(record.format), expected=str(FORMAT))
        return record

    def _write(self, record: DeploymentRecord) -> None:
        with replacing_file(self.folder / RECORD_FILE, lambda path: True) as file:
            file.write_text(json.dumps(encode(record), allow_nan=False) + "\n", encoding="utf-8")


def is_whole(folder: Path, entries: Sequence[FileEntry]) -> bool:
    """Whether a folder contains all these files with the correct digests."""
    try:
        for entry in entries:
            regular_file(folder, entry)  # a quick check first
        for entry in entries:
            verify_file(folder, entry)
    except (DigestError, OSError):
        return False
    return True


def _require_release(folder: Path, release: str) -> None:
    """Raise an error unless a folder is the bundle of this release."""
    read_bundle(folder)
    found = file_sha256(folder / MANIFEST_FILE)
    if found != release:
        raise DigestError(f"{folder} is another release", found=found, expected=release, fix="run the command again")
