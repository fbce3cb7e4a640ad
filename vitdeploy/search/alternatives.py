"""Times engines of one function against each other, and says which is surely faster than the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark.candidate import BenchCandidate, engine_candidate
from vitdeploy.benchmark.decided import disturbed_reason
from vitdeploy.benchmark.paired import medians_of, ratio_of_rounds
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.quiet import together
from vitdeploy.benchmark.results import BenchRun, Round
from vitdeploy.benchmark.run import run_benchmark
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.spec import FloatRest, Precision
from vitdeploy.verification.intervals import student

# A claim of a few percent needs more than one process of each: processes differ by as much.
ROUNDS, BLOCK_SECONDS, WARMUP_SECONDS, PROCESSES = 16, 0.25, 0.5, 4
LEVEL = 0.95


@dataclass(frozen=True)
class Timing:
    """Median latencies, round by round, and their ratio to those of the first engine with its interval; the first's own
    is 1."""

    rounds_ms: tuple[float, ...]
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0


def compiled(
    graph: Path,
    out: Path,
    target: str,
    precision: Precision,
    batch: int,
    placed: int,
    name: str,
    float_rest: FloatRest = "fp32",
) -> BenchCandidate:
    """The engine of a placed graph, in the new folder `out`, as a candidate of that name.

    Args:
        placed: how many linears and convolutions the graph has in INT8.

    Raises:
        CapabilityError, EngineError: as `compile_engine`.
    """
    out.mkdir()
    engine = compile_engine(
        graph, out, target=target, precision=precision, batch=batch, placed=placed, float_rest=float_rest
    )
    return engine_candidate(engine, out, name)


def time_alternatives(
    candidates: Sequence[BenchCandidate], progress: Callable[[int, int], None]
) -> tuple[list[Timing], str]:
    """The engines in alternating blocks, and why their times are unreliable, "" if nothing says so.

    Raises:
        WorkerError: as `run_benchmark`.
    """
    return judged(run_benchmark(candidates, in_turns(), lambda text, done, total: progress(done, total)))


def in_turns() -> Protocol:
    """How alternatives are measured, here and on devices."""
    return Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS, processes=PROCESSES)


def judged(bench_run: BenchRun) -> tuple[list[Timing], str]:
    """The timings of a benchmark run under `in_turns`, its first artifact's first, and why they are unreliable, "" if
    nothing says so."""
    rounds = together(bench_run.protocol, bench_run.entries, bench_run.protocol.latency_scenario)
    return timings_of(rounds), disturbed_reason(bench_run)


def timings_of(measured: Sequence[Sequence[Round]]) -> list[Timing]:
    """The timings from the rounds that all engines share, the first engine's first. The intervals hold jointly at 95 %
    (Bonferroni)."""
    reference, *others = measured
    level = 1 - (1 - LEVEL) / max(len(others), 1)
    return [Timing(tuple(medians_of(reference))), *(_compared(each, reference, level) for each in others)]


def _compared(rounds: Sequence[Round], reference: Sequence[Round], level: float) -> Timing:
    found = ratio_of_rounds(rounds, reference)
    wider = math.exp(found.bias)
    ratio, low, high = student(found.log, found.error, found.freedom, level)
    return Timing(tuple(medians_of(rounds)), ratio, low / wider, high * wider)
