"""Where the pieces of a stage, and whole stages, are worked on, and where they are kept."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from vitdeploy.errors import VitdeployError

if TYPE_CHECKING:
    from vitdeploy.store.store import Store

T = TypeVar("T")
R = TypeVar("R")
# A piece of work whose process or node dies is started so often.
STARTS = 3


class Pool(Protocol):
    """Pieces of work that are done side by side; more may be added while others run."""

    @property
    def lonely(self) -> int:
        """How many nodes there are for work that has a whole node for itself."""
        ...

    def submit(
        self, ticket: object, function: Callable[[T], object], item: T, named: str = "a task", *, alone: bool = False
    ) -> None:
        """Add a piece: `function` is a module's own, and it and its item can be pickled.

        Args:
            ticket: what `next` returns the piece by.
            named: what people call it, where it dies.
            alone: on a node for such work, with nothing else there; only where `lonely` is not 0.
        """
        ...

    def next(self) -> tuple[object, object] | None:
        """Wait for the next piece that is finished: its ticket, with what it returned or the VitdeployError that it
        raised. One whose process or node died is started again, `STARTS` times in all. None if no piece is left."""
        ...

    def drop(self) -> list[object]:
        """Forget the pieces that have not begun: their tickets. Those that run go on."""
        ...


class Executor(ABC):
    """Does pieces of work that do not depend on each other."""

    @abstractmethod
    def pool(self) -> AbstractContextManager[Pool]:
        """A pool, whose processes or connections live as long as the block; leaving it ends what runs."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The index of each item with what `function` returns for it, or the error that it raises, as they are
        finished. `function` is a module's own, and it and its items can be pickled. Errors as of `pool`."""
        with self.pool() as pool:
            for index, item in enumerate(items):
                pool.submit(index, function, item)
            while (done := pool.next()) is not None:
                yield cast("tuple[int, R | VitdeployError]", done)


@dataclass(frozen=True)
class InPool(Executor):
    """An executor that does its pieces in a pool that is there already, and has nothing else to do meanwhile."""

    kept: Pool

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`; leaving it ends nothing."""
        yield self.kept

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`; pieces that nobody waits for any more are not left to the pool's next user."""
        try:
            yield from super().map(function, items)
        finally:
            self.kept.drop()
            while self.kept.next() is not None:
                pass


@dataclass(frozen=True)
class Workers:
    """What a stage that works in pieces is given beside its inputs. Nothing of it changes a byte of the result, and a
    step whose `write` holds this has the same key whatever it is.

    `executor`: None is this process. `store`: keeps pieces for later runs; None: only until the stage is done.
    `resume`: pieces of earlier runs are used.
    """

    executor: Executor | None = None
    store: Store | None = None
    resume: bool = True


HERE = Workers()
