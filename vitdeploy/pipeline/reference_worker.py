"""The measuring process of the original model: `python -m vitdeploy.pipeline.reference_worker`. With the argument
"compiled", PyTorch compiles the model, for GPUs."""

import functools
import sys
from typing import Any

from vitdeploy.benchmark.worker import serve
from vitdeploy.errors import TargetError
from vitdeploy.models import family, load, torch_runner
from vitdeploy.models.source import Source
from vitdeploy.runtime.runner import Runner
from vitdeploy.stages.reference_model import from_request, is_onnx, reference_runner


@functools.lru_cache(maxsize=1)
def _original(source: Source) -> family.LoadedModel | None:
    return None if is_onnx(source) else load.load_model(source)


def make_runner(request: dict[str, Any]) -> Runner:
    """The runner of a source (`reference_model.to_request`) with "threads" and "batch" added; any batch works, unless
    the source has a fixed one.

    Raises:
        TargetError: the requested batch is not the fixed one.
    """
    source = from_request(request)
    if source.only_batch not in (None, request["batch"]):
        raise TargetError(
            f"{source.name} works at batch {source.only_batch} only",
            found=f"batch {request['batch']}",
            expected=f"batch {source.only_batch}",
            fix=f"--batch {source.only_batch}; in a recipe bench.batch: [{source.only_batch}]",
        )
    return reference_runner(source, threads=int(request["threads"]), original=_original(source))


def make_compiled(request: dict[str, Any]) -> Runner:
    """As `make_runner`, compiled by PyTorch; each batch size is compiled at its first use."""
    original = _original(from_request(request))
    assert original is not None, "an ONNX file is not compiled by PyTorch"
    return torch_runner.CompiledRunner(original)


if __name__ == "__main__":
    sys.exit(serve(make_compiled if "compiled" in sys.argv else make_runner))
