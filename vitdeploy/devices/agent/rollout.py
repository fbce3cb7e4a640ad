"""Try a release of a deployment on the device: its golden answers, and its p99 against that of the current release.

`stage` installs it without moving the link. `switch` moves the link, tries the release again through the link, as apps
load it, and moves the link back if it fails.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path

from vitdeploy.benchmark import results, tail
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate, run_benchmark
from vitdeploy.bundle.read import read_bundle
from vitdeploy.devices.agent.documents import FORMAT, DeviceJob, GoldenResult, JobResult, Tried, explained
from vitdeploy.devices.agent.releases import DeploymentFolder
from vitdeploy.errors import HostError, VitdeployError
from vitdeploy.progress import Progress
from vitdeploy.runtime.choice import select_engines, usable_engines
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import GoldenCheck, check_golden
from vitdeploy.runtime.host import describe_host, require_real_times
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import EngineSpec, Manifest, encode

# The two artifacts of a comparison, and the folder of a job with the files of a release.
NEW, CURRENT, SENT = "new", "current", "release"


class _NotKept(Exception):
    """The release failed when loaded through the link."""


def stage(job: DeviceJob, folder: Path, products: Path, progress: Progress) -> JobResult:
    """Install a complete release, and try it next to the current one. Apps are not affected.

    Raises:
        VitdeployError: the release is incomplete, or none of its engines works here.
    """
    options = job.release
    assert options is not None
    require_real_times()
    place = DeploymentFolder(options.deployment)
    progress("check files", 0, 3)
    with place.held():
        found = place.standing(options.expected, options.counter)
        place.keep(found.current, found.previous, options.release)
        place.add(options.release, options.files, folder / SENT)
    new = place.folder_of(options.release)
    before = found.current if found.current != options.release else ""
    old = place.folder_of(before) if before else None
    tried, bench_run = _tried(new, old, options.target, job.protocol, progress)
    return _result(job, tried, bench_run)


def switch(job: DeviceJob, folder: Path, products: Path, progress: Progress) -> JobResult:
    """Move the link to an installed release, and keep it there if the release is correct and not slower.

    Raises:
        VitdeployError: another process moved the link, or none of its engines works here. The link is unchanged.
    """
    options = job.release
    assert options is not None
    place = DeploymentFolder(options.deployment)
    tried, bench_run = None, None
    with contextlib.suppress(_NotKept):
        with place.moved(options.release, options.expected, options.counter) as (link, before):
            tried, bench_run = _tried(link, before, options.target, job.protocol, progress)
            if not tried.golden.ok or (
                bench_run is not None
                and not tried.alone
                and tail.tail_of(bench_run, NEW, CURRENT).slower(options.worse)
            ):
                raise _NotKept
        tried = Tried(tried.engine, tried.golden, True, tried.alone)
    assert tried is not None
    return _result(job, tried, bench_run)


def _result(job: DeviceJob, tried: Tried, bench_run: results.BenchRun | None) -> JobResult:
    run = None if bench_run is None else encode(bench_run)
    return JobResult(FORMAT, job.digest, describe_host(), bench_run=run, tried=tried)


def _tried(
    new: Path, before: Path | None, target: str, protocol: Protocol | None, progress: Progress
) -> tuple[Tried, results.BenchRun | None]:
    """Check the answers of the release in `new`; if they are correct and there is a protocol, also measure it."""
    progress("golden answers", 1, 3)
    manifest = read_bundle(new)
    with _loaded(new, manifest, target) as (engine, runner):
        golden = _golden(check_golden(new, manifest, engine, runner))
    if not golden.ok or protocol is None:
        return Tried(engine.artifact, golden), None
    candidates, alone = [engine_candidate(engine, new, NEW)], "no previous release"
    if before is not None:
        alone = ""
        try:
            candidates.append(_candidate(before, target, protocol))
        except VitdeployError as error:  # for example after an update of the runtime; the new release may fix it
            alone = f"the current release does not work: {error.message}"
    pairs = [(NEW, CURRENT)] if len(candidates) > 1 else []
    return Tried(engine.artifact, golden, alone=alone), run_benchmark(candidates, protocol, progress, pairs=pairs)


def _candidate(folder: Path, target: str, protocol: Protocol) -> BenchCandidate:
    """Return the current release as a candidate, after loading it at the measured batch size."""
    manifest, batch = read_bundle(folder), protocol.batch_of(protocol.latency_scenario)
    with _loaded(folder, manifest, target, batch) as (engine, _):
        return engine_candidate(engine, folder, CURRENT)


@contextlib.contextmanager
def _loaded(
    folder: Path, manifest: Manifest, target: str, batch: int | None = None
) -> Iterator[tuple[EngineSpec, Runner]]:
    """Load the engine that an app would get: the first, in the manifest's order, that loads here. The caller checks its
    answers, so that a wrong engine is not silently skipped.

    Raises:
        HostError: no engine loads here; the error of the first one.
    """
    errors: list[HostError] = []
    for engine in usable_engines(manifest, select_engines(manifest, target)):
        runner = make_runner(folder, engine, batch=batch)
        try:
            with explained():
                runner.load()
        except HostError as error:
            runner.close()
            errors.append(error)
            continue
        with runner:
            yield engine, runner
        return
    raise errors[0]


def _golden(found: GoldenCheck) -> GoldenResult:
    difference = found.difference if math.isfinite(found.difference) else None
    return GoldenResult(found.inputs, difference, found.tolerance, found.same, found.least_same)
