"""Performs jobs: measures engines against each other, builds one to send back, tries a release of a deployment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import against_last, engine_candidate, run_benchmark
from vitdeploy.benchmark.survey import surveyed
from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.devices.agent.build import make_engine
from vitdeploy.devices.agent.documents import FORMAT, Job, Kind, Placed, Result
from vitdeploy.devices.agent.failures import explained, failure
from vitdeploy.devices.agent.rollout import stage, switch
from vitdeploy.errors import VitdeployError
from vitdeploy.runtime.canary import UNPROVEN, require_golden_answers
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host, require_real_times
from vitdeploy.spec import EngineSpec, FileEntry, decode, encode

Progress = Callable[[str, int, int], None]


def perform(job: Job, folder: Path, products: Path, progress: Progress) -> Result:
    """The result of the job whose files lie in `folder`; `products` is a new folder for what is made.

    Raises:
        VitdeployError: nothing of the job works here.
    """
    return KINDS[job.kind](job, folder, products, progress)


def _bench(job: Job, folder: Path, products: Path, progress: Progress) -> Result:
    """Every artifact that works here in one benchmark run; the error of the first, where none does."""
    require_real_times()  # before anything is built
    engines: dict[str, EngineSpec] = {}
    bench_candidates, errors = [], []
    for index, placed in enumerate(job.artifacts):
        progress(f"build {placed.name}", index, len(job.artifacts))
        try:
            with explained():
                engine, home = make_engine(placed, folder, products / str(index), job.options, progress)
                _require_answers(placed, folder, engine, home)
        except VitdeployError as error:
            errors.append((placed.name, error))
            continue
        engines[placed.name] = engine
        bench_candidates.append(engine_candidate(engine, home, placed.name, images=placed.images))
    if not bench_candidates:
        raise errors[0][1]
    pairs = against_last([bench_candidate.artifact for bench_candidate in bench_candidates])
    bench_run = run_benchmark(bench_candidates, decode(Protocol, job.options["protocol"]), progress, pairs=pairs)
    bench_run = surveyed(bench_run, bench_candidates, progress)
    left_out = tuple(failure(name, error) for name, error in errors)
    return Result(FORMAT, job.digest, describe_host(), engines, left_out, encode(bench_run))


def _require_answers(placed: Placed, folder: Path, engine: EngineSpec, home: Path) -> None:
    """Refuse an engine that was built here and does not give the golden answers of its bundle.

    Raises:
        AnswersError: it answers otherwise.
    """
    if placed.golden is None:
        return
    bundle = folder / placed.golden
    manifest = read_bundle(bundle)
    failed = manifest.gate(engine) in UNPROVEN
    with make_runner(home, engine) as runner:
        require_golden_answers(bundle, manifest, engine, runner, allow_failed=failed)


def _compile(job: Job, folder: Path, products: Path, progress: Progress) -> Result:
    """The engine of the one artifact, and its files, but for the graphs that came with the job."""
    (placed,) = job.artifacts
    engine, home = make_engine(placed, folder, products, job.options, progress)
    _require_answers(placed, folder, engine, home)
    names = sorted(name for name in engine.files if not name.endswith((".onnx", ".onnx.data")))
    files = tuple(FileEntry(name, (home / name).stat().st_size, file_sha256(home / name)) for name in names)
    return Result(FORMAT, job.digest, describe_host(), {placed.name: engine}, files=files)


KINDS: dict[Kind, Callable[[Job, Path, Path, Progress], Result]] = {
    "bench": _bench,
    "compile": _compile,
    "stage": stage,
    "switch": switch,
}
