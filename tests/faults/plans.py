"""Small plans that publish something: what was there before, what is done, and what may be there if it is cut off."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import vitdeploy.publish as publish
import vitdeploy.store.store as store
from vitdeploy.devices.agent.releases import DeploymentFolder
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.runtime.trust import write_atomic
from vitdeploy.spec import MANIFEST_FORMAT, FileEntry, Manifest, encode
from vitdeploy.stages.calibrate_shards import load_state, save_state
from vitdeploy.stages.step import Step
from vitdeploy.store.key import Identity, Made
from vitdeploy.store.store import RECORD_FILE, Store

Files = Mapping[str, bytes]
OLD: Files = {"manifest.json": b"old " * 50, "model.onnx": bytes(range(256)) * 8, "engines/cpu/graph.onnx": b"a" * 999}
NEW: Files = {"manifest.json": b"new " * 60, "model.onnx": bytes(range(255, -1, -1)) * 9, "golden/in.npz": b"b" * 777}
OURS = ("manifest.json", "model.onnx", "engines", "golden")
KEY, OTHER = (Identity(kind, {}, {}, {}).key for kind in ("export", "other"))
# What a process that was killed leaves under names of its own.
LEFTOVER = re.compile(r"\.(?:tmp|old)-\d+-[0-9a-f]{12}")


@dataclass(frozen=True)
class Plan:
    """`before` makes what was there, `act` does it: as a new process does, again after each way to be cut off. `wrong`
    says what is wrong with what is there then, "" if nothing; it is asked of a folder whose process has ended. `made`:
    the same when it has been done to its end. `around` is entered whenever it acts. `clears`: it leaves nothing
    temporary, also of a process that was cut off; the store clears a folder when it makes something in it. `links`: it
    makes symbolic links, which say something."""

    name: str
    before: Callable[[Path], None]
    act: Callable[[Path], None]
    wrong: Callable[[Path], str]
    made: Callable[[Path], str]
    around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    clears: bool = True
    links: bool = False

    def run(self, home: Path) -> None:
        with self.around():
            self.act(home)

    def done(self, home: Path) -> str:
        """What is wrong after a command that nothing has cut off."""
        left = leftovers(home) if self.clears else []
        return self.made(home) or (f"left behind: {', '.join(left)}" if left else "")


def fill(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def held(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@contextlib.contextmanager
def in_memory(work: Path) -> Iterator[Path]:
    """A folder of a file system in memory, where there is one: thousands of small disks need no real one."""
    memory = Path("/dev/shm")  # noqa: S108 - a new folder in it
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else work) as folder:
        yield Path(folder).resolve()


def leftovers(home: Path) -> list[str]:
    """What was to be temporary."""
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if LEFTOVER.fullmatch(path.name))


def one_of(final: Path, *allowed: Files | None) -> str:
    """What is wrong with a folder or file that may be there as one of these, or, with None, may not be there."""
    if not os.path.lexists(final):
        return "" if None in allowed else f"{final.name} is not there"
    found = held(final) if final.is_dir() else {"": final.read_bytes()}
    if found in [dict(each) for each in allowed if each is not None]:
        return ""
    return f"{final.name} is in pieces: { {name: len(data) for name, data in found.items()} }"


# --- a folder, and a file ---------------------------------------------------------------------------------------------


def _nothing(home: Path) -> None:
    pass


def _old_bundle(home: Path) -> None:
    fill(home / "out" / "bundle", OLD)
    fill(home / "out" / "thesis", {"text": b"mine"})


def _replace(home: Path, final: str) -> None:
    with publish.replacing(home / final, OURS) as work:
        fill(work, NEW)


def _bundle(home: Path, *allowed: Files | None) -> str:
    publish.restore(home / "out" / "bundle")
    return one_of(home / "out" / "bundle", *allowed) or one_of(home / "out" / "thesis", {"text": b"mine"})


@contextlib.contextmanager
def no_exchange() -> Iterator[None]:
    """A file system where two folders cannot change places, such as NFS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "exchange", lambda one, other: False)
        yield


def _old_file(home: Path) -> None:
    (home / "x.vitb").write_bytes(OLD["model.onnx"])


def _replace_file(home: Path) -> None:
    with publish.replacing_file(home / "x.vitb", lambda path: True) as file:
        file.write_bytes(NEW["model.onnx"])


def _file(home: Path, *allowed: Files) -> str:
    return one_of(home / "x.vitb", *({"": files["model.onnx"]} for files in allowed))


def _old_page(home: Path) -> None:
    (home / "page.html").write_bytes(OLD["model.onnx"])


def _page(home: Path) -> None:
    with publish.storage_errors(home):  # as all who call it do
        write_atomic(home / "page.html", NEW["model.onnx"])


def _page_is(home: Path, *allowed: Files) -> str:
    return one_of(home / "page.html", *({"": files["model.onnx"]} for files in allowed))


# --- the store --------------------------------------------------------------------------------------------------------


def _make(home: Path, key: str = KEY, files: Files = NEW) -> None:
    Store(home).make(Identity("export", {}, {}, {}, key), lambda work: fill(work, files))


def _find_or_make(home: Path) -> None:
    if Store(home).find(KEY) is None:
        _make(home)


def _make_again(home: Path) -> None:
    Store(home).remove(KEY)
    _make(home)


def _damaged(home: Path) -> None:
    _make(home, OTHER, OLD)
    _make(home, KEY, OLD)
    (home / "artifacts" / KEY[:2] / KEY / "model.onnx").write_bytes(b"damaged")


def entry(home: Path, key: str) -> dict[str, bytes] | None:
    """The files of an entry but its record; None if there is none."""
    folder = home / "artifacts" / key[:2] / key
    if not folder.exists():
        return None
    return {name: data for name, data in held(folder).items() if name != RECORD_FILE}


def entries_whole(home: Path) -> str:
    """What is wrong with the entries of a store: whatever is there under a key must be whole, and found."""
    for folder in sorted(home.glob("artifacts/*/*")):
        if re.fullmatch("[0-9a-f]{64}", folder.name):
            if Store(home).find(folder.name) is None:
                return f"the entry {folder.name[:8]} is not whole"
        elif not LEFTOVER.fullmatch(folder.name):
            return f"{folder.name} lies in the store"
    return ""


def _entry_is(home: Path, *allowed: Files | None, kept: bool = False) -> str:
    found = entry(home, KEY)
    if found not in [None if each is None else dict(each) for each in allowed]:
        return f"the entry holds {None if found is None else sorted(found)}"
    return "the other entry is gone" if kept and entry(home, OTHER) != dict(OLD) else entries_whole(home)


def _damaged_is(home: Path) -> str:
    """As `_entry_is`, but the damaged one may be there still: whoever looks for it finds it damaged."""
    if (found := entry(home, KEY)) is not None and found.get("model.onnx") == b"damaged":
        return "" if Store(home).find(KEY) is None else "a damaged entry was found"
    return _entry_is(home, NEW, None, kept=True)


# --- a plan of three stages, the second of which can go on ------------------------------------------------------------


def _stage(name: str, *inputs: str) -> Step:
    def write(artifacts, out, progress):
        above = b"".join((artifacts[each].path / "data.bin").read_bytes() for each in inputs)
        fill(out, {"data.bin": name.encode() * 40 + above, "nested/facts.json": json.dumps(name).encode()})

    return Step(name, name, write, {"name": name}, inputs)


def _resumable(name: str, *inputs: str) -> Step:
    def write(artifacts, out, progress, scratch):
        state = load_state(scratch)
        total = np.zeros(4) if state is None else state["total"]
        for number in range(0 if state is None else int(state["count"]), 3):
            total = total + number
            save_state(scratch, {"total": total, "count": np.array(number + 1)})
        np.savez(out / "sums.npz", total=total)
        fill(out, {"data.bin": total.tobytes()})

    return Step(name, name, write, {"name": name}, inputs, resumable=True)


@functools.cache
def _steps() -> list[Step]:
    return [_stage("export"), _resumable("calibrate", "export"), _stage("place", "export", "calibrate")]


@contextlib.contextmanager
def _at_one_time() -> Iterator[None]:
    """What is made says when, where and how long; here it says the same each time."""
    with pytest.MonkeyPatch.context() as patch:
        when = ("2026-01-01T00:00:00.000+00:00", "host", 1, 0.5, "cpu", 1)
        patch.setattr(store, "made_now", lambda name, seconds, about: Made(name, *when, dict(about)))
        yield


def _run_plan(home: Path) -> None:
    found = run_plan(_steps(), Store(home / "store"), resume=True, progress=silent)
    with publish.replacing(home / "bundle", ("place", "calibrate")) as work:
        for name in ("place", "calibrate"):
            fill(work / name, held(found[name].path))


@functools.cache
def _made_by_plan() -> Files:
    """What an undisturbed run makes."""
    with tempfile.TemporaryDirectory() as folder, _at_one_time():
        _run_plan(Path(folder))
        return held(Path(folder) / "bundle")


def _plan_is(home: Path, *allowed: Files | None) -> str:
    expected = [_made_by_plan() if each is NEW else each for each in allowed]
    return one_of(home / "bundle", *expected) or entries_whole(home / "store")


# --- releases of a deployment, and the link to one --------------------------------------------------------------------


def release(text: str) -> tuple[str, dict[str, bytes]]:
    """The digest and the files of a small bundle that nothing can run."""
    data = {"graph.onnx": text.encode() * 99, "golden/in.npz": b"the same in all"}
    entries = tuple(FileEntry(name, len(each), sha256(each).hexdigest()) for name, each in data.items())
    manifest = Manifest(MANIFEST_FORMAT, "small", "sequence", {}, None, None, (), None, entries)
    written = json.dumps(encode(manifest)).encode()
    return sha256(written).hexdigest(), {"manifest.json": written, **data}


def entries_of(files: Files) -> list[FileEntry]:
    return [FileEntry(name, len(data), sha256(data).hexdigest()) for name, data in files.items()]


def bring(home: Path, text: str) -> str:
    """Add a release to the deployment in `home`, as a job does."""
    digest, files = release(text)
    place = DeploymentFolder("shop", home)
    with tempfile.TemporaryDirectory() as sent, place.held():
        fill(Path(sent), files)
        place.add(digest, entries_of(files), Path(sent))
    return digest


def move_to(home: Path, digest: str) -> None:
    place = DeploymentFolder("shop", home)
    found = place.look()
    if found.current != digest:
        with place.moved(digest, found.current, found.counter):
            pass


def _old_release(home: Path) -> None:
    move_to(home, bring(home, "old"))


def _bring_new(home: Path) -> None:
    bring(home, "new")


def _both_releases(home: Path) -> None:
    _old_release(home)
    _bring_new(home)


def _deployed_is(home: Path, *allowed: tuple[str, int]) -> str:
    """What is wrong with what an app finds, and then with how the next command says that it stands: a release, "" for
    none, and how often the link was moved."""
    place = DeploymentFolder("shop", home)
    texts = {release(text)[0]: text for text in ("old", "new")}
    for folder in place.releases.glob("*"):
        text = texts.get(folder.name)
        if text is not None and held(folder) != release(text)[1]:
            return f"the {text} release is in pieces"
    if place.link.is_symlink() and not place.link.is_dir():
        return "the link leads nowhere"
    looked = place.look()
    found = (texts.get(looked.current, ""), looked.counter)
    if found not in allowed or place.link.is_dir() != bool(looked.current):
        return f"the release is {found}"
    return (
        "" if not looked.moving and (not looked.previous or place.folder_of(looked.previous).is_dir()) else f"{looked}"
    )


def _brought(home: Path) -> str:
    new = DeploymentFolder("shop", home).folder_of(release("new")[0])
    return _deployed_is(home, ("old", 1)) or ("" if new.is_dir() else "the new release is not there")


def _plan(name: str, before, act, is_, *allowed: Files | None, around=contextlib.nullcontext) -> Plan:
    return Plan(
        name,
        before,
        act,
        lambda home: is_(home, *allowed),
        lambda home: is_(home, NEW),
        around,
    )


PLANS = (
    _plan(
        "a new folder",
        _nothing,
        functools.partial(_replace, final="a/b/new"),
        lambda home, *allowed: one_of(home / "a" / "b" / "new", *allowed),
        *(NEW, None),
    ),
    _plan("a folder replaced", _old_bundle, functools.partial(_replace, final="out/bundle"), _bundle, OLD, NEW),
    _plan(
        "a folder replaced without an exchange",
        _old_bundle,
        functools.partial(_replace, final="out/bundle"),
        _bundle,
        *(OLD, NEW),
        around=no_exchange,
    ),
    _plan("a file replaced", _old_file, _replace_file, _file, OLD, NEW),
    _plan("a file written at once", _old_page, _page, _page_is, OLD, NEW),
    _plan("an entry", _nothing, _find_or_make, _entry_is, NEW, None),
    _plan(
        "an entry beside another",
        lambda home: _make(home, OTHER, OLD),
        _find_or_make,
        functools.partial(_entry_is, kept=True),
        *(NEW, None),
    ),
    _plan("an entry made again", lambda home: _make(home, KEY, OLD), _make_again, _entry_is, OLD, NEW, None),
    Plan(
        "a damaged entry",
        _damaged,
        _find_or_make,
        _damaged_is,
        lambda home: _entry_is(home, NEW, kept=True),
        clears=False,
    ),
    _plan("a plan of three stages", _nothing, _run_plan, _plan_is, NEW, None, around=_at_one_time),
    Plan(
        "a release brought",
        _old_release,
        _bring_new,
        lambda home: _deployed_is(home, ("old", 1)),
        _brought,
        links=True,
        clears=False,
    ),
    Plan(
        "a release switched to",
        _both_releases,
        lambda home: move_to(home, release("new")[0]),
        lambda home: _deployed_is(home, ("old", 1), ("new", 2)),
        lambda home: _deployed_is(home, ("new", 2)),
        links=True,
        clears=False,
    ),
    Plan(
        "the first release switched to",
        _bring_new,
        lambda home: move_to(home, release("new")[0]),
        lambda home: _deployed_is(home, ("", 0), ("new", 1)),
        lambda home: _deployed_is(home, ("new", 1)),
        links=True,
        clears=False,
    ),
)
