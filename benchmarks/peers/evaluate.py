"""The answers of one artifact to the evaluation images, at batch 1, through the Predictor that apps use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from child import Payload, serve
from worker import make_runner

from vitdeploy.spec import PreprocessSpec, decode
from vitdeploy.verification.records import collect


def work(payload: Payload) -> Payload:
    pixels = np.load(Path(payload["data_folder"]) / "evaluation.npy", mmap_mode="r")
    spec = decode(PreprocessSpec, payload["preprocess"])
    runner = make_runner({**payload["run"], "batch": 1, "threads": payload["threads"], "streams": 1})
    size = (pixels.shape[2], pixels.shape[1])
    answers = collect(runner, ((image, size) for image in pixels), spec)
    out = Path(payload["folder"]) / "logits.npy"
    np.save(out, answers.stacked("logits"))
    return {"images": len(answers)}


if __name__ == "__main__":
    serve(work)
