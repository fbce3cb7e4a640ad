"""Plans of small steps that write what they know of the process that they run in."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.errors import CapabilityError, DataError
from vitdeploy.stages.step import Step
from vitdeploy.stages.workers import HERE, Workers

FILE = "said.json"


@dataclass(frozen=True)
class Small:
    """A variant of a search that has small steps. `name`: its own; what it does is up to `fault`."""

    store: Path
    name: str
    fault: str = ""

    def plan(self, workers: Workers = HERE) -> list[Step]:
        first, times, last = "first", f"times {self.name}", f"last {self.name}"
        return [
            _step("first", self, workers),
            _step("pieces", self, workers, first, shared_out=workers.executor is not None),
            _step(f"made {self.name}", self, workers, "pieces"),
            _step(times, self, workers, f"made {self.name}", measured=True),
            _step(last, self, workers, times),
        ]


def piece(number: int) -> int:
    return os.getpid()


def _step(
    name: str, of: Small, workers: Workers, *inputs: str, measured: bool = False, shared_out: bool = False
) -> Step:
    home, fault = of.store, of.fault

    def write(folders: object, out: Path, progress: object) -> None:
        began = time.monotonic()
        if name.startswith("made"):
            _fail(home, fault)
        pieces = [] if workers.executor is None else [pid for _, pid in workers.executor.map(piece, [1, 2, 3])]
        said = {"pid": os.getpid(), "began": began, "pieces": pieces if name == "pieces" else []}
        (out / FILE).write_text(json.dumps(said))

    return Step(name, name.split()[0], write, {"name": name}, inputs, measured=measured, shared_out=shared_out)


def _fail(home: Path, fault: str) -> None:
    if fault == "cannot":
        raise CapabilityError("this machine cannot do it")
    if fault == "wrong":
        raise DataError("an image is broken")
    if fault == "always dies" or (fault == "dies once" and _first(home)):
        os.kill(os.getpid(), signal.SIGKILL)


def _first(home: Path) -> bool:
    try:
        (home.parent / "died").mkdir()
    except FileExistsError:
        return False
    return True
