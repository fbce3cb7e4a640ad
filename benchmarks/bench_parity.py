"""Does `vitdeploy bench` say what the runtimes' own tools say? p50 of ViT-Tiny at batch 1, ours over theirs.

    python benchmarks/bench_parity.py --work DIR [--runs 6] [--seconds 20]

On OpenVINO against its benchmark_app (-hint latency -api sync), on ONNX Runtime against a bare loop of session.run.
Each is a process of its own, with as many threads as the runtime chooses for the CPUs of this process (`taskset` gives
it fewer). They are measured side by side: theirs is stopped (SIGSTOP) while one of our blocks runs and continues after
it, so both medians come from the same minutes on the machine. The few of their queries that were stopped half-way count
too, which hardly changes a median.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from protocol import compiled

from benchmarks.ratios import log_ratio
from vitdeploy.benchmark.process import WorkerProcess
from vitdeploy.benchmark.protocol import SETTLE_SECONDS
from vitdeploy.benchmark.run import engine_candidate, started
from vitdeploy.bundle.read import read_bundle
from vitdeploy.spec import EngineSpec

BLOCK_SECONDS = 0.5
TIMEOUT = 120.0
# What each prints when its measurement begins, and its median in ms.
BEGINS = re.compile(r"Measuring performance|measuring")
MEDIAN = re.compile(r"Median:\s*([\d.]+) ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines")
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=20, help="of a run, which both sides share")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)  # this process is the bare loop, of a graph
    options = parser.parse_args()
    if options.loop is not None:
        bare_loop(options.loop, options.seconds)
        return
    for target, their in (("openvino-cpu", benchmark_app), ("onnxruntime-cpu", session_run)):
        folder = compiled(options.work, target)
        engine = read_bundle(folder).engines[0]
        ours, theirs = [], []
        for number in range(options.runs):
            pair = side_by_side(folder, engine, their(folder / engine.files[0], engine, options.seconds))
            ours.append(pair[0])
            theirs.append(pair[1])
            print(f"{target} {number + 1}: {pair[0]:.3f} / {pair[1]:.3f} ms", flush=True)
        ratio, low, high = log_ratio(ours, theirs)
        medians = f"p50 ours {statistics.median(ours):.2f} ms, theirs {statistics.median(theirs):.2f} ms"
        print(f"{target}: {medians}; vitdeploy bench / {their.__name__} {ratio:.3f} [{low:.3f}, {high:.3f}]")


def side_by_side(folder: Path, engine: EngineSpec, command: Sequence[str]) -> tuple[float, float]:
    """The medians in ms of our worker and of another program, which take turns until that one has ended."""
    candidate = engine_candidate(engine, folder)
    with started({"ours": candidate.argv}) as (worker,):
        request = {**candidate.request, "threads": 0}
        worker.ask({"do": "load", "request": request, "batches": [1]}, TIMEOUT)
        latencies: list[int] = []
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as other:
            assert other.stdout is not None
            try:
                for line in other.stdout:
                    if BEGINS.search(line):
                        break
                while other.poll() is None:
                    time.sleep(SETTLE_SECONDS + BLOCK_SECONDS)
                    other.send_signal(signal.SIGSTOP)
                    latencies += _block(worker)
                    other.send_signal(signal.SIGCONT)
                text = other.stdout.read()
            finally:
                other.kill()
    found = MEDIAN.search(text)
    if found is None:
        sys.exit(f"no median in what {command[0]} printed:\n{text}")
    return statistics.median(latencies) / 1e6, float(found[1])


def _block(worker: WorkerProcess) -> list[int]:
    found: list[int] = worker.ask({"do": "block", "batch": 1, "seconds": BLOCK_SECONDS}, TIMEOUT)["latencies_ns"]
    return found


def benchmark_app(file: Path, engine: EngineSpec, seconds: int) -> list[str]:
    """The command of OpenVINO's own tool."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("benchmark_app", path=places)
    if program is None:
        sys.exit("no benchmark_app: it comes with pip install openvino")
    shape = ",".join(map(str, (1, *engine.inputs[0].shape[1:])))
    command = [program, "-m", str(file), "-hint", "latency", "-api", "sync", "-t", str(seconds)]
    return [*command, "-infer_precision", "f32", "-shape", f"{engine.inputs[0].name}[{shape}]"]


def session_run(file: Path, engine: EngineSpec, seconds: int) -> list[str]:
    """The command of a bare loop of session.run."""
    return [sys.executable, __file__, "--work", ".", "--loop", str(file), "--seconds", str(seconds)]


def bare_loop(graph: Path, seconds: int) -> None:
    import numpy as np
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.add_free_dimension_override_by_name("batch", 1)
    session = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
    tensor = session.get_inputs()[0]
    feeds = {tensor.name: np.random.default_rng(0).integers(0, 256, (1, *tensor.shape[1:]), np.uint8)}
    session.run(None, feeds)
    print("measuring")
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    print(f"Median: {1e3 * statistics.median(times):.3f} ms")


if __name__ == "__main__":
    main()
