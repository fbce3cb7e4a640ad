"""The measuring process of the original model: `python -m vitdeploy.pipeline.reference_worker`."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from vitdeploy.bench.worker import serve
from vitdeploy.models.reference import TorchRunner
from vitdeploy.models.source import Original, load_original
from vitdeploy.runtime.runner import Runner


@functools.lru_cache(maxsize=1)
def _original(model: str, checkpoint: str | None) -> Original:
    return load_original(model, Path(checkpoint) if checkpoint else None)


def make_runner(request: dict[str, Any]) -> Runner:
    """The runner of {"model": name, "checkpoint": path or null, "threads": number}; any batch goes."""
    return TorchRunner(_original(request["model"], request["checkpoint"]), threads=int(request["threads"]))


if __name__ == "__main__":
    sys.exit(serve(make_runner))
