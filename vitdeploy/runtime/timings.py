"""Where a predictor's time went: the stages of its images, summed over all threads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vitdeploy.runtime.runner import forkable_lock

STAGES = ("decode", "preprocess", "infer", "postprocess")


@dataclass(frozen=True)
class Timings:
    """Milliseconds per image, means over `images`; all 0 before the first.

    decode: file to pixels. preprocess: resize, crop, and what the graph does not do itself. infer: host to host, with
    the wait for other threads' turns. postprocess: outputs to the answer.
    """

    images: int
    decode: float
    preprocess: float
    infer: float
    postprocess: float

    def to_dict(self) -> dict[str, Any]:
        return {"images": self.images, **{stage: getattr(self, stage) for stage in STAGES}}


class Stopwatch:
    """Adds up how long stages take; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = forkable_lock()
        self._images = 0
        self._ns = dict.fromkeys(STAGES, 0)

    def add(self, stage: str, start: int) -> int:
        """A stage that began at `start`, of time.perf_counter_ns(), ends; its nanoseconds. (A context manager would
        take four times as long, which shows with a small model.)"""
        elapsed = time.perf_counter_ns() - start
        with self._lock:
            self._ns[stage] += elapsed
        return elapsed

    def count(self, images: int) -> None:
        with self._lock:
            self._images += images

    def read(self) -> Timings:
        with self._lock:
            images, ns = self._images, dict(self._ns)
        return Timings(images, **{stage: ns[stage] / 1e6 / max(1, images) for stage in STAGES})
