"""The measuring process of PyTorch at its best on a GPU: `python -m vitdeploy.workflows.selftest.torch_worker`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from vitdeploy.benchmark.worker import serve
from vitdeploy.models.family import LoadedModel
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.models.torch_runner import CompiledRunner
from vitdeploy.runtime.runner import Runner
from vitdeploy.stages.reference_model import from_request


@functools.lru_cache(maxsize=1)
def _original(source: Source) -> LoadedModel:
    return load_model(source)


def make_runner(request: dict[str, Any]) -> Runner:
    """The runner of a source (`reference_model.to_request`); any batch goes, each is compiled when it first comes."""
    return CompiledRunner(_original(from_request(request)))


if __name__ == "__main__":
    sys.exit(serve(make_runner))
