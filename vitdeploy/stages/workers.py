"""Executors and pools for tasks: shards of a stage, and whole stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from vitdeploy.errors import VitdeployError

if TYPE_CHECKING:
    from vitdeploy.store.store import Store

T = TypeVar("T")
R = TypeVar("R")
# A task whose process or node dies is started this many times.
STARTS = 3


@dataclass(eq=False)
class Piece:
    """One task; `starts`: how often it was started."""

    ticket: object
    function: Callable[..., object]
    item: object
    named: str
    alone: bool = False
    starts: int = 0


class Pool(ABC):
    """Tasks that run in parallel; tasks may be added while others run."""

    def __init__(self) -> None:
        self._waiting: list[Piece] = []

    @property
    def lonely(self) -> int:
        """The number of nodes for tasks that need a whole node (exclusive nodes)."""
        return 0

    def submit(
        self, ticket: object, function: Callable[[T], object], item: T, named: str = "a task", *, alone: bool = False
    ) -> None:
        """Add a task. `function` is a module-level function; it and its item can be pickled.

        Args:
            ticket: the identifier with which `next` returns the task.
            named: the name of the task in error messages.
            alone: run on an exclusive node; only if `lonely` is not 0.
        """
        self._waiting.append(Piece(ticket, function, item, named, alone))

    @abstractmethod
    def next(self) -> tuple[object, object] | None:
        """Wait for the next finished task: its ticket, and its result or the VitdeployError that it raised. A task
        whose process or node died is restarted, up to `STARTS` starts. None if no task is left."""

    def drop(self) -> list[object]:
        """Drop the tasks that have not started, and return their tickets. Running tasks continue."""
        dropped = [piece.ticket for piece in self._waiting]
        self._waiting.clear()
        return dropped

    def results(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`, for an otherwise idle pool."""
        for index, item in enumerate(items):
            self.submit(index, function, item)
        while (done := self.next()) is not None:
            yield cast("tuple[int, R | VitdeployError]", done)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `results`; tasks that remain when the caller stops are dropped."""
        try:
            yield from self.results(function, items)
        finally:
            self.drop()
            while self.next() is not None:
                pass


class Executor(ABC):
    """Runs independent tasks."""

    @abstractmethod
    def pool(self) -> AbstractContextManager[Pool]:
        """A pool whose processes or connections live as long as the `with` block; leaving it ends running tasks."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The index of each item with the result of `function`, or the error that it raised, in the order of
        completion. `function` is a module-level function; it and its items can be pickled. Errors as in `pool`."""
        with self.pool() as pool:
            yield from pool.results(function, items)


@dataclass(frozen=True)
class Workers:
    """Where the tasks of a stage run. It changes no byte of the result, and is not part of the key of a step.

    `executor`: None runs tasks in this process; an existing pool runs them while it is otherwise idle. `store`: keeps
    results of tasks for later runs; None keeps them until the stage is done. `resume`: reuse results of earlier runs.
    """

    executor: Executor | Pool | None = None
    store: Store | None = None
    resume: bool = True


HERE = Workers()
