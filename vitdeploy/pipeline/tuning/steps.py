"""The steps that only `tune` takes: each is stored, so that an interrupted search goes on where it stopped."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from vitdeploy.bench.candidate import engine_candidate
from vitdeploy.bench.decided import disturbed_reason
from vitdeploy.bench.protocol import Protocol
from vitdeploy.bench.run import run_benchmark
from vitdeploy.bench.summary import block_medians
from vitdeploy.pipeline.job import Job, tool_versions
from vitdeploy.pipeline.plan import OPTIMIZE, Candidate, Folders, Step, target_tools
from vitdeploy.pipeline.progress import Progress
from vitdeploy.pipeline.stages.compile import read_engine
from vitdeploy.pipeline.stages.files import MODEL_FILE, read_json, write_json
from vitdeploy.pipeline.stages.schedules import find_schedules
from vitdeploy.pipeline.stages.score import score
from vitdeploy.search.rows import measure_rows
from vitdeploy.spec import encode
from vitdeploy.store.store import Artifact

SCREEN_FILE, ROWS_FILE = "screen.json", "rows.json"
SCREEN = "compare the latencies"
# Short blocks, for what is compared is many engines; those that matter are measured again.
BLOCK_SECONDS, WARMUP_SECONDS = 0.2, 0.5


def score_step(job: Job, candidate: Candidate, reference: Artifact) -> Step:
    """The distance of a compiled candidate from the float graph in `reference`."""
    graph = reference.path / MODEL_FILE

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        score(graph, folders[candidate.step("compile")].path, job.data.calibration, out, progress)

    return Step(
        candidate.step("score"),
        "score",
        write,
        {},
        (candidate.step("compile"),),
        {"images": job.data.calibration_digest, "reference": reference.digest},
        {**target_tools(candidate.target), **tool_versions(("onnxruntime", "pillow", "numpy", "scipy"))},
    )


def schedules_step(job: Job, target: str) -> Step:
    """Schedules of token merging for the job's float graph."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        find_schedules(target, folders[OPTIMIZE].path / MODEL_FILE, job.data.calibration, out, progress)

    return Step(
        f"schedules {target}",
        "schedules",
        write,
        {"target": target},
        (OPTIMIZE,),
        {"images": job.data.calibration_digest},
        {**target_tools(target), **tool_versions(("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy"))},
        measured=True,
    )


def rows_step(target: str) -> Step:
    """The number of rows that the job's float graph is fastest with in INT8."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        found = measure_rows(folders[OPTIMIZE].path / MODEL_FILE, target, progress=progress)
        write_json(out / ROWS_FILE, encode(found))

    return Step(
        f"rows {target}",
        "rows",
        write,
        {"target": target},
        (OPTIMIZE,),
        tools={**target_tools(target), **tool_versions(("onnx-ir", "numpy"))},
        version=2,
        measured=True,
        usable=lambda folder: not read_json(folder / ROWS_FILE)["disturbed"],
    )


def screen_step(job: Job, engines: Mapping[str, Artifact]) -> Step:
    """The latencies of all compiled engines by name, in one benchmark run."""

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        bench_candidates = [
            engine_candidate(read_engine(artifact.path), artifact.path, name) for name, artifact in engines.items()
        ]
        protocol = Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, batch=job.recipe.engine_batch)
        bench_run = run_benchmark(bench_candidates, protocol, lambda text, done, total: progress(SCREEN, done, total))
        found = {"block_medians_ms": block_medians(bench_run), "disturbed": disturbed_reason(bench_run)}
        write_json(out / SCREEN_FILE, found)

    targets = {read_engine(artifact.path).target for artifact in engines.values()}
    tools: dict[str, str] = functools.reduce(lambda found, target: found | target_tools(target), sorted(targets), {})
    return Step(
        SCREEN,
        "screen",
        write,
        {"batch": job.recipe.engine_batch, "engines": list(engines)},
        (),
        {name: artifact.digest for name, artifact in engines.items()},
        tools,
        version=2,
        measured=True,
        usable=lambda folder: not read_json(folder / SCREEN_FILE)["disturbed"],
    )
