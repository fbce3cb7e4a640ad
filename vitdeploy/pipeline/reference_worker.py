"""The measuring process of the original model: `python -m vitdeploy.pipeline.reference_worker`."""

from __future__ import annotations

import functools
import sys
from typing import Any

from vitdeploy.bench.worker import serve
from vitdeploy.models.original import Original
from vitdeploy.models.source import Source, load_original
from vitdeploy.pipeline.origin import from_request, is_onnx, reference_runner
from vitdeploy.runtime.runner import Runner


@functools.lru_cache(maxsize=1)
def _original(source: Source) -> Original | None:
    return None if is_onnx(source) else load_original(source)


def make_runner(request: dict[str, Any]) -> Runner:
    """The runner of a source (`origin.to_request`) with "threads" and "batch" beside it; any batch goes."""
    source = from_request(request)
    return reference_runner(source, threads=int(request["threads"]), original=_original(source))


if __name__ == "__main__":
    sys.exit(serve(make_runner))
