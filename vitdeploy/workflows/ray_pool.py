"""Pieces of work as tasks of a Ray cluster that this process is connected to (docs.ray.io, "Ray Core", "Tasks").

Work that measures has a node for itself: one that was started with the resource `DEVICE` (docs.ray.io, "Resources"), of
which such a task claims all, together with all of the node's CPUs. So it waits until other tasks there have ended, and
none begins before it ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.errors import WorkerError
from vitdeploy.stages.workers import STARTS
from vitdeploy.store.sources import code_version
from vitdeploy.workflows.executors import Piece, died, error_of, guarded

T = TypeVar("T")
R = TypeVar("R")
# The custom resource of a node that measures: ray start --resources='{"vitdeploy_device": 1}'.
DEVICE = "vitdeploy_device"
# Ray gives a task as many threads as CPUs, but what is measured has those of its runtime's own choice.
THREADS = "OMP_NUM_THREADS"
# Tasks that wait for a CPU, so that a cluster that grows by demand sees some.
SPARE_TASKS = 4


class RayPool:
    """As `executors.Pool`. `at_a_time`: how many pieces run at once; None: as many as the cluster has CPUs for."""

    def __init__(self, ray: ModuleType, at_a_time: int | None) -> None:
        self._ray, self._at_a_time = ray, at_a_time
        self._waiting: deque[Piece] = deque()
        self._lonely: deque[Piece] = deque()
        # By Ray's reference: the piece, and the node that it has for itself.
        self._running: dict[object, tuple[Piece, str | None]] = {}

    @property
    def lonely(self) -> int:
        return len(self._devices())

    def submit(
        self, ticket: object, function: Callable[[T], object], item: T, named: str = "a task", *, alone: bool = False
    ) -> None:
        (self._lonely if alone else self._waiting).append(Piece(ticket, function, item, named, alone))

    def drop(self) -> list[object]:
        dropped = [piece.ticket for piece in (*self._waiting, *self._lonely)]
        self._waiting.clear()
        self._lonely.clear()
        return dropped

    def next(self) -> tuple[object, object] | None:
        while True:
            self._start_waiting()
            if not self._running:
                if not self._lonely:
                    return None
                return self._lonely.popleft().ticket, _no_device()
            (done, *_), _ = self._ray.wait(list(self._running), num_returns=1)
            piece, _ = self._running.pop(done)
            found = self._result(piece, done)
            if found is not None:
                return piece.ticket, found[0]
            self._lonely.appendleft(piece)

    def close(self) -> None:
        """End what runs."""
        for reference in self._running:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)

    def _start_waiting(self) -> None:
        most = self._at_a_time or int(self._ray.cluster_resources().get("CPU", 1)) + SPARE_TASKS
        while self._waiting and len(self._running) < most:
            piece = self._waiting.popleft()
            piece.starts = STARTS  # Ray counts them
            self._start(piece, None, num_cpus=1, max_retries=STARTS - 1)
        if self._lonely:
            taken = {node for _, node in self._running.values()}
            free = {node: cpus for node, cpus in self._devices().items() if node not in taken}
            for node, cpus in free.items():
                if self._lonely:
                    piece = self._lonely.popleft()
                    piece.starts += 1
                    self._start(piece, node, num_cpus=cpus, resources={DEVICE: 1}, max_retries=0)

    def _start(self, piece: Piece, node: str | None, **options: object) -> None:
        if node is not None:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        work = self._ray.remote(**options)(run_task)
        code, environment = code_version(everything=True), _environment(alone=piece.alone)
        reference = work.remote(piece.function, piece.item, code, environment, str(Path.cwd()))
        self._running[reference] = piece, node

    def _devices(self) -> dict[str, float]:
        """The CPUs of each node that measures, by the node's number."""
        return {
            node["NodeID"]: node["Resources"].get("CPU", 0)
            for node in self._ray.nodes()
            if node["Alive"] and node["Resources"].get(DEVICE, 0) >= 1
        }

    def _result(self, piece: Piece, reference: object) -> tuple[object] | None:
        """What a piece came to; None if it is to be started again on some node for itself."""
        try:
            return (error_of(self._ray.get(reference)),)
        except self._ray.exceptions.RayTaskError:
            raise  # an error of ours that nobody expected, as in this process
        except self._ray.exceptions.RayError as error:
            if piece.alone and piece.starts < STARTS:
                return None
            return (died(piece, str(error).splitlines()[0][:200] or type(error).__name__),)


def _no_device() -> WorkerError:
    return WorkerError(
        "no node is left that measures",
        found=f"those with the resource {DEVICE} are gone",
        wanted="one at least",
        fix=f"ray start --address HEAD:6379 --resources='{{\"{DEVICE}\": 1}}' there; then the same command goes on",
    )


def _environment(*, alone: bool) -> dict[str, str | None]:
    """Of this command, what its tasks are to be run with; None for what they are to be run without. Credentials are
    those of each node."""
    own: dict[str, str | None] = {name: value for name, value in os.environ.items() if name.startswith("VITDEPLOY_")}
    return {**own, THREADS: os.environ.get(THREADS)} if alone else own


def run_task(
    function: Callable[[T], R], item: T, code: str, environment: Mapping[str, str | None], folder: str
) -> R | ErrorFacts:
    """Runs on a node, with the environment and in the folder of the command."""
    if (found := code_version(everything=True)) != code:
        return ErrorFacts.of(
            WorkerError(
                f"the node {socket.gethostname()} has another vitdeploy",
                found=f"source code {found[:12]}",
                wanted=code[:12],
                fix="install the same version on all nodes",
            )
        )
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    with contextlib.suppress(FileNotFoundError):
        os.chdir(folder)
    return guarded(function, item)
