"""`vitdeploy` in processes of its own, what it takes of time and memory; the images and the model of the rows."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import vitdeploy

ROOT = Path(vitdeploy.__file__).parents[1]
DIGITS = ROOT / "calibration" / "digits"
SMALL_MODEL = "vit_w32d2h2_patch8_32"
PROGRAM = "from vitdeploy.cli.watched import main; main()"
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Done:
    """A finished command. `peak_mb`: the largest resident memory of one of its processes."""

    status: int
    out: str
    err: str
    seconds: float
    peak_mb: float

    def document(self) -> dict[str, object]:
        """What `--json` printed."""
        assert self.status in (0, 5), f"exit status {self.status}\n{self.err[-3000:]}"
        found: dict[str, object] = json.loads(self.out)
        return found


@dataclass
class Commands:
    """Commands given in `home`, with a store of their own in it. Threads that wait do not spin."""

    home: Path
    settings: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def store(self) -> Path:
        return self.home / "store"

    def environment(self) -> dict[str, str]:
        folders = {"VITDEPLOY_STORE": self.store, "XDG_CACHE_HOME": self.home / "cache", "PYTHONPATH": ROOT}
        waiting = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": ""}
        return {**os.environ, **waiting, **{name: str(path) for name, path in folders.items()}, **self.settings}

    def begin(self, *words: object) -> subprocess.Popen[bytes]:
        """Start `vitdeploy WORDS` in a session of its own; what it prints is in `home`/out and `home`/err."""
        with (self.home / "out").open("wb") as out, (self.home / "err").open("wb") as err:
            return subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, words)],
                cwd=self.home,
                env=self.environment(),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __call__(self, *words: object, while_it_runs: Callable[[int], None] | None = None) -> Done:
        """`vitdeploy WORDS`, to its end.

        Args:
            while_it_runs: is given the number of its process again and again.
        """
        begun, process = time.monotonic(), self.begin(*words)
        try:
            while True:
                ended, status, used = os.wait4(process.pid, os.WNOHANG if while_it_runs else 0)
                if ended:
                    break
                assert while_it_runs is not None
                while_it_runs(process.pid)
                time.sleep(LOOK_SECONDS)
        except BaseException:
            kill(process.pid)
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = [(self.home / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err")]
        return Done(process.returncode, *texts, time.monotonic() - begun, used.ru_maxrss / 1024)


@dataclass(frozen=True)
class Model:
    checkpoint: Path
    graph: Path

    def verify(self, images: Path, *options: object) -> tuple[object, ...]:
        """The words of `vitdeploy verify` of the graph against the weights."""
        original = ("--against", SMALL_MODEL, "--checkpoint", self.checkpoint)
        return ("verify", self.graph, *original, "--target", "onnxruntime-cpu", "--data", images, "--json", *options)


def kill(session: int) -> None:
    """SIGKILL for a command that `begin` started, with all its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def many_images(folder: Path, count: int) -> Path:
    """The digits of `calibration/digits` in class folders, so often under other names that they are `count`. No two are
    the same bytes, which would count as one."""
    originals = sorted(DIGITS.glob("*/[0-9]/*.png"))
    for label in range(10):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        source = originals[number % len(originals)]
        copy = folder / source.parent.name / f"{number // len(originals):04}-{source.parent.parent.name}-{source.name}"
        if not copy.exists():
            copy.write_bytes(source.read_bytes() + number.to_bytes(4, "big"))  # behind the end of a PNG nothing is read
    return folder


def small_model(shared: Path) -> Model:
    """The small model with seeded weights, exported; made once for all rows, in the folder that they share."""
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = Model(shared / "small.safetensors", shared / "graph" / "model.onnx")
        if not made.graph.is_file():
            from tests.faults.killing import make_checkpoint, write_recipe

            write_recipe(shared, make_checkpoint(made.checkpoint), DIGITS)
            done = Commands(shared)("export", "recipe.yaml", "-o", made.graph.parent)
            assert done.status == 0, done.err[-3000:]
    return made


def kept(store: Path) -> dict[str, dict[str, object]]:
    """The records of a store by key, whole ones alone."""
    found = {}
    for file in store.glob("artifacts/*/*/artifact.json"):
        with contextlib.suppress(OSError, ValueError):  # it has just been moved
            found[file.parent.name] = json.loads(file.read_text(encoding="utf-8"))
    return found


def kept_kinds(store: Path, *kinds: str) -> int:
    """How many artifacts of these kinds a store has."""
    return sum(record["kind"] in kinds for record in kept(store).values())
