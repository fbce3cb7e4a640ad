"""Run independent pieces of work in several processes of this machine; `ray_cluster` does it on more machines."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol, TypeVar

from vitdeploy.document.errors import ErrorFacts
from vitdeploy.errors import VitdeployError, WorkerError, error_with_code

T = TypeVar("T")
R = TypeVar("R")


class Executor(Protocol):
    """Does pieces of work that do not depend on each other."""

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        """The index of each item with what `function` returns for it, or the error that it raises, as they are
        finished. `function` is a module's own, and it and its items can be pickled."""
        ...


class Processes:
    """So many at a time, each in a process of this machine. Where one of these dies, as by a library's crash, what was
    not finished by then fails with it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[int, R | VitdeployError]]:
        # Started again, not forked: a fork of a process whose runtimes have threads may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.count, context, initializer=_end_at_interrupt) as pool:
            futures = {pool.submit(guarded, function, item): index for index, item in enumerate(items)}
            try:
                for future in as_completed(futures):
                    result = _result(future)
                    yield futures[future], result
            finally:
                pool.shutdown(cancel_futures=True)


def _end_at_interrupt() -> None:
    """Ctrl-C reaches all processes: the first one says so, these go without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def guarded(function: Callable[[T], R], item: T) -> R | ErrorFacts:
    """Errors of ours as plain data: not all of their classes can be pickled."""
    try:
        return function(item)
    except VitdeployError as error:
        return ErrorFacts.of(error)


def _result(future: Future[R | ErrorFacts]) -> R | VitdeployError:
    try:
        value = future.result()
    except BrokenProcessPool:
        return WorkerError(
            "a working process died",
            found="it was killed, or crashed in a library",
            fix="often too little memory: do fewer at a time (--jobs 1)",
        )
    return error_of(value)


def error_of(value: R | ErrorFacts) -> R | VitdeployError:
    """What `guarded` gave, with an error in its class again."""
    if isinstance(value, ErrorFacts):
        return error_with_code(value.code, value.message, found=value.found, wanted=value.wanted, fix=value.fix)
    return value
