"""Dynamic batching: requests that wait while the engine runs are answered together in its next run, where that pays."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from vitdeploy.runtime.runner import Array

Run = Callable[[Array], dict[str, Array]]
# How many images at most run together when so many wait; a request of more than that still runs whole.
Together = Callable[[int], int]
# Is told the images and the seconds of each run.
Observe = Callable[[int, float], None]


@dataclass(frozen=True)
class Answer:
    """Outputs [n, ...] of a request's n images; seconds it waited and seconds of the run, which had `batch` images."""

    outputs: dict[str, Array]
    waited: float
    ran: float
    batch: int


@dataclass(frozen=True)
class _Waiting:
    tensor: Array
    since: float
    future: Future[Answer]


class Batcher:
    """Runs tensors in one thread, in the order they came, as many together as `together` says and fit into `max_batch`
    images; by default as many as wait. What is not faster together runs alone: an answer goes out as soon as it is
    there, not with those of all that waited.

    The first waits at most `max_delay` seconds for others while the engine is free; none is split. `submit` may be
    called from any thread. A future that is cancelled before its run is left out of it.

    `run` gets [n, ...], n at most `max_batch`, and gives outputs [n, ...]; if it raises, all requests of the run get
    that error.
    """

    def __init__(
        self,
        run: Run,
        max_batch: int,
        max_delay: float = 0.0,
        observe: Observe | None = None,
        together: Together | None = None,
    ) -> None:
        self._run = run
        self._together = together or (lambda waiting: max_batch)
        self._observe = observe
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._queue: deque[_Waiting] = deque()
        self._images = 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="vitdeploy-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Images that wait for their run."""
        return self._images

    def submit(self, tensor: Array) -> Future[Answer]:
        """The answer for [n, ...], 1 <= n <= max_batch, preprocessed images of one shape.

        Raises:
            ValueError: another n.
            RuntimeError: closed.
        """
        if not 1 <= len(tensor) <= self._max_batch:
            raise ValueError(f"{len(tensor)} images: wanted 1 to {self._max_batch}")
        future: Future[Answer] = Future()
        with self._changed:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            self._queue.append(_Waiting(tensor, time.perf_counter(), future))
            self._images += len(tensor)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Take no more, answer all that wait, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            running = [item for item in batch if item.future.set_running_or_notify_cancel()]
            if running:
                self._answer(running)

    def _take(self) -> list[_Waiting] | None:
        """The next requests that run together; None when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            if self._max_delay:
                left = self._queue[0].since + self._max_delay - time.perf_counter()
                self._changed.wait_for(lambda: self._closing or self._images >= self._max_batch, max(0.0, left))
            batch = [self._queue.popleft()]
            images, most = len(batch[0].tensor), self._together(self._images)
            while self._queue and images + len(self._queue[0].tensor) <= most:
                batch.append(self._queue.popleft())
                images += len(batch[-1].tensor)
            self._images -= images
            return batch

    def _answer(self, batch: list[_Waiting]) -> None:
        started = time.perf_counter()
        try:
            tensors = [item.tensor for item in batch]
            tensor = tensors[0] if len(tensors) == 1 else np.concatenate(tensors)
            outputs = self._run(tensor)
        except BaseException as error:  # whoever waits must be told, whatever it is
            for item in batch:
                item.future.set_exception(error)
            return
        ran = time.perf_counter() - started
        if self._observe is not None:
            self._observe(len(tensor), ran)
        start = 0
        for item in batch:
            end = start + len(item.tensor)
            own = {name: output[start:end] for name, output in outputs.items()}
            item.future.set_result(Answer(own, started - item.since, ran, len(tensor)))
            start = end
