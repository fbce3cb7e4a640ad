"""PyTorch's own ways to run the original; `seconds` are those to the first answer, with what torch.compile compiles."""

from __future__ import annotations

import time
from pathlib import Path

from child import Payload, package_versions, peak_mb, serve
from worker import make_runner

from vitdeploy.benchmark.worker import random_feeds
from vitdeploy.models.source import Source
from vitdeploy.stages.reference_model import to_request


def work(payload: Payload) -> Payload:
    model = payload["model"]
    checkpoint = Path(model["checkpoint"]) if model["checkpoint"] else None
    source = Source(model=model["name"], checkpoint=checkpoint)
    run = {"kind": "torch", "mode": payload["mode"], "source": to_request(source)}
    start = time.perf_counter()
    with make_runner({**run, "batch": 1, "threads": payload["threads"], "streams": 1}) as runner:
        runner.infer(random_feeds(runner.inputs, 1))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak_mb": peak_mb(), "versions": package_versions(("torch",)), "run": run}


if __name__ == "__main__":
    serve(work)
