"""Does a bench beside others claim what does not hold, and does it decide? Runs of known truth, contention planted.

    python benchmarks/contention.py --work DIR                         60 contests, up to 10 minutes; continues where
                                                                       it stopped
    python benchmarks/contention.py --work DIR --contests 0            the results so far
    python benchmarks/contention.py --work DIR --demo 10 --loops 1     `make demo` ten times beside one busy loop

Each contest has three engines: one (the digits' ViT with the embedded weights, FP32), the same again, and the same in a
process that computes each query twice. So the true ratios are known: 1 and 2. The engine runs on OpenVINO in one
contest and on ONNX Runtime in the next: their threads react to contention differently. The contention alternates:
none, one busy loop, two, two that start and stop at random seconds, a second bench without the lock, or random stops of
all three for milliseconds, as by the hypervisor of a machine with busy neighbours, which does not tell its guests.

It prints three rates: how many contests find the engine faster than the doubled one, or ahead of it (goal: 90 in 100);
how many of all claims (intervals, and "at least") are true (97 in 100); and how often one of two equal engines is
called faster (never). Measure on an otherwise idle machine: any other load is contention too.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.run import engine_candidate, run_benchmark
from vitdeploy.bundle.read import read_bundle
from vitdeploy.pipeline.measure import ratios
from vitdeploy.verification.intervals import wilson

MODEL, CHECKPOINT = "vit_w192d4h3_patch4_32", "calibration/digits/vit_digits.safetensors"
ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("openvino-cpu", "onnxruntime-cpu")
KINDS = ("none", "one loop", "two loops", "bursts", "a second bench", "stolen")
ENGINE, AGAIN, DOUBLED = "engine", "the same", "doubled"
TRUTHS = {AGAIN: 1.0, DOUBLED: 2.0}
WORKER = Path(__file__).with_name("doubled_worker.py")
# Looks after each of three processes, as a run has them; blocks of half the length, so that a contest takes seconds.
PROTOCOL = Protocol(("single",), (1,), duration=3.0, block_seconds=0.2, min_rounds=21, warmup=0.2)
SEED, LOOP = 0, "while True: pass"
# A process of a bench that takes turns with others which are not there.
BENCH = """
import json, sys, time
from vitdeploy.benchmark.worker import _Session, engine_runner
session = _Session(engine_runner)
session.answer({"do": "load", "request": {**json.loads(sys.argv[1]), "threads": 0}, "batches": [1]})
while True:
    session.answer({"do": "block", "batch": 1, "seconds": 0.5})
    time.sleep(0.2)
"""
# Stops the measuring processes, which are children of process argv[1], for 3 to 12 ms in each 20 to 60.
STEAL = """
import os, random, signal, sys, time
r = random.Random(int(sys.argv[2]))
path = f"/proc/{sys.argv[1]}/task/{sys.argv[1]}/children"
def tell(number):
    for pid in map(int, open(path).read().split()):
        if pid != os.getpid():
            try: os.kill(pid, number)
            except ProcessLookupError: pass
while True:
    tell(signal.SIGSTOP); time.sleep(r.uniform(0.003, 0.012))
    tell(signal.SIGCONT); time.sleep(r.uniform(0.02, 0.06))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the engines and the results")
    parser.add_argument("--contests", type=int, default=60, help="the total number, including earlier ones")
    parser.add_argument("--seconds", type=float, default=540.0, help="start no contest after this time")
    parser.add_argument("--demo", type=int, default=0, help="instead, run the demo's recipe this many times")
    parser.add_argument("--loops", type=int, default=1, help="busy loops beside the demo")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.demo:
        for line in demos(options.work, options.demo, options.loops):
            print(line, flush=True)
        return
    begun, results = time.monotonic(), options.work / "contests.jsonl"
    bundles = [compiled(options.work, target) for target in TARGETS] if options.contests else []
    for number in range(len(read(results)), options.contests):
        if time.monotonic() - begun > options.seconds:
            break
        turn, kind = divmod(number, len(KINDS))
        found = hold(bundles[turn % len(bundles)], KINDS[kind], number)
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
            subprocess.run([*command(*arguments), "-o", str(out)], check=True)
    return bundle


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "vitdeploy.cli.main", *map(str, arguments)]


def hold(bundle: Path, kind: str, number: int) -> dict[str, Any]:
    """One contest under contention: the claims about the two pairs. It ends like a run, with the first process after
    which the engine and the doubled one are distinguished."""
    engine = read_bundle(bundle).engines[0]
    plain = [engine_candidate(engine, bundle, name) for name in (ENGINE, AGAIN)]
    doubled = dataclasses.replace(plain[0], artifact=DOUBLED, argv=(sys.executable, str(WORKER)))
    pairs = [(AGAIN, ENGINE), (DOUBLED, ENGINE)]

    def still_open(bench_run: BenchRun) -> list[str]:
        [found] = ratios(bench_run, pairs[1:])
        low, high = found.sure
        return [] if found.verdict == "not decided" or not low <= 1 <= high else [ENGINE, AGAIN, DOUBLED]

    start = time.monotonic()
    with contention(kind, SEED + number, plain[0].request):
        bench_run = run_benchmark([*plain, doubled], PROTOCOL, pairs=pairs, still_open=still_open)
    keys = ("a", "ratio", "ci95", "verdict", "decided", "bounds", "reason")
    return {
        "kind": kind,
        "number": number,
        "target": engine.target,
        "seconds": round(time.monotonic() - start, 1),
        "rounds": len(bench_run.entries[0].rounds["single"]),
        "ratios": [{key: getattr(each, key) for key in keys} for each in ratios(bench_run, pairs)],
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
        "stolen": [(STEAL, str(os.getpid()), str(seed))],
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
    """Alternate between busy and idle, each for 0.2 to 3 seconds."""
    return (
        "import random, time\n"
        f"r = random.Random({seed})\n"
        "while True:\n"
        "    end = time.monotonic() + r.uniform(0.2, 3)\n"
        "    while time.monotonic() < end: pass\n"
        "    time.sleep(r.uniform(0.2, 3))\n"
    )


def between(ratio: dict[str, Any]) -> tuple[float, float]:
    """What is claimed of a ratio: its interval, or its bounds."""
    low, high = ratio["ci95"] if ratio["decided"] else ratio["bounds"]
    return low or 0.0, math.inf if high is None else high


def claims(ratio: dict[str, Any]) -> bool:
    return between(ratio) != (0.0, math.inf)


def holds(ratio: dict[str, Any]) -> bool:
    low, high = between(ratio)
    return low <= TRUTHS[ratio["a"]] <= high


def said(found: dict[str, Any]) -> str:
    texts = []
    for each in found["ratios"]:
        low, high = between(each)
        texts.append(f"{each['a']} {each['ratio']:.2f} [{low:.2f}, {high:.2f}] {each['verdict']}")
    return f"{found['target']}: {'; '.join(texts)}; {found['rounds']} rounds, {found['seconds']:.0f} s"


def table(contests: Sequence[dict[str, Any]]) -> list[str]:
    """Per kind: how many contests end with the engine faster than the doubled one, or ahead of it; of the claims, how
    many are true (with Wilson's 95 % interval); how often one of two equal engines is called faster."""
    head = ("beside", "contests", "faster", "ahead", "true of what is claimed", "equal, but faster", "seconds")
    lines = ["{:<16}{:>9}{:>9}{:>7}  {:<28}{:>18}{:>9}".format(*head)]
    for kind in (*KINDS, "all"):
        chosen = [each for each in contests if kind in (each["kind"], "all")]
        if not chosen:
            continue
        every = [ratio for contest in chosen for ratio in contest["ratios"]]
        doubled = [each["verdict"] for each in every if each["a"] == DOUBLED]
        claimed = [each for each in every if claims(each)]
        true = sum(map(holds, claimed))
        low, high = wilson(true, len(claimed)) if claimed else (0.0, 1.0)
        share = f"{true} of {len(claimed)} [{100 * low:.0f} %, {100 * high:.0f} %]"
        wrong = sum(each["a"] == AGAIN and not between(each)[0] <= 1 <= between(each)[1] for each in every)
        seconds = sum(each["seconds"] for each in chosen) / len(chosen)
        lines.append(
            f"{kind:<16}{len(chosen):>9}{doubled.count('slower'):>9}{doubled.count('seems slower'):>7}  {share:<28}"
            f"{wrong:>18}{seconds:>9.0f}"
        )
    return lines


def bench_seconds(argv: Sequence[str]) -> float:
    """How long the bench of a run took: from the line that names it, waits included, to its context."""
    begun = ended = 0.0
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            begun = begun or (time.monotonic() if " to measure, " in line else 0.0)
            ended = ended or (time.monotonic() if line.startswith("context") else 0.0)
    return ended - begun


def demos(work: Path, count: int, loops: int) -> Iterator[str]:
    """Run `make demo` `count` times beside busy loops: the grade of each verdict, and the seconds of its bench."""
    grades: list[str] = []
    alone: dict[str, float] = {}
    true: list[bool] = []
    for number in range(count + 1):
        bench = 0.0
        busy = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops if number else 0)]
        out = work / "demo"
        try:  # the first run makes the stages, so that the others are their bench alone
            bench = bench_seconds([*command("run", ROOT / "recipes/digits.yaml"), "-o", str(out)])
        finally:
            for other in busy:
                other.kill()
                other.wait()
        found = json.loads((out / "report.json").read_text(encoding="utf-8"))
        verdict, facts = found["verdict"], found["bench"]
        first = verdict["recommended"] or verdict["leading"]
        latencies = [ratio for ratio in facts["ratios"] if ratio["metric"] == "latency"]
        ratios = {ratio["a"]: ratio for ratio in latencies if ratio["b"] == "original"}
        if number == 0:
            alone = {name: 1 / ratio["ratio"] for name, ratio in ratios.items()}
            yield f"alone: {verdict['sentence']} {', '.join(f'{name} {times:.2f}' for name, times in alone.items())}"
            continue
        claimed = 1 / ratios[first]["bounds"][1] if first and ratios[first]["bounds"][1] else 0.0
        true.append(claimed <= alone[first] if first else True)
        grades.append(verdict["grade"])
        yield (
            f"{number}: {verdict['grade']}: {first}, at least {claimed:.2f}; {verdict['sentence']} "
            f"(bench {bench:.0f} s, {facts['protocol']['rounds']} rounds)"
        )
    yield f"{len(grades) - grades.count('no ranking')} of {len(grades)} recommend or name a leader, beside {loops}"
    yield f"{sum(true)} of {len(true)} claim no more than what holds alone"


if __name__ == "__main__":
    main()
