"""What a disk may hold after a crash: the operations of a plan are recorded, and any that a file system could have lost
are left out.

The model is the abstract persistence model of Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014),
section 3: a crash comes after any operation. What was written to a file is there for certain only once that file was
flushed; else it may be absent, cut, or zeros. A name is there for certain only once its folder was flushed; else any
set of operations on names may be there in which each has those that it builds on, of the same name or the same file.
One operation, also one that moves a folder or exchanges two, is there or not.

Operations on names are seen where Python calls the system. What was written, by whatever library, is read from the
files before each of them. Where a symbolic link leads is written with its name, as file systems with a journal do it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

import vitdeploy.publish as publish

Place = tuple[int, str]  # the number of a folder, and a name in it
LINK = b"\0a link to "  # the content of one, with where it leads
Kind = Literal["put", "remove", "move", "exchange", "write", "flush"]
ROOT = 0


@dataclass(frozen=True)
class Operation:
    """`put`: `node`, a new `folder` or file, gets the name `first`. `remove`: what is at `first` goes. `move`: it gets
    the name `second`. `exchange`: both change places. `write`: the file `node` has the content `data`. `flush`: `node`
    is on disk, a file's content or a folder's names. `subjects`: the files or folders whose names change."""

    kind: Kind
    node: int = -1
    folder: bool = False
    first: Place | None = None
    second: Place | None = None
    data: bytes = b""
    subjects: frozenset[int] = frozenset()

    @property
    def places(self) -> frozenset[Place]:
        return frozenset(place for place in (self.first, self.second) if place is not None)


@dataclass
class Disk:
    """Folders by number, with the numbers by name of what they hold; the contents of files by number."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk({number: dict(names) for number, names in self.folders.items()}, dict(self.files))

    def at(self, place: Place | None) -> int | None:
        return None if place is None else self.folders.get(place[0], {}).get(place[1])

    def apply(self, operation: Operation) -> None:
        """As far as what it is about is there: a crash may have taken that."""
        first, second = operation.first, operation.second
        if operation.kind == "put" and first is not None and first[0] in self.folders:
            self.folders[first[0]][first[1]] = operation.node
            if operation.folder:
                self.folders.setdefault(operation.node, {})
        elif operation.kind == "remove" and first is not None:
            self.folders.get(first[0], {}).pop(first[1], None)
        elif operation.kind == "move" and first is not None and second is not None:
            if (node := self.at(first)) is not None and second[0] in self.folders:
                del self.folders[first[0]][first[1]]
                self.folders[second[0]][second[1]] = node
        elif operation.kind == "exchange" and first is not None and second is not None:
            one, other = self.at(first), self.at(second)
            if one is not None and other is not None:
                self.folders[first[0]][first[1]], self.folders[second[0]][second[1]] = other, one
        elif operation.kind == "write":
            self.files[operation.node] = operation.data
        if operation.kind == "put" and operation.data:
            self.files[operation.node] = operation.data

    def paths(self, folder: int = ROOT, above: str = "") -> Iterator[tuple[str, int]]:
        """Every path with its number, folders before what is in them."""
        for name, node in sorted(self.folders[folder].items()):
            yield f"{above}{name}", node
            if node in self.folders:
                yield from self.paths(node, f"{above}{name}/")

    def write(self, folder: Path) -> None:
        """Make all of it in an empty folder."""
        for path, node in self.paths():
            place = folder / path
            data = self.files.get(node, b"")
            if node in self.folders:
                place.mkdir()
            elif data.startswith(LINK):
                place.symlink_to(data.removeprefix(LINK).decode())
            else:
                place.write_bytes(data)

    def digest(self) -> bytes:
        found = hashlib.sha256()
        for path, node in self.paths():
            content = b"/" if node in self.folders else b"=" + hashlib.sha256(self.files.get(node, b"")).digest()
            found.update(path.encode() + b"\0" + content)
        return found.digest()


class Recorder:
    """The operations on what lies below `root`, in their order, while it is entered. `before`: what was there then.
    `only`: the names in `root` that are looked at; none: all. `links`: symbolic links say something after a crash."""

    def __init__(self, root: Path, only: tuple[str, ...] = (), links: bool = False) -> None:
        self.root, self.only, self.links = os.path.realpath(root), only, links
        self.operations: list[Operation] = []
        self._disk, self._seen, self._next = Disk(), dict[int, tuple[int, int, int]](), ROOT + 1
        self._lock, self._patch = threading.RLock(), pytest.MonkeyPatch()
        self.look()
        self.before, self.operations = self._disk.copy(), []

    def __enter__(self) -> Recorder:
        for name in ("unlink", "remove", "rmdir"):
            self._watch(os, name, self._removed)
        for name in ("rename", "replace"):
            self._watch(os, name, self._moved)
        for name in ("fsync", "fdatasync"):
            self._watch(os, name, self._flushed)
        self._watch(os, "mkdir", lambda *arguments, **options: self.look())
        self._watch(publish, "exchange", self._exchanged)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
        self.look()

    def look(self) -> None:
        """Take note of what is there, or changed, and was not seen to be done."""
        self._look(ROOT, self.root)

    def _look(self, folder: int, path: str) -> None:
        known = self._disk.folders[folder]
        try:
            with os.scandir(path) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # another process has just removed it
            return
        if folder == ROOT and self.only:
            found = [entry for entry in found if entry.name in self.only]
        # Those of the store say nothing after a crash.
        found = [entry for entry in found if self.links or not entry.is_symlink()]
        for name in sorted(known.keys() - {entry.name for entry in found}):
            self._do(Operation("remove", first=(folder, name), subjects=frozenset({known[name]})))
        for entry in found:
            inside = entry.is_dir(follow_symlinks=False)
            if (node := known.get(entry.name)) is None or inside != (node in self._disk.folders):
                node, self._next = self._next, self._next + 1
                data = LINK + bytes(Path(entry.path).readlink()) if entry.is_symlink() else b""
                subjects = frozenset({node})
                self._do(Operation("put", node, inside, (folder, entry.name), data=data, subjects=subjects))
            if inside:
                self._look(node, entry.path)
            elif not entry.is_symlink():
                self._look_into(node, entry)

    def _look_into(self, node: int, entry: os.DirEntry[str]) -> None:
        try:
            found = entry.stat(follow_symlinks=False)
            seen = found.st_ino, found.st_mtime_ns, found.st_size
            if self._seen.get(node) == seen:
                return
            data = Path(entry.path).read_bytes()
        except FileNotFoundError:  # as above
            return
        self._seen[node] = seen
        if self._disk.files.get(node, b"") != data:
            self._do(Operation("write", node, data=data))

    def _do(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._disk.apply(operation)

    def _watch(self, home: Any, name: str, seen: Callable[..., None]) -> None:
        real = getattr(home, name)

        @functools.wraps(real)
        def watched(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self.look()
                result = real(*arguments, **options)
                if result is not False:  # an exchange that cannot be
                    seen(*arguments, **options)
                return result

        self._patch.setattr(home, name, watched)

    def _place(self, path: Any, folder: int | None = None) -> Place | None:
        """Where a path lies; None where that is elsewhere."""
        path = os.fspath(path)
        above = f"/proc/self/fd/{folder}" if folder is not None else "."
        parent = os.path.realpath(os.path.join(above, os.path.dirname(path)))  # noqa: PTH118, PTH120
        number = self._number(parent)
        return None if number is None else (number, os.path.basename(path))  # noqa: PTH119

    def _number(self, path: str) -> int | None:
        if not Path(path).is_relative_to(self.root):
            return None
        number: int | None = ROOT
        for name in Path(path).relative_to(self.root).parts:
            number = self._disk.at((number, name)) if number is not None else None
        return number

    def _removed(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._place(path, dir_fd)
        if place is not None and (node := self._disk.at(place)) is not None:
            self._do(Operation("remove", first=place, subjects=frozenset({node})))

    def _moved(self, source: Any, target: Any, **options: Any) -> None:
        first, second = self._place(source), self._place(target)
        node = self._disk.at(first)
        if first is None or second is None or node is None:
            self.look()  # into it, or out of it
            return
        subjects = frozenset(each for each in (node, self._disk.at(second)) if each is not None)
        self._do(Operation("move", first=first, second=second, subjects=subjects))

    def _exchanged(self, one: Path, other: Path) -> None:
        first, second = self._place(one), self._place(other)
        subjects = frozenset(each for each in (self._disk.at(first), self._disk.at(second)) if each is not None)
        self._do(Operation("exchange", first=first, second=second, subjects=subjects))

    def _flushed(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        number = self._number(path)
        if number is not None:
            self._do(Operation("flush", number))


@contextlib.contextmanager
def recording(home: Path, file: Path) -> Iterator[None]:
    """Record a command whose store and output lie in `home`; `file` gets what `recorded` reads."""
    recorder = Recorder(home, ("store", "out"))
    try:
        with recorder:
            yield
    finally:
        file.write_bytes(pickle.dumps((recorder.before, recorder.operations)))


def recorded(file: Path) -> tuple[Disk, list[Operation]]:
    """What was there before a recorded command, and what it did."""
    found: tuple[Disk, list[Operation]] = pickle.loads(file.read_bytes())  # noqa: TID251 - of our own process
    return found


@dataclass(frozen=True)
class Crashed:
    """A disk after a crash. `ended`: the plan had ended before; `told`: what was left out."""

    disk: Disk
    ended: bool
    told: str


# What may be there of contents that were not flushed.
CONTENTS = ("whole", "absent", "half", "zeros", "drawn")


def crashes(before: Disk, operations: list[Operation], seed: int, draws: int) -> Iterator[Crashed]:
    """Every different disk that a crash after any of the operations may leave, by the rules above: all that was done,
    only what is certain, each operation left out and each one alone, and `draws` sets drawn at random; each with the
    unflushed contents whole, absent, cut to half, as zeros, and drawn at random."""
    drawn, seen, builds_on = random.Random(seed), set[bytes](), _builds_on(operations)
    for count in range(len(operations) + 1):
        done = operations[:count]
        for told, kept in _kept(done, builds_on, drawn, draws):
            for how in CONTENTS:
                disk = _left(before, done, kept, how, drawn)
                digest = disk.digest() + bytes([count == len(operations)])
                if digest not in seen:
                    seen.add(digest)
                    yield Crashed(disk, count == len(operations), f"after {count}: {told}, contents {how}")


def drawn_crashes(before: Disk, operations: list[Operation], seed: int, points: int, at_end: int) -> Iterator[Crashed]:
    """Some of these disks, where each takes long to look at: one at each of so many points, or of all that there are,
    and `at_end` when all was done. Points and disks are drawn at random."""
    drawn, builds_on, last = random.Random(seed), _builds_on(operations), len(operations)
    for point in (*sorted(drawn.sample(range(last), min(points, last))), *[last] * at_end):
        done = operations[:point]
        told, kept = drawn.choice(list(_kept(done, builds_on, drawn, draws=1)))
        how = drawn.choice(CONTENTS)
        disk = _left(before, done, kept, how, drawn)
        yield Crashed(disk, point == last, f"after {point}: {told}, contents {how}")


def _builds_on(operations: list[Operation]) -> list[set[int]]:
    return [_below(operations, number) for number in range(len(operations))]


def _kept(
    done: list[Operation], builds_on: list[set[int]], drawn: random.Random, draws: int
) -> Iterator[tuple[str, set[int]]]:
    """Sets of operations on names that may be on disk, each with those that it builds on."""
    names = [number for number, each in enumerate(done) if each.kind in ("put", "remove", "move", "exchange")]
    certain = _closed(builds_on, {number for number in names if _flushed_after(done, number)})
    pending = [number for number in names if number not in certain]
    yield "all", set(names)
    yield "certain ones", certain
    for number in pending:
        yield f"without {number}", {each for each in names if number not in _closed(builds_on, {each})}
        yield f"with {number}", _closed(builds_on, {*certain, number})
    for _ in range(draws if len(pending) > 1 else 0):
        yield "drawn", _closed(builds_on, {*certain, *drawn.sample(pending, drawn.randint(0, len(pending)))})


def _flushed_after(done: list[Operation], number: int) -> bool:
    """A move is on disk with the folder that it goes to: as one operation, so it is gone from the other one too."""
    flushed, each = {each.node for each in done[number + 1 :] if each.kind == "flush"}, done[number]
    return {place[0] for place in ([each.second] if each.kind == "move" and each.second else each.places)} <= flushed


def _closed(builds_on: list[set[int]], expected: set[int]) -> set[int]:
    return expected.union(*(builds_on[number] for number in expected))


def _below(operations: list[Operation], last: int) -> set[int]:
    """The operations on names that one builds on: all before it of the same name, or the same file or folder."""
    found: set[int] = set()
    places, subjects = set(operations[last].places), set(operations[last].subjects)
    for number in reversed(range(last)):
        each = operations[number]
        if each.places & places or each.subjects & subjects:
            found.add(number)
            places |= each.places
            subjects |= each.subjects
    return found


def _left(before: Disk, done: list[Operation], kept: set[int], how: str, drawn: random.Random) -> Disk:
    disk, certain = before.copy(), dict(before.files)
    for number, each in enumerate(done):
        if number in kept or each.kind == "write":
            disk.apply(each)
        elif each.kind == "flush" and each.node in disk.files:
            certain[each.node] = disk.files[each.node]
    for node, data in disk.files.items():
        if data != certain.get(node) and not data.startswith(LINK):
            disk.files[node] = _content(certain.get(node, b""), data, how, drawn)
    return disk


def _content(certain: bytes, data: bytes, how: str, drawn: random.Random) -> bytes:
    how = drawn.choice(("whole", "absent", "half", "zeros")) if how == "drawn" else how
    return {"whole": data, "absent": certain, "half": data[: len(data) // 2], "zeros": bytes(len(data))}[how]
