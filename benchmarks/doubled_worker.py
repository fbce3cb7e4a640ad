"""The measuring process of an engine that computes each query twice, so that the ratio to itself is known: two.

To wait behind a query would not do: an engine is slower after a pause, when its threads sleep and its data is cold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from vitdeploy.benchmark.worker import engine_runner, serve
from vitdeploy.runtime.runner import Array, Runner


class Doubled(Runner):
    """The answers of another runner, which gives them twice."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner.name)
        self._runner = runner

    def _load(self) -> None:
        self._runner.load()
        self.inputs, self.outputs = self._runner.inputs, self._runner.outputs
        self.provider = self._runner.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        self._runner.infer(feeds)
        return self._runner.infer(feeds)

    def _close(self) -> None:
        self._runner.close()


def make_runner(request: dict[str, Any]) -> Runner:
    return Doubled(engine_runner(request))


if __name__ == "__main__":
    sys.exit(serve(make_runner))
