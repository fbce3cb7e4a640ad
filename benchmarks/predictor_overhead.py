"""What does the Predictor add to the bare call of the runtime? Goal: at most 3 % or 50 microseconds.

    python benchmarks/predictor_overhead.py BUNDLE [--target openvino-cpu] [--seconds 20] [--image 500x375]

Three calls on the same pixels take turns, one at a time, in one process and on the same infer request or session,
so that disturbances of the machine affect all of them equally:

bare            OpenVINO: request.infer with shared inputs and outputs, copying neither; ONNX Runtime: session.run
run             predictor.run: outputs by name, in arrays of the caller's own
predict_tensor  predictor.predict_tensor: the answer too

The ratio to the bare call comes from paired calls: the 20 % trimmed mean of its logarithm with its 95 % interval.
Microseconds are this interval times the median of the bare call. The bare call after a pause shows what a runtime loses
while it is idle. Then come the stages of predictor.predict for a uint8 image of the size --image.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ratios import paired_ratio, student
from vitdeploy.bundle.read import read_bundle
from vitdeploy.runtime import Predictor, load
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.openvino import OpenVinoRunner
from vitdeploy.runtime.ort import OnnxRuntimeRunner

LIMIT, LIMIT_MICROSECONDS = 1.03, 50.0
WARMUP_SECONDS = 1.0
PAUSE_SECONDS = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target", action="append", help="default: every engine of the bundle")
    parser.add_argument("--seconds", type=float, default=20.0, help="of all three calls together")
    parser.add_argument("--image", type=lambda text: [int(side) for side in text.split("x")], default=[500, 375])
    options = parser.parse_args()
    host = describe_host()
    print(f"{host['cpu']}, {host['cores']} cores")
    for target in options.target or [engine.target for engine in read_bundle(options.bundle).engines]:
        with load(options.bundle, target) as predictor:
            overhead(predictor, options.seconds)
            stages(predictor, *options.image)


def overhead(predictor: Predictor, seconds: float) -> None:
    tensor = predictor.runner.inputs[0].with_batch(1)
    pixels = np.random.default_rng(0).integers(0, 256, tensor.shape, np.uint8).astype(tensor.dtype)
    bare, what = bare_call(predictor, pixels)
    calls: dict[str, Callable[[], Any]] = {
        "bare": bare,
        "run": lambda: predictor.run(pixels),
        "predict_tensor": lambda: predictor.predict_tensor(pixels),
    }
    _turns(calls, WARMUP_SECONDS)
    found = _turns(calls, seconds)
    median, paused = statistics.median(found["bare"]), statistics.median(_paused(bare))
    print(
        f"{predictor.runner.name}: {what} {median:.1f} us, median of {len(found['bare'])}; "
        f"{paused:.1f} us after {1e3 * PAUSE_SECONDS:.0f} ms of silence"
    )
    for name in ("run", "predict_tensor"):
        paired = paired_ratio(found[name], found["bare"])
        ratio, low, high = student(paired.log, paired.error, paired.freedom)
        added = [(each - 1) * median for each in (ratio, low, high)]
        held = "held" if high <= LIMIT or added[2] <= LIMIT_MICROSECONDS else "NOT HELD"
        print(
            f"  {name:<15} / bare {ratio:.4f} [{low:.4f}, {high:.4f}], "
            f"{added[0]:+.1f} us [{added[1]:+.1f}, {added[2]:+.1f}]: {held}"
        )


def bare_call(predictor: Predictor, pixels: np.ndarray) -> tuple[Callable[[], Any], str]:
    """The runtime's own call on the objects that the predictor uses, and its name."""
    runner = predictor.runner
    feeds = {runner.inputs[0].name: pixels}
    if isinstance(runner, OpenVinoRunner):
        request = runner._requests.get()  # the only one
        runner._requests.put(request)
        return lambda: request.infer(feeds, share_inputs=True, share_outputs=True), "request.infer"
    if isinstance(runner, OnnxRuntimeRunner):
        session = runner._session
        return lambda: session.run(None, feeds), "session.run"
    raise SystemExit(f"no bare call is known of {runner.name}: expected openvino-cpu or onnxruntime-cpu")


def _turns(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    """Microseconds of each call. The order of a turn is drawn: each follows each of the others as often."""
    names, chance = list(calls), random.Random(0)  # noqa: S311
    found: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        chance.shuffle(names)
        for name in names:
            call = calls[name]
            start = time.perf_counter_ns()
            call()
            found[name].append((time.perf_counter_ns() - start) / 1e3)
    return found


def _paused(call: Callable[[], Any], count: int = 100) -> list[float]:
    """Microseconds of each call after a pause."""
    found = []
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return found


def stages(predictor: Predictor, width: int, height: int, count: int = 200) -> None:
    """Where the time from an image to its answer goes, in microseconds."""
    channels = predictor.preprocess.channels
    images = np.random.default_rng(0).integers(0, 256, (8, height, width, channels), np.uint8)
    before = predictor.timings
    start = time.perf_counter()
    for number in range(count):
        predictor.predict(images[number % len(images)])
    whole = 1e6 * (time.perf_counter() - start) / count
    after = predictor.timings
    shares = [
        (name, 1e3 * (getattr(after, name) * after.images - getattr(before, name) * before.images) / count)
        for name in ("decode", "preprocess", "infer", "postprocess")
    ]
    told = ", ".join(f"{name} {value:.0f}" for name, value in shares)
    print(f"  predict from uint8 {width}x{height}: {whole:.0f} us: {told}")


if __name__ == "__main__":
    main()
