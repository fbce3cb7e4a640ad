"""Can `vitdeploy bench` be trusted here? The same engine against itself, and against itself slowed down by 5 %.

    python benchmarks/protocol.py --work DIR --minutes 8        as often as you like: it continues where it stopped
    python benchmarks/protocol.py --work DIR --minutes 0        the results so far

Each run is one `vitdeploy bench --scenario single` of three engines: one, the same again, and the same in a process
that waits for 5 % of each query's own time. The protocol passes if it reports "no difference" for the first two, and
"slower" for the third, at least 90 times in 100. Measure on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, nearest_rank
from vitdeploy.benchmark.run import engine_candidate, run_benchmark
from vitdeploy.benchmark.summary import rows
from vitdeploy.bundle.read import read_bundle
from vitdeploy.pipeline.measure import ratios
from vitdeploy.spec import encode
from vitdeploy.verification.intervals import wilson

MODEL = "vit_tiny_patch16_224"
TARGETS = ("openvino-cpu", "onnxruntime-cpu")
SLOWDOWN = 0.05
ENGINE, AGAIN, SLOWED = "engine", "the same", "slowed"
WORKER = Path(__file__).with_name("slowed_worker.py")
RESULTS = "benchmark runs.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines and the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no benchmark run after this time")
    parser.add_argument("--duration", type=float, default=Protocol().duration, help="as of vitdeploy bench")
    options = parser.parse_args()
    protocol = Protocol(("single",), (1,), duration=options.duration)
    bundles = {target: compiled(options.work, target) for target in TARGETS}
    results = options.work / RESULTS
    deadline = time.monotonic() + 60 * options.minutes
    for target in itertools.cycle(TARGETS):
        if time.monotonic() >= deadline:
            break
        found = hold(bundles[target], protocol)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"target": target, **found}) + "\n")
        print(f"{target}: {said(found)}", flush=True)
    print("\n".join(table([json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()])))


def compiled(work: Path, target: str) -> Path:
    """A bundle of the model with seeded weights, made once."""
    graph, bundle = work / "graph", work / target
    for out, arguments in ((graph, ("export", MODEL)), (bundle, ("compile", graph, "--target", target))):
        if not out.exists():
            subprocess.run(
                [sys.executable, "-m", "vitdeploy.cli.main", *map(str, arguments), "-o", str(out)], check=True
            )
    return bundle


def hold(bundle: Path, protocol: Protocol) -> dict[str, Any]:
    """One benchmark run: the verdicts on the two pairs, and their evidence."""
    engine = read_bundle(bundle).engines[0]
    plain = [engine_candidate(engine, bundle, name) for name in (ENGINE, AGAIN)]
    slowed = dataclasses.replace(
        plain[0],
        artifact=SLOWED,
        argv=(sys.executable, str(WORKER)),
        request={**plain[0].request, "slowdown": SLOWDOWN},
    )
    start = time.monotonic()
    pairs = [(AGAIN, ENGINE), (SLOWED, ENGINE)]
    bench_run = run_benchmark([*plain, slowed], protocol, pairs=pairs)
    return {
        "seconds": round(time.monotonic() - start, 1),
        "ratios": encode(ratios(bench_run, pairs)),
        "flags": {row.artifact: list(row.flags) for row in rows(bench_run)},
        "rounds": _rounds(bench_run),
    }


def _rounds(bench_run: BenchRun) -> dict[str, Any]:
    """The process of every round, and the 0th, 10th, 25th and 50th percentile of its latencies in ms."""
    return {
        entry.artifact: [
            (block.process, *(round(nearest_rank(block.latencies_ms, percent), 4) for percent in (0, 10, 25, 50)))
            for block in entry.rounds["single"]
        ]
        for entry in bench_run.entries
    }


def said(found: dict[str, Any]) -> str:
    texts = [
        f"{each['a']} {each['ratio']:.3f} [{each['ci95'][0]:.3f}, {each['ci95'][1]:.3f}] {each['verdict']}"
        for each in found["ratios"]
    ]
    return f"{'; '.join(texts)}; {len(found['rounds'][ENGINE])} rounds, {found['seconds']:.0f} s"


def table(bench_runs: Sequence[dict[str, Any]]) -> list[str]:
    """How often the verdict was right, with Wilson's 95 % interval, for each target and for all."""
    lines = []
    for target in (*TARGETS, "all"):
        mine = [each for each in bench_runs if target in (each["target"], "all")]
        for index, (what, right) in enumerate((("quiet on the same", "no difference"), ("finds 5 %", "slower"))):
            hits = sum(each["ratios"][index]["verdict"] == right for each in mine)
            if mine:
                low, high = wilson(hits, len(mine))
                lines.append(f"{target:<16} {what:<18} {hits} of {len(mine)} [{100 * low:.0f} %, {100 * high:.0f} %]")
    return lines


if __name__ == "__main__":
    main()
