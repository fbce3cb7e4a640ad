"""Dynamic batching: requests that arrive while the engine runs are answered together in the next run, if that is
faster."""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from vitdeploy.runtime.inputs import Further
from vitdeploy.runtime.runner import Array

# Called with the images and the seconds of each run.
Observe = Callable[[int, float], None]


@dataclass(frozen=True)
class ExecutionPlan:
    """How the next images run. `run`: takes images [n, ...] and optionally further inputs [n, ...] by name, and returns
    outputs [n, ...]. `images`: the most waiting images in one run; a larger request is not split. `alone`: no other run
    is active at the same time."""

    run: Callable[..., dict[str, Array]]
    images: int
    alone: bool = True


# (waiting images, active runs) -> how the next images run; None: wait until a run ends.
Plan = Callable[[int, int], "ExecutionPlan | None"]


@dataclass(frozen=True)
class BatchAnswer:
    """Outputs [n, ...] of a request's n images; the seconds it waited, and those of its run of `batch` images."""

    outputs: dict[str, Array]
    waited: float
    ran: float
    batch: int


@dataclass(frozen=True)
class _Waiting:
    tensor: Array
    since: float
    future: Future[BatchAnswer]
    further: Further


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


class Batcher:
    """Runs tensors in order of arrival, in `workers` threads, in batches as chosen by `plan`. Where batches are not
    faster, requests run one by one, and each answer is sent as soon as it is ready.

    The first request waits at most `max_delay` seconds for others, until `max_batch` images wait; requests are not
    split. `submit` may be called from any thread. A future that is cancelled before its run is left out. If a run
    raises, all its requests get that error.
    """

    def __init__(
        self, plan: Plan, max_batch: int, max_delay: float = 0.0, observe: Observe | None = None, workers: int = 1
    ) -> None:
        self._plan = plan
        self._observe = observe
        self._max_batch = max_batch
        self._max_delay = max_delay
        self._queue: deque[_Waiting] = deque()
        self._images = 0
        self._running = 0
        self._alone = False
        self._closing = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"vitdeploy-engine-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of images that wait for their run."""
        return self._images

    def submit(self, tensor: Array, further: Further | None = None) -> Future[BatchAnswer]:
        """Return a future with the answer for preprocessed images [n, ...] of one shape, 1 <= n <= max_batch, with
        further inputs [n, ...] under the same names each time.

        Raises:
            ValueError: n is out of range.
            RuntimeError: the batcher is closed.
        """
        if not 1 <= len(tensor) <= self._max_batch:
            raise ValueError(f"{len(tensor)} images: expected 1 to {self._max_batch}")
        future: Future[BatchAnswer] = Future()
        with self._changed:
            if self._closing:
                raise RuntimeError("the batcher is closed")
            self._queue.append(_Waiting(tensor, time.perf_counter(), future, further or {}))
            self._images += len(tensor)
            self._changed.notify()
        return future

    def close(self) -> None:
        """Stop accepting requests, answer the waiting ones, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            plan, batch = taken
            running = [item for item in batch if item.future.set_running_or_notify_cancel()]
            if running:
                self._answer(plan, running)
            with self._changed:
                self._running -= 1
                self._alone = False
                self._changed.notify_all()

    def _take(self) -> tuple[ExecutionPlan, list[_Waiting]] | None:
        """Return the next requests to run together, with their plan; None when closed and empty."""
        with self._changed:
            while (plan := self._next()) is None:
                if self._closing and not self._queue:
                    return None
                self._changed.wait(self._patience())
            batch = [self._queue.popleft()]
            images = len(batch[0].tensor)
            while self._queue and images + len(self._queue[0].tensor) <= plan.images:
                batch.append(self._queue.popleft())
                images += len(batch[-1].tensor)
            self._images -= images
            self._running += 1
            self._alone = plan.alone
            if self._queue:
                self._changed.notify()
            return plan, batch

    def _next(self) -> ExecutionPlan | None:
        """Return how the next images run; None if none may run now."""
        if not self._queue or self._alone or self._patience() is not None:
            return None
        return self._plan(self._images, self._running)

    def _patience(self) -> float | None:
        """Return the seconds that the first request may still wait for others; None if it need not wait."""
        if not self._queue or not self._max_delay or self._closing or self._images >= self._max_batch:
            return None
        left = self._queue[0].since + self._max_delay - time.perf_counter()
        return left if left > 0 else None

    def _answer(self, plan: ExecutionPlan, batch: list[_Waiting]) -> None:
        started = time.perf_counter()
        try:
            tensor = _joined([item.tensor for item in batch])
            further = {name: _joined([item.further[name] for item in batch]) for name in batch[0].further}
            outputs = plan.run(tensor, further) if further else plan.run(tensor)
        except BaseException as error:  # the waiting requests must get any error
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
            item.future.set_result(BatchAnswer(own, started - item.since, ran, len(tensor)))
            start = end
