"""Benchmarks: the artifacts to compare, and their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api import calls, values
from vitdeploy.api.artifacts import ArtifactLike, Bundle, Graph, Model, Named, artifact_name
from vitdeploy.api.model import model
from vitdeploy.api.options import (
    Bench,
    BenchKeywords,
)
from vitdeploy.benchmark import protocol, summary
from vitdeploy.benchmark.results import Claim
from vitdeploy.document.bench import BenchDocument
from vitdeploy.models.model_folder.hub import is_hub_name
from vitdeploy.spec import bound_words
from vitdeploy.workflows.comparison import bench_subjects
from vitdeploy.workflows.subjects import Finder, Subject, opened, original_subject

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from vitdeploy.document.comparison import TimeRatio


# --- Print a bench: one line per artifact, then results other than latency, then the comparisons ----------------------


STAGES = ("decode", "preprocess", "copy_in", "execute", "copy_out", "infer", "postprocess")


def bench_lines(document: BenchDocument) -> list[values.Line]:
    """The tables of a bench of `pipeline.comparison.bench_subjects`."""
    results = document.results
    lines: list[values.Line] = [_latencies(results)]
    for row in results:
        lines += [f"{row.artifact}: {text}" for text in _special(row.scenarios)]
    lines += [*summary.machine_remarks(results), _sides(results)]
    for row in results:
        if row.stages_ms is not None:
            lines.append(f"{row.artifact}: {_stages(row.stages_ms)}")
        if row.parts_ms:
            parts = ", ".join(f"{name} {value:.2f}" for name, value in row.parts_ms.items())
            lines.append(f"{row.artifact}: graphs in ms: {parts}; whole query {row.latency_ms.p50:.2f}")
    lines += values.context_lines(document.context)
    lines += [f"{ratio.metric} {ratio.a} / {ratio.b}: {_compared(ratio)}" for ratio in document.ratios]
    lines += [f"{artifact}: not decided: {reason}" for artifact, reason in document.undecided.items()]
    return [*lines, *document.remarks]


def ratio_text(ratio: summary.Ratio | TimeRatio, digits: int = 2) -> str:
    """A ratio with its interval if it is decided, else its bounds."""
    return (
        values.interval(ratio.ratio, ratio.ci95, digits)
        if ratio.decided
        else bound_words(ratio.bounds) or "not decided"
    )


def _compared(ratio: summary.Ratio) -> str:
    if not ratio.decided and ratio.bounds == (None, None):
        return ratio.verdict
    if not ratio.decided:
        return f"{ratio_text(ratio)}: {ratio.verdict} (the machine was not quiet)"
    beside = f"{ratio.a_ms:.4g} vs {ratio.b_ms:.4g} ms per query, alternating runs"
    return f"{ratio_text(ratio, 3)}: {ratio.verdict} ({beside})"


def claim(percentile: Claim, digits: int = 3) -> str:
    """A percentile as text; ">=" if too few queries were measured for an upper bound."""
    if percentile.value is None:
        return "-"
    return f"{'>=' if percentile.at_least else ''}{percentile.value:.{digits}f}"


def claims_of(row: summary.Row) -> Sequence[Claim]:
    """The percentiles of the scenario that gave a row's latency."""
    scenarios = row.scenarios
    return scenarios.get("single", next(iter(scenarios.values()))).percentiles


def _latencies(results: Sequence[summary.Row]) -> values.Table:
    names = [f"{each.name} ms" for each in claims_of(results[0])]
    columns = (
        values.Column("artifact"),
        *(values.Column(name, 100 if not index else 60 - index, least=9) for index, name in enumerate(names)),
        values.Column("mean ms", 20, least=9),
        values.Column("images/s", 80, least=9),
        values.Column("flags", 90, left=True),
    )
    rows = [
        (
            row.artifact,
            *map(claim, claims_of(row)),
            f"{row.latency_ms.mean:.3f}",
            f"{row.throughput:.1f}",
            " ".join(row.flags),
        )
        for row in results
    ]
    return values.Table(columns, tuple(rows))


def _special(scenarios: Mapping[str, summary.ScenarioResult]) -> list[str]:
    """Results of "server" and "sustain" other than percentiles, and blocks in which the machine throttled."""
    lines = []
    for name, found in scenarios.items():
        if found.unanswered is not None and found.busy is not None:
            latencies = ", ".join(f"{percentile.name} {claim(percentile)}" for percentile in found.percentiles)
            lines.append(
                f"{name}: {latencies} ms from arrival; {found.queries - found.unanswered} of {found.queries} "
                f"queries answered in {found.seconds:.1f} s, busy {100 * found.busy:.0f} % of the time"
            )
        if found.bins is not None:
            lines.append(
                f"{name}: first {found.first:.1f} images/s, last {found.last:.1f} ({found.last_over_first:.3f})"
            )
        if found.throttled is not None:
            lines.append(f"{name}: {found.throttled}")
    return lines


def _sides(results: Sequence[summary.Row]) -> values.Table:
    """Loading, memory and energy."""
    columns = (
        values.Column("artifact"),
        values.Column("load s", 80),
        values.Column("again s", 40),
        values.Column("first ms", 60, least=8),
        values.Column("peak memory", 90),
        values.Column("threads", 30),
        values.Column("energy/image", 50, left=True),
    )
    rows = []
    for row in results:
        again, memory = row.warm_load_seconds, row.peak_memory_bytes
        joules, source = row.energy.joules_per_image, row.energy.source
        rows.append(
            (
                row.artifact,
                f"{row.load_seconds:.2f}",
                "" if again is None else f"{again:.2f}",
                f"{row.first_inference_ms:.2f}",
                "unknown" if memory is None else values.human_bytes(memory),
                str(row.machine.engine_threads or "") if row.machine is not None else "",
                source if joules is None else f"{joules:.3g} J ({source})",
            )
        )
    return values.Table(columns, tuple(rows))


def _stages(stages: summary.StageTimes) -> str:
    parts = ", ".join(f"{name} {value:.2f}" for name in STAGES if (value := getattr(stages, name)) is not None)
    return (
        f"end to end from a uint8 image of 640x480: {stages.end_to_end:.2f} ms "
        f"(p90 {stages.end_to_end_p90:.2f}); stages in ms: {parts}; copies {stages.copies}"
    )


# --- Measure latency and throughput: one process per artifact, in alternating blocks ----------------------------------


@dataclass(frozen=True, repr=False)
class Benchmark(values.Shown):
    """The measurements of one benchmark run; `document` has everything. `device`: the registered device that measured,
    "" for this machine."""

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
    def ratios(self) -> tuple[summary.Ratio, ...]:
        """The ratio of each artifact to the last one, with a 95 % interval; if `decided` is False, the measurement does
        not show which is faster."""
        return self.document.ratios

    def lines(self) -> list[values.Line]:
        return bench_lines(self.document)

    def plots(self) -> list[str]:
        return values.latency_plots(self.document)


def _bench(options: Bench) -> Benchmark:
    reporter, trust = values.reporting(options.progress), path_or_none(options.trust)
    accepted = options.accept_known_bad
    with reporter, opened(target=options.target, trust=trust, accepted=accepted, proven=True) as finder:
        subjects = [subject for artifact in options.artifacts for subject in found_by(finder, artifact)]
        return Benchmark(bench_subjects(subjects, bench_protocol(options), reporter.progress, options.percentiles))


@calls.documented(Bench, many="artifacts")
def bench(*artifacts: ArtifactLike, **options: Unpack[BenchKeywords]) -> Benchmark:
    """Measure latency and throughput: one process per artifact, in alternating blocks. Each is compared with the last.

    Raises:
        InputError: no artifact. WorkerError: a measuring process died. Errors of engines.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, graph, scenarios=["single"], duration=0.1, progress=False)
    >>> len(found.latency_ms), len(found.ratios)
    (2, 1)
    """
    chosen = Bench(artifacts, **options)
    calls.check_early(chosen)
    return _bench(chosen)


bench.of = _bench  # type: ignore[attr-defined]


def bench_protocol(options: Bench) -> protocol.Protocol:
    return protocol.Protocol(
        scenarios=tuple(options.scenarios),
        batch=tuple(options.batch),
        duration=options.duration,
        warmup=options.warmup,
        threads=options.threads,
    )


def path_or_none(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


# --- What can be measured: every engine of a bundle, a graph, a model; as values or names -----------------------------


def found_by(finder: Finder, artifact: ArtifactLike) -> list[Subject]:
    """The subjects of an artifact: every engine of a bundle, a graph, an original."""
    name = artifact_name(artifact)
    if name is None:
        return [_original(model(artifact))]  # type: ignore[arg-type]
    source = artifact.source if isinstance(artifact, Named) else None
    return [_shortened(each, artifact) for each in finder.find(name, source)]


def _original(read: Model) -> Subject:
    """The subject of a loaded model. If its preprocessing is only assumed, that of the other side is used."""

    from vitdeploy.stages.export import settle_batch  # torch

    source = read.source
    reference, batch = settle_batch(read.reference)
    own = read.overrides.preprocess is not None or is_hub_name(source.name)
    return original_subject(read.name, reference, own=own, noted=batch is not None)


def _shortened(subject: Subject, artifact: ArtifactLike) -> Subject:
    """A subject in a temporary folder is named by its kind, not by the path."""
    if not isinstance(artifact, Bundle | Graph) or not values.is_unnamed(artifact.folder):
        return subject
    return dataclasses.replace(subject, name=subject.name.replace(str(artifact.folder), artifact.folder.name))
