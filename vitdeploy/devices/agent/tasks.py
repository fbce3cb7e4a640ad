"""Perform jobs: benchmark engines, build an engine to send back, try a release of a deployment."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from vitdeploy.benchmark import run, survey
from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.compilation.engine import compile_engine, joined, within
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, JobResult, Kind, PlacedArtifact, explained, failure
from vitdeploy.devices.agent.rollout import stage, switch
from vitdeploy.errors import VitdeployError
from vitdeploy.progress import Progress
from vitdeploy.runtime import backend, golden
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host, require_real_times
from vitdeploy.spec import EngineSpec, FileEntry, encode


def perform(job: DeviceJob, folder: Path, products: Path, progress: Progress) -> JobResult:
    """Perform the job whose files are in `folder`; return its result. `products`: a new folder for the output files.

    Raises:
        VitdeployError: no artifact of the job works here.
    """
    return KINDS[job.kind](job, folder, products, progress)


def _bench(job: DeviceJob, folder: Path, products: Path, progress: Progress) -> JobResult:
    """Benchmark all working artifacts in one run; raise the error of the first if none works."""
    assert job.protocol is not None
    require_real_times()  # before anything is built
    engines: dict[str, EngineSpec] = {}
    bench_candidates, errors = [], []
    for index, placed in enumerate(job.artifacts):
        progress(f"build {placed.name}", index, len(job.artifacts))
        try:
            with explained():
                engine, home = make_engine(placed, folder, products / str(index), job.build, progress)
                _require_answers(placed, folder, engine, home)
        except VitdeployError as error:
            errors.append((placed.name, error))
            continue
        engines[placed.name] = engine
        bench_candidates.append(run.engine_candidate(engine, home, placed.name, images=placed.images))
    if not bench_candidates:
        raise errors[0][1]
    pairs = run.against_last([bench_candidate.artifact for bench_candidate in bench_candidates])
    bench_run = run.run_benchmark(bench_candidates, job.protocol, progress, pairs=pairs)
    bench_run = survey.surveyed(bench_run, bench_candidates, progress)
    left_out = tuple(failure(name, error) for name, error in errors)
    return JobResult(FORMAT, job.digest, describe_host(), engines, left_out, encode(bench_run))


def _require_answers(placed: PlacedArtifact, folder: Path, engine: EngineSpec, home: Path) -> None:
    """Check that an engine that was built here gives the golden answers of its bundle.

    Raises:
        AnswersError: it does not.
    """
    if placed.golden is None:
        return
    bundle = folder / placed.golden
    manifest = read_bundle(bundle)
    failed = manifest.gate(engine) in golden.UNPROVEN
    with make_runner(home, engine) as runner:
        golden.require_golden_answers(bundle, manifest, engine, runner, allow_failed=failed)


def _compile(job: DeviceJob, folder: Path, products: Path, progress: Progress) -> JobResult:
    """Build the engine of the only artifact; return it with its files, except the graphs of the job."""
    (placed,) = job.artifacts
    engine, home = make_engine(placed, folder, products, job.build, progress)
    _require_answers(placed, folder, engine, home)
    names = sorted(name for name in engine.files if not name.endswith((".onnx", ".onnx.data")))
    files = tuple(FileEntry(name, (home / name).stat().st_size, file_sha256(home / name)) for name in names)
    return JobResult(FORMAT, job.digest, describe_host(), {placed.name: engine}, files=files)


KINDS: dict[Kind, Callable[[DeviceJob, Path, Path, Progress], JobResult]] = {
    "bench": _bench,
    "compile": _compile,
    "stage": stage,
    "switch": switch,
}


# --- Build the engines of a job from its placements -------------------------------------------------------------------


def make_engine(
    placed: PlacedArtifact, job: Path, out: Path, build: BuildOptions | None, progress: Progress
) -> tuple[EngineSpec, Path]:
    """Return the engine and the folder of its files: `out` (new), or that of a plan that was built here before.

    Raises:
        VitdeployError: as `compile_engine`; MissingPackageError if the target's runtime is not installed here.
    """
    plan = placed.plan
    if plan is not None and backend.loads_here(job, plan):
        return plan, job
    parts = []
    for graph in placed.graphs:
        folder = out if len(placed.graphs) == 1 else out / graph.part
        folder.mkdir(parents=True)
        engine = compile_engine(
            job / graph.file,
            folder,
            target=placed.target,
            precision=graph.precision or placed.precision,
            batch=placed.batch,
            placed=graph.placed,
            build=build,
            progress=progress,
            float_rest=placed.float_rest or "fp32",
        )
        parts.append(engine if len(placed.graphs) == 1 else within(engine, graph.part))
    whole = parts[0] if len(parts) == 1 else joined(parts, placed.sequence)
    return dataclasses.replace(whole, weight_bits=placed.weight_bits, row_parts=placed.row_parts), out
