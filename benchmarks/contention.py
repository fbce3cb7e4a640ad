"""Does a bench beside others claim what does not hold? Runs of known truth, with contention planted meanwhile.

    python benchmarks/contention.py --work DIR --contests 50           goes on where it stopped; some 25 minutes
    python benchmarks/contention.py --work DIR --contests 10 --quick   shorter blocks, to see that it works
    python benchmarks/contention.py --work DIR --contests 0            what was found so far

Each run is of three: an engine (the digits' ViT with the embedded weights, FP32), the same again, and the same in a
process that computes each query twice. So the truth is known: 1 and 2. The engine is OpenVINO
in one benchmark run and ONNX Runtime in the next: their threads take contention in different ways. Beside it, in turns,
nothing runs, one busy loop, two, two that come and go at random seconds, or a second bench that knows of no lock.

What counts is, of the ratios that are claimed (`decided`), how many intervals hold the truth: at least 93 in 100. How
many are claimed says what the caution costs. Measure on a machine that does nothing else: what else runs is contention
too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitdeploy.benchmark.candidate import engine_candidate
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import run_benchmark
from vitdeploy.bundle.read import read_bundle
from vitdeploy.pipeline.measure import ratios
from vitdeploy.verification.intervals import wilson

MODEL, CHECKPOINT = "vit_w192d4h3_patch4_32", "calibration/digits/vit_digits.safetensors"
ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("openvino-cpu", "onnxruntime-cpu")
KINDS = ("none", "one loop", "two loops", "bursts", "a second bench")
ENGINE, AGAIN, DOUBLED = "engine", "the same", "doubled"
TRUTHS = {AGAIN: 1.0, DOUBLED: 2.0}
WORKER = Path(__file__).with_name("doubled_worker.py")
# 12 rounds of each of three in three processes, some 20 s; with waiting and repeating half a minute.
PROTOCOL = Protocol(("single",), (1,), duration=2.4, block_seconds=0.2, min_rounds=12, warmup=0.2, max_extension=1)
QUICK = dataclasses.replace(PROTOCOL, duration=1.2, block_seconds=0.1, processes=2)
SEED, LOOP = 0, "while True: pass"
# A process of a bench that takes turns with others which are not there.
BENCH = """
import json, sys, time
from vitdeploy.benchmark.worker import Session, engine_runner
session = Session(engine_runner)
session.answer({"do": "load", "request": {**json.loads(sys.argv[1]), "threads": 0}, "batches": [1]})
while True:
    session.answer({"do": "block", "batch": 1, "seconds": 0.5})
    time.sleep(0.2)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines and the results")
    parser.add_argument("--contests", type=int, default=50, help="how many in all, with those of before")
    parser.add_argument("--quick", action="store_true", help="blocks of half the length")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bundles = [compiled(options.work, target) for target in TARGETS] if options.bench_runs else []
    results = options.work / ("quick.jsonl" if options.quick else "benchmark runs.jsonl")
    for number in range(len(read(results)), options.bench_runs):
        turn, kind = divmod(number, len(KINDS))
        found = hold(bundles[turn % len(bundles)], KINDS[kind], number, QUICK if options.quick else PROTOCOL)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{number + 1:>3}  {found['kind']:<15} {said(found)}", flush=True)
    print("\n".join(table(read(results))))


def read(results: Path) -> list[dict[str, Any]]:
    if not results.is_file():
        return []
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def compiled(work: Path, target: str) -> Path:
    """A bundle of the digits' model, made once."""
    graph, bundle = work / "graph", work / target
    steps = (
        (graph, ("export", MODEL, "--checkpoint", ROOT / CHECKPOINT, "--image-size", 32)),
        (bundle, ("compile", graph, "--target", target)),
    )
    for out, arguments in steps:
        if not out.exists():
            command = [sys.executable, "-m", "vitdeploy.cli.main", *map(str, arguments), "-o", str(out)]
            subprocess.run(command, check=True)
    return bundle


def hold(bundle: Path, kind: str, number: int, protocol: Protocol) -> dict[str, Any]:
    """One benchmark run beside others: what was claimed of the two pairs."""
    engine = read_bundle(bundle).engines[0]
    plain = [engine_candidate(engine, bundle, name) for name in (ENGINE, AGAIN)]
    doubled = dataclasses.replace(plain[0], artifact=DOUBLED, argv=(sys.executable, str(WORKER)))
    pairs = [(AGAIN, ENGINE), (DOUBLED, ENGINE)]
    start = time.monotonic()
    with contention(kind, SEED + number, plain[0].request):
        bench_run = run_benchmark([*plain, doubled], protocol, pairs=pairs)
    return {
        "kind": kind,
        "number": number,
        "target": engine.target,
        "seconds": round(time.monotonic() - start, 1),
        "rounds": len(bench_run.entries[0].rounds["single"]),
        "ratios": [
            {key: getattr(each, key) for key in ("a", "ratio", "ci95", "verdict", "decided", "reason")}
            for each in ratios(bench_run, pairs)
        ],
    }


@contextlib.contextmanager
def contention(kind: str, seed: int, request: dict[str, Any]) -> Iterator[None]:
    """Others that run meanwhile; they are ended in the end. `request`: of the engine that a second bench loads."""
    lines = {
        "none": [],
        "one loop": [(LOOP,)],
        "two loops": [(LOOP,)] * 2,
        "bursts": [(bursts(seed),), (bursts(seed + 1000),)],
        "a second bench": [(BENCH, json.dumps(request))],
    }[kind]
    others = [subprocess.Popen([sys.executable, "-c", *each]) for each in lines]
    try:
        yield
    finally:
        for other in others:
            other.terminate()
        for other in others:
            other.wait()


def bursts(seed: int) -> str:
    """Busy and idle in turns, each for 0.2 to 3 seconds."""
    return (
        "import random, time\n"
        f"r = random.Random({seed})\n"
        "while True:\n"
        "    end = time.monotonic() + r.uniform(0.2, 3)\n"
        "    while time.monotonic() < end: pass\n"
        "    time.sleep(r.uniform(0.2, 3))\n"
    )


def said(found: dict[str, Any]) -> str:
    texts = [
        f"{each['a']} {each['ratio']:.3f} [{each['ci95'][0]:.3f}, {each['ci95'][1]:.3f}] {each['verdict']}"
        for each in found["ratios"]
    ]
    return f"{found['target']}: {'; '.join(texts)}; {found['rounds']} rounds, {found['seconds']:.0f} s"


def table(bench_runs: Sequence[dict[str, Any]]) -> list[str]:
    """Per kind: how many ratios are claimed, of those how many hold the truth (Wilson's 95 % interval), how many of the
    others would have, and how often the doubled one was found slower."""
    head = f"{'beside':<16}{'bench_runs':>9}{'claimed':>14}  {'of these true':<32}{'undecided, true':>16}{'found':>12}"
    lines = [head]
    for kind in (*KINDS, "all"):
        every = [each for bench_run in bench_runs if kind in (bench_run["kind"], "all") for each in bench_run["ratios"]]
        if not every:
            continue
        count = sum(kind in (bench_run["kind"], "all") for bench_run in bench_runs)
        claimed, left = ([each for each in every if each["decided"] is decided] for decided in (True, False))
        true = sum(map(holds, claimed))
        low, high = wilson(true, len(claimed)) if claimed else (0.0, 1.0)
        share = f"{true} of {len(claimed)} [{100 * low:.0f} %, {100 * high:.0f} %]" if claimed else "nothing claimed"
        found = sum(each["a"] == DOUBLED and each["verdict"] == "slower" for each in every)
        claims = f"{len(claimed)} of {len(every)}"
        lines.append(
            f"{kind:<16}{count:>9}{claims:>14}  {share:<32}{f'{sum(map(holds, left))} of {len(left)}':>16}{found:>12}"
        )
    return lines


def holds(ratio: dict[str, Any]) -> bool:
    low, high = ratio["ci95"]
    return bool(low <= TRUTHS[ratio["a"]] <= high)


if __name__ == "__main__":
    main()
