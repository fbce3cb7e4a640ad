"""Latency and throughput, measured: one process per artifact, in alternating blocks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.artifacts import ArtifactLike, artifact_name, check_early, opened
from vitdeploy.api.bench_lines import bench_lines
from vitdeploy.api.plots import latency_plots
from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.shown import Shown
from vitdeploy.api.tables import Line
from vitdeploy.errors import InputError

if TYPE_CHECKING:
    from vitdeploy.benchmark.protocol import Protocol
    from vitdeploy.document.bench import BenchDocument, Ratio
    from vitdeploy.workflows.on_devices import Outcome

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, repr=False)
class Benchmark(Shown):
    """The measurements of some artifacts in one benchmark run; `document` has everything. `device`: the registered one
    that measured, "" for this machine."""

    document: BenchDocument
    device: str = ""

    @property
    def latency_ms(self) -> dict[str, float]:
        """The median latency of each artifact, in milliseconds."""
        return {row.artifact: row.latency_ms.p50 for row in self.document.results}

    @property
    def throughput(self) -> dict[str, float]:
        """Images per second of each artifact."""
        return {row.artifact: row.throughput for row in self.document.results}

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """Each artifact against the last one, with the 95 % interval; where `decided` is False, the measurement does
        not say which is faster."""
        return self.document.ratios

    def lines(self) -> list[Line]:
        return bench_lines(self.document)

    def plots(self) -> list[str]:
        return latency_plots(self.document)


def _protocol(scenarios: Sequence[str], batch: Sequence[int], duration: float, warmup: float, threads: int) -> Protocol:
    from vitdeploy.benchmark import protocol

    return protocol.Protocol(
        scenarios=tuple(scenarios), batch=tuple(batch), duration=duration, warmup=warmup, threads=threads
    )


def bench(
    *artifacts: ArtifactLike,
    target: str | None = None,
    scenarios: Sequence[str] = ("single", "offline"),
    batch: Sequence[int] = (1, 8),
    duration: float = 10.0,
    warmup: float = 0.5,
    percentiles: Sequence[float] = PERCENTILES,
    threads: int = 0,
    trust: str | Path | None = None,
    accept_known_bad: Sequence[str] = (),
    progress: bool | Reporter = True,
) -> Benchmark:
    """Measure latency and throughput: one process per artifact, in alternating blocks. Each is compared with the last.

    Args:
        artifacts: bundles (with all their engines), graphs, and models, as values, paths or names.
        target: which engine of a bundle, by target or name, or what a graph is compiled for.
        scenarios: "single", "offline", "server:QPS" (Poisson arrivals), "sustain:TIME" such as "sustain:10m".
        batch: the batch of all scenarios, and that of "offline".
        duration: seconds an artifact and scenario; up to three times that where a ratio is not clear.
        warmup: least seconds of warm-up in each process.
        percentiles: of latency.
        threads: 0 leaves the number to each runtime.
        trust: bundles must be signed by this public key or certificate (PEM).
        accept_known_bad: ids of the table of runtimes known to be wrong that are no reason to refuse a graph.
        progress: as for `vitdeploy.export`.

    Raises:
        InputError: no artifact. WorkerError: a measuring process died. Errors of engines.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, graph, scenarios=["single"], duration=0.1, progress=False)
    >>> len(found.latency_ms), len(found.ratios)
    (2, 1)
    """
    from vitdeploy.pipeline.early import check_engine

    if not artifacts:
        raise InputError("there is nothing to measure", wanted="at least one artifact")
    protocol, reporter = _protocol(scenarios, batch, duration, warmup, threads), reporting(progress)
    if target is not None:
        check_engine(target)
    for each in artifacts:
        check_early(each)

    from vitdeploy.workflows.comparison import bench_subjects

    identity = Path(trust) if trust is not None else None
    with reporter, opened(target=target, trust=identity, accepted=accept_known_bad, proven=True) as find:
        subjects = [subject for each in artifacts for subject in find(each)]
        return Benchmark(bench_subjects(subjects, protocol, reporter.progress, percentiles))


def bench_on(
    on: str,
    *artifacts: ArtifactLike,
    target: str | None = None,
    scenarios: Sequence[str] = ("single", "offline"),
    batch: Sequence[int] = (1, 8),
    duration: float = 10.0,
    warmup: float = 0.5,
    percentiles: Sequence[float] = PERCENTILES,
    threads: int = 0,
    trust: str | Path | None = None,
    accept_known_bad: Sequence[str] = (),
    progress: bool | Reporter = True,
) -> list[Outcome[Benchmark]]:
    """Like `bench`, on each of the registered devices that `on` names: they build and measure the engines themselves,
    at the same time. A device's error is in its outcome; so is a runtime there that is known to compute an artifact
    wrongly, unless its entry is in `accept_known_bad`."""
    from vitdeploy.devices.registry import find_devices
    from vitdeploy.known_bad.find import check_ids
    from vitdeploy.workflows import on_devices
    from vitdeploy.workflows.device_artifact import find_device_artifacts

    check_ids(accept_known_bad)
    protocol = _protocol(scenarios, batch, duration, warmup, threads)
    devices, reporter = find_devices(on), reporting(progress)
    with reporter, tempfile.TemporaryDirectory(prefix="vitdeploy-") as work:
        found = [
            each
            for artifact in artifacts
            for each in find_device_artifacts(
                artifact_name(artifact) or "",
                target=target,
                work=Path(work),
                trust=Path(trust) if trust is not None else None,
                golden=not accept_known_bad,
            )
        ]
        outcomes = on_devices.bench_on(
            found, protocol, percentiles, devices, reporter.progress, reporter.note, accept_known_bad
        )
    return [
        on_devices.Outcome(
            each.device, Benchmark(each.found, each.device.name) if each.found is not None else None, each.error
        )
        for each in outcomes
    ]
