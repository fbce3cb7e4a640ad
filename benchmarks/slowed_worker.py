"""The measuring process of an engine that takes longer than it needs: after each query it waits for a share of it.

A request is an engine's with "slowdown" beside it, such as 0.05. `benchmarks/protocol.py` plants it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from vitdeploy.benchmark.worker import engine_runner, serve
from vitdeploy.runtime.runner import Array, Runner


class Slowed(Runner):
    """The answers of another runner, later."""

    def __init__(self, runner: Runner, slowdown: float) -> None:
        super().__init__(runner.name)
        self._runner, self._slowdown = runner, slowdown

    def _load(self) -> None:
        self._runner.load()
        self.inputs, self.outputs = self._runner.inputs, self._runner.outputs
        self.provider = self._runner.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        start = time.perf_counter_ns()
        outputs = self._runner.infer(feeds)
        end = time.perf_counter_ns()
        until = end + int(self._slowdown * (end - start))
        while time.perf_counter_ns() < until:
            pass
        return outputs

    def _close(self) -> None:
        self._runner.close()


def make_runner(request: dict[str, Any]) -> Runner:
    return Slowed(engine_runner(request), request["slowdown"])


if __name__ == "__main__":
    sys.exit(serve(make_runner))
