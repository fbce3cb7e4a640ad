"""torchao's PT2E: the original captured by torch.export, for Inductor (static) or ExecuTorch (dynamic).

`seconds` are those to the first answer, with what torch.compile compiles; `steps` has them without. AOTInductor is left
out: it compiles the same program ahead, into a package for each batch size. As the guides say:

https://docs.pytorch.org/ao/stable/pt2e_quantization/pt2e_quant_x86_inductor.html
https://docs.pytorch.org/executorch/stable/backends/xnnpack/xnnpack-quantization.html
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from child import Payload, package_versions, peak_mb, serve
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from worker import make_runner

from vitdeploy.benchmark.worker import random_feeds
from vitdeploy.models.load import load_model
from vitdeploy.models.source import Source
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec, decode

LARGEST_BATCH = 8  # of measure.SCENARIOS


def work(payload: Payload) -> Payload:
    model, backend = payload["model"], payload["backend"]
    checkpoint = Path(model["checkpoint"]) if model["checkpoint"] else None
    original = load_model(Source(model=model["name"], checkpoint=checkpoint))
    shape = [original.signature.channels, *original.signature.image_size]
    spec = decode(PreprocessSpec, payload["preprocess"])
    pixels = np.load(Path(payload["data_folder"]) / "calibration.npy", mmap_mode="r")
    file = Path(payload["folder"]) / {"pt2e": "model.pt2", "executorch": "model.pte"}[backend]
    torch.set_num_threads(payload["threads"])
    start = time.perf_counter()
    prepared = prepare_pt2e(_capture(original.module, shape).module(), _quantizer(backend))
    with torch.no_grad():
        # One image has the weights observed. Where scales of activations are dynamic, that is all.
        for image in pixels if backend == "pt2e" else pixels[:1]:
            prepared(torch.from_numpy(normalise(image[None], spec)))
    program = _capture(convert_pt2e(prepared), shape)
    quantized = time.perf_counter()
    if backend == "pt2e":
        torch.export.save(program, file)
    else:
        file.write_bytes(_lowered(program))
    lowered = time.perf_counter()
    run = {"kind": backend, "environment": backend, "file": str(file), "shape": shape, "dtype": "float32"}
    with make_runner({**run, "batch": 1, "threads": payload["threads"], "streams": 1}) as runner:
        runner.infer(random_feeds(runner.inputs, 1))
    end = time.perf_counter()
    return {
        "seconds": end - start,
        "steps": {"quantize": quantized - start, "lower": lowered - quantized, "first answer": end - lowered},
        "peak_mb": peak_mb(),
        "versions": package_versions(("torch", "torchao", "executorch")),
        "run": run,
    }


def _capture(module: Any, shape: list[int]) -> Any:
    sizes = {0: torch.export.Dim("batch", min=1, max=LARGEST_BATCH)}
    return torch.export.export(module, (torch.zeros(2, *shape),), dynamic_shapes=(sizes,))


def _quantizer(backend: str) -> Any:
    if backend == "pt2e":
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as xnnpack

    # Static, it rounds sums of residuals too, whose few large values leave no steps for the rest: ViT-Tiny then answers
    # no better than chance, and agrees on about 7 of 10 images with static linears alone.
    config = xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_dynamic=True)
    return xnnpack.XNNPACKQuantizer().set_global(config)


def _lowered(program: Any) -> bytes:
    """The file of ExecuTorch."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    return bytes(edge.to_executorch().buffer)


if __name__ == "__main__":
    serve(work)
