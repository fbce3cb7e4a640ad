"""The latencies of many engines, in one benchmark run of short blocks; those that matter are measured again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.benchmark.candidate import engine_candidate
from vitdeploy.benchmark.decided import disturbed_reason, judged
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.run import run_benchmark
from vitdeploy.benchmark.summary import block_medians
from vitdeploy.progress import Progress
from vitdeploy.stages.engines import read_engine
from vitdeploy.stages.files import read_json, write_json
from vitdeploy.stages.step import Folders, Step
from vitdeploy.stages.target_tools import target_tools

if TYPE_CHECKING:
    from vitdeploy.store.store import Artifact

SCREEN, SCREEN_FILE = "compare the latencies", "screen.json"
BLOCK_SECONDS, WARMUP_SECONDS = 0.2, 0.5


def screen_step(batch: int, engines: Mapping[str, Artifact]) -> Step:
    """The latencies of compiled engines by name, at `batch`."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        bench_candidates = [
            engine_candidate(read_engine(artifact.path), artifact.path, name) for name, artifact in engines.items()
        ]
        protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, batch=batch)
        bench_run = run_benchmark(bench_candidates, protocol, lambda text, done, total: progress(SCREEN, done, total))
        disturbed = disturbed_reason(bench_run)
        faster = _proven_faster(bench_run) if disturbed else {}
        write_json(
            out / SCREEN_FILE,
            {"block_medians_ms": block_medians(bench_run), "disturbed": disturbed, "faster": faster},
        )

    tools: dict[str, str] = {}
    for target in sorted({read_engine(artifact.path).target for artifact in engines.values()}):
        tools |= target_tools(target)
    return Step(
        SCREEN,
        "screen",
        write,
        {"batch": batch, "engines": list(engines)},
        outside={name: artifact.digest for name, artifact in engines.items()},
        packages=tools,
        measured=True,
        usable=lambda folder: not read_json(folder / SCREEN_FILE)["disturbed"],
    )


def _proven_faster(bench_run: BenchRun) -> dict[str, list[str]]:
    """For each artifact those that it is proven to be faster than, whatever disturbed the measurement of others."""
    names, scenario = [entry.artifact for entry in bench_run.entries], bench_run.protocol.latency_scenario
    faster: dict[str, list[str]] = {}
    for name in names:
        against = {other: judged(bench_run, name, other, scenario) for other in names if other != name}
        highest = {other: pair.ratio.interval[2] if pair.decided else pair.bounds[1] for other, pair in against.items()}
        faster[name] = [other for other, high in highest.items() if high is not None and high < 1]
    return faster
