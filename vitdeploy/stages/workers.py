"""Where the pieces of a stage, and whole stages, are worked on, and where they are kept."""

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
# A piece of work whose process or node dies is started so often.
STARTS = 3


@dataclass(eq=False)
class Piece:
    """One piece of work; `starts`: how often it was started."""

    ticket: object
    function: Callable[..., object]
    item: object
    named: str
    alone: bool = False
    starts: int = 0


class Pool(ABC):
    """Pieces of work that are done side by side; more may be added while others run."""

    def __init__(self) -> None:
        self._waiting: list[Piece] = []

    @property
    def lonely(self) -> int:
        """How many nodes there are for work that has a whole node for itself."""
        return 0

    def submit(
        self, ticket: object, function: Callable[[T], object], item: T, named: str = "a task", *, alone: bool = False
    ) -> None:
        """Add a piece: `function` is a module's own, and it and its item can be pickled.

        Args:
            ticket: what `next` returns the piece by.
            named: what people call it, where it dies.
            alone: on a node for such work, with nothing else there; only where `lonely` is not 0.
        """
        self._waiting.append(Piece(ticket, function, item, named, alone))

    @abstractmethod
    def next(self) -> tuple[object, object] | None:
        """Wait for the next piece that is finished: its ticket, with what it returned or the VitdeployError that it
        raised. One whose process or node died is started again, `STARTS` times in all. None if no piece is left."""

    def drop(self) -> list[object]:
        """Forget the pieces that have not begun: their tickets. Those that run go on."""
        dropped = [piece.ticket for piece in self._waiting]
        self._waiting.clear()
        return dropped

    def results(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`, while nothing else is to be done."""
        for index, item in enumerate(items):
            self.submit(index, function, item)
        while (done := self.next()) is not None:
            yield cast("tuple[int, R | VitdeployError]", done)

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The same; pieces that nobody waits for any more are not left to the pool's next user."""
        try:
            yield from self.results(function, items)
        finally:
            self.drop()
            while self.next() is not None:
                pass


class Executor(ABC):
    """Does pieces of work that do not depend on each other."""

    @abstractmethod
    def pool(self) -> AbstractContextManager[Pool]:
        """A pool, whose processes or connections live as long as the block; leaving it ends what runs."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The index of each item with what `function` returns for it, or the error that it raises, as they are
        finished. `function` is a module's own, and it and its items can be pickled. Errors as of `pool`."""
        with self.pool() as pool:
            yield from pool.results(function, items)


@dataclass(frozen=True)
class Workers:
    """What a stage that works in pieces is given beside its inputs. Nothing of it changes a byte of the result, and a
    step whose `write` holds this has the same key whatever it is.

    `executor`: None is this process; a pool that is there already does the pieces, and nothing else meanwhile. `store`:
    keeps pieces for later runs; None: only until the stage is done. `resume`: pieces of earlier runs are used.
    """

    executor: Executor | Pool | None = None
    store: Store | None = None
    resume: bool = True


HERE = Workers()
