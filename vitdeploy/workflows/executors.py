"""Run independent pieces of work in several processes of this machine; `ray_cluster` does it on more machines."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar, cast

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.errors import VitdeployError, WorkerError, error_with_code
from vitdeploy.stages.workers import STARTS, Pool

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Piece:
    """One piece of work; `starts`: how often it was started."""

    ticket: object
    function: Callable[..., object]
    item: object
    named: str
    alone: bool = False
    starts: int = 0


class Processes:
    """So many at a time, each in a process of this machine."""

    def __init__(self, count: int) -> None:
        self.count = count

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`; leaving it waits for what runs."""
        pool = _ProcessPool(self.count)
        try:
            yield pool
        finally:
            pool.close()

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        with self.pool() as pool:
            yield from mapped(pool, function, items)


def mapped(pool: Pool, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
    """`Executor.map` with a pool."""
    for index, item in enumerate(items):
        pool.submit(index, function, item)
    while (found := pool.next()) is not None:
        yield cast("tuple[int, R | VitdeployError]", found)


@dataclass(frozen=True)
class InPool:
    """An executor that does its pieces in a pool that is there already, and has nothing else to do meanwhile."""

    kept: Pool

    @contextlib.contextmanager
    def pool(self) -> Iterator[Pool]:
        """As `Executor.pool`; leaving it ends nothing."""
        yield self.kept

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """As `Executor.map`; pieces that nobody waits for any more are not left to the pool's next user."""
        try:
            yield from mapped(self.kept, function, items)
        finally:
            self.kept.drop()
            while self.kept.next() is not None:
                pass


class _ProcessPool:
    """Each process is a pool of one, so that the death of one says which piece it did, and ends no other."""

    lonely = 0

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[Piece] = deque()
        self._running: dict[Future[object], tuple[Piece, ProcessPoolExecutor]] = {}
        self._idle: list[ProcessPoolExecutor] = []

    def submit(
        self, ticket: object, function: Callable[[T], object], item: T, named: str = "a task", *, alone: bool = False
    ) -> None:
        assert not alone, "asked of a pool that has no nodes"
        self._waiting.append(Piece(ticket, function, item, named))

    def drop(self) -> list[object]:
        dropped = [piece.ticket for piece in self._waiting]
        self._waiting.clear()
        return dropped

    def next(self) -> tuple[object, object] | None:
        while True:
            while self._waiting and len(self._running) < self._count:
                self._start(self._waiting.popleft())
            if not self._running:
                return None
            (future, *_), _ = wait(self._running, return_when=FIRST_COMPLETED)
            piece, process = self._running.pop(future)
            if not isinstance(future.exception(), BrokenProcessPool):
                self._idle.append(process)
                return piece.ticket, error_of(future.result())
            process.shutdown()
            if piece.starts >= STARTS:
                return piece.ticket, died(piece, "its process was killed, or crashed in a library")
            self._waiting.append(piece)

    def _start(self, piece: Piece) -> None:
        piece.starts += 1
        while self._idle:
            process = self._idle.pop()
            with contextlib.suppress(BrokenProcessPool):  # it was killed while it had nothing to do
                self._running[process.submit(guarded, piece.function, piece.item)] = piece, process
                return
        # Started again, not forked: a fork of a process whose runtimes have threads may hang.
        context = multiprocessing.get_context("spawn")
        process = ProcessPoolExecutor(1, context, initializer=_end_at_interrupt)
        self._running[process.submit(guarded, piece.function, piece.item)] = piece, process

    def close(self) -> None:
        for process in [*self._idle, *(process for _, process in self._running.values())]:
            process.shutdown(cancel_futures=True)


def _end_at_interrupt() -> None:
    """Ctrl-C reaches all processes: the first one says so, these go without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def guarded(function: Callable[[T], R], item: T) -> R | ErrorFacts:
    """Errors of ours as plain data: not all of their classes can be pickled."""
    try:
        return function(item)
    except VitdeployError as error:
        return ErrorFacts.of(error)


def error_of(value: R | ErrorFacts) -> R | VitdeployError:
    """What `guarded` gave, with an error in its class again."""
    if isinstance(value, ErrorFacts):
        return error_with_code(value.code, value.message, found=value.found, wanted=value.wanted, fix=value.fix)
    return value


def died(piece: Piece, found: str) -> WorkerError:
    """The error of a piece that is not started again."""
    return WorkerError(
        f"{piece.named} died {piece.starts} times",
        found=found,
        fix="often too little memory: do fewer at a time (--jobs 1), or take larger nodes",
    )
