"""The command line in this process, which spares loading PyTorch again where a process of its own is not the point."""

from __future__ import annotations

import contextlib
import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vitdeploy

ROOT = Path(vitdeploy.__file__).parents[1]


@dataclass(frozen=True)
class Done:
    """A finished command; the names are those of `subprocess.CompletedProcess`."""

    returncode: int | str | None
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """What it printed on standard output, which must be one JSON document and nothing else."""
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout)


Command = Callable[..., Done]


def _short(protocol: type[Any]) -> type[Any]:
    """The protocol as it is asked for, but with 3 to 5 rounds of blocks that are over at once. It is a class: modules
    that are imported meanwhile may name it as a type."""

    class Short(protocol):
        def __new__(cls, *, duration: float, **fields: Any) -> Any:
            shorter = {"duration": min(duration, 0.1), "block_seconds": 0.02, "min_rounds": 3, "warmup": 0}
            shorter |= {"processes": 1, "max_extension": 1}  # nothing is measured again because it is not clear
            return protocol(**{**fields, **shorter})

    return Short


@contextlib.contextmanager
def undisturbed(folder: Path) -> Iterator[None]:
    """Whatever else runs, benches of this process are decided and wait for no other: they are too short to say
    anything, and tests run beside each other. `tests/benchmark` has a look at the load. The lock is in `folder`."""
    from vitdeploy.benchmark import evidence as quiet
    from vitdeploy.benchmark import machine as machine_lock
    from vitdeploy.benchmark import summary as decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_lock, "lock_file", lambda: folder / machine_lock.LOCK_NAME)
        patch.setattr(quiet, "TAKEN_SHARE", math.inf)
        for name in ("WILD_SPREAD", "APART_REACH"):
            patch.setattr(decided, name, math.inf)
        yield


@contextlib.contextmanager
def command_line(folder: Path, store: Path, *, short_bench: bool = False) -> Iterator[Command]:
    """`run(*arguments)` calls `vitdeploy ARGUMENTS` in `folder`.

    With `short_bench`, `vitdeploy run`, `bench` and `tune` measure as always, but in shorter and fewer blocks, and in
    processes that are forked, as are the workers of `--executor processes`.
    """
    from tests import forked
    from vitdeploy.benchmark import process, protocol
    from vitdeploy.cli.main import main
    from vitdeploy.pipeline import assemble
    from vitdeploy.stages import search as screen
    from vitdeploy.workflows import executors, tuning

    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITDEPLOY_STORE", str(store))
        patch.setenv("PYTHONPATH", str(ROOT))  # of the measuring processes
        patch.chdir(folder)
        if short_bench:
            short = _short(protocol.Protocol)
            patch.setattr(protocol, "Protocol", short)
            for module in (assemble, tuning):
                patch.setattr(module, "Protocol", short)
            patch.setattr(screen, "BLOCK_SECONDS", 0.02)
            patch.setattr(screen, "WARMUP_SECONDS", 0.0)
            patch.setattr(process, "subprocess", forked.SUBPROCESS)
            patch.setattr(executors, "ProcessPoolExecutor", forked.worker_pool)

        def run(*arguments: object) -> Done:
            out, err = io.StringIO(), io.StringIO()
            patch.setattr(sys, "argv", ["vitdeploy", *map(str, arguments)])
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
                main()
            return Done(left.value.code, out.getvalue(), err.getvalue())

        yield run
    signal.signal(signal.SIGTERM, before)
