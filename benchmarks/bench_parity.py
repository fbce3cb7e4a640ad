"""Does `vitdeploy bench` say what the runtimes' own tools say? p50 of ViT-Tiny at batch 1, ours over theirs.

    python benchmarks/bench_parity.py --work DIR [--pairs 12] [--seconds 4]

On OpenVINO against its benchmark_app (-hint latency -api sync), on ONNX Runtime against a bare loop of session.run.
Each is a process of its own, with as many threads as the runtime chooses for the CPUs of this process (`taskset` gives
it fewer); ours and theirs take turns, and which is first changes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from protocol import compiled

from vitdeploy.bench.contest import engine_contestant, run_contest
from vitdeploy.bench.protocol import Protocol
from vitdeploy.bench.summary import rows
from vitdeploy.bundle.read import read_bundle
from vitdeploy.spec import EngineSpec
from vitdeploy.verify.intervals import trimmed_log_ratio

WARMUP = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=int, default=4, help="how long each measures")
    parser.add_argument("--loop", type=Path, help=argparse.SUPPRESS)  # this process is the bare loop, of a graph
    options = parser.parse_args()
    if options.loop is not None:
        print(bare_loop(options.loop, options.seconds))
        return
    theirs: dict[str, Callable[[Path, EngineSpec, int], float]] = {
        "openvino-cpu": benchmark_app,
        "onnxruntime-cpu": session_run,
    }
    for target, their in theirs.items():
        folder = compiled(options.work, target)
        engine = read_bundle(folder).engines[0]
        found: dict[str, list[float]] = {"ours": [], "theirs": []}
        sides = {"ours": ours, "theirs": their}
        for number in range(options.pairs):
            for name in sorted(sides, reverse=bool(number % 2)):
                found[name].append(sides[name](folder, engine, options.seconds))
            print(f"{target} {number + 1}: {found['ours'][-1]:.2f} / {found['theirs'][-1]:.2f} ms", flush=True)
        ratio, low, high = trimmed_log_ratio(found["ours"], found["theirs"])
        medians = ", ".join(f"{name} {statistics.median(values):.2f} ms" for name, values in found.items())
        print(f"{target}: p50 {medians}; vitdeploy bench / {their.__name__} {ratio:.3f} [{low:.3f}, {high:.3f}]")


def ours(folder: Path, engine: EngineSpec, seconds: int) -> float:
    """p50 in ms by `vitdeploy bench` of one artifact, in one process."""
    protocol = Protocol(("single",), (1,), duration=seconds, min_rounds=1, warmup=WARMUP, processes=1)
    return float(rows(run_contest([engine_contestant(engine, folder)], protocol))[0]["latency_ms"]["p50"])


def benchmark_app(folder: Path, engine: EngineSpec, seconds: int) -> float:
    """The median in ms that OpenVINO's own tool prints."""
    program = shutil.which(
        "benchmark_app", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if program is None:
        sys.exit("no benchmark_app: it comes with pip install openvino")
    shape = ",".join(map(str, (1, *engine.inputs[0].shape[1:])))
    command = [program, "-m", str(folder / engine.files[0]), "-hint", "latency", "-api", "sync", "-t", str(seconds)]
    command += ["-infer_precision", "f32", "-shape", f"{engine.inputs[0].name}[{shape}]"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    match = re.search(r"Median:\s*([\d.]+) ms", text)
    if match is None:
        sys.exit(f"benchmark_app printed no median:\n{text}")
    return float(match[1])


def session_run(folder: Path, engine: EngineSpec, seconds: int) -> float:
    """The median in ms of a bare loop of session.run, in a process of its own."""
    graph = str(folder / engine.files[0])
    command = [sys.executable, __file__, "--work", ".", "--loop", graph, "--seconds", str(seconds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def bare_loop(graph: Path, seconds: int) -> float:
    import numpy as np
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.add_free_dimension_override_by_name("batch", 1)
    session = onnxruntime.InferenceSession(str(graph), settings, providers=["CPUExecutionProvider"])
    tensor = session.get_inputs()[0]
    feeds = {tensor.name: np.random.default_rng(0).integers(0, 256, (1, *tensor.shape[1:]), np.uint8)}
    for duration in (WARMUP, float(seconds)):
        times = []
        end = time.perf_counter() + duration
        while time.perf_counter() < end:
            start = time.perf_counter()
            session.run(None, feeds)
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
