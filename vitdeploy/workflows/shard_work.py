"""Some shards of an evaluation as a piece of work for an executor. What it finds is in the store."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vitdeploy.data.file_digests import DIGESTS_FILE
from vitdeploy.data.folder import Samples
from vitdeploy.pipeline.run import default_store
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.stages.shards import Identity, Part, ShardStore, evaluate
from vitdeploy.stages.turns import machine_turn
from vitdeploy.tasks.adapter import Setting
from vitdeploy.tasks.adapters import counted_adapter
from vitdeploy.tasks.counted import Truth
from vitdeploy.workflows.portable import Portable

# What sets the number of threads of PyTorch before it is loaded. Ray sets it for its tasks, and rounding may depend on
# it.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Work:
    """Shards that one artifact has to answer: `parts` of `samples`, of which `truth` is known. `identity`: the
    artifact's own. `setting`: of the task that counts; `answering`: of the side that answers. `threads`: of
    `THREADS`, what the command has."""

    portable: Portable
    identity: Identity
    setting: Setting
    answering: Setting
    skip_bad: bool
    samples: Samples
    truth: Truth | None
    parts: tuple[Part, ...]
    threads: tuple[str | None, ...]


def threads_here() -> tuple[str | None, ...]:
    """For `Work.threads`."""
    return tuple(os.environ.get(name) for name in THREADS)


def do(work: Work) -> None:
    """Evaluate the shards that are not in the store of this process yet, such as by a process that died in the middle.

    Errors as of `evaluate` and `Portable.runner`.
    """
    store = default_store()
    shards = ShardStore(store)
    parts = [part for part in work.parts if not shards.holds(part, work.skip_bad)]
    if not parts:
        return
    adapter, answering = counted_adapter(work.setting), counted_adapter(work.answering)
    assert adapter is not None and answering is not None, "a piece of a task that is counted in shards"
    evaluate(
        *(_held.predictor(work), work.samples, work.truth, parts),
        *(adapter, answering.kept, shards, store.root / DIGESTS_FILE),
        skip_bad=work.skip_bad,
        processes=1,
        turn=machine_turn,
    )


class _Held:
    """The artifact that this process ran last, which the next piece of work asks for too."""

    def __init__(self) -> None:
        self._what: tuple[Portable, Identity, Setting] | None = None
        self._predictor: Predictor | None = None

    def predictor(self, work: Work) -> Predictor:
        what = work.portable, work.identity, work.setting
        if self._predictor is None or self._what != what:
            if self._predictor is not None:
                self._predictor.close()
                self._predictor = None
            for name, value in zip(THREADS, work.threads, strict=True):
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            runner = work.portable.runner(work.identity, default_store())
            self._what, self._predictor = what, Predictor(runner, work.setting.images)
        return self._predictor


_held = _Held()
