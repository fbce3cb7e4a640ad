"""Convert documents of each kind to rows."""

import dataclasses
import datetime
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark import evidence, summary
from vitdeploy.document import comparison, sweep
from vitdeploy.document.bench import Bench, ErrorFacts
from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import Report
from vitdeploy.errors import AnswersError
from vitdeploy.history.row import Kind, ResultRow, now
from vitdeploy.runtime.host import name_host
from vitdeploy.verification.comparison import Comparison

CANDIDATE = "candidate "


@dataclass(frozen=True)
class MeasuredMachine:
    """The machine of a measurement. `environment`: `runtime.host.describe_host` with the versions of packages.
    `devices`: the back end's facts about its device, by target. `name`: of a registered device, "" for this machine."""

    environment: Mapping[str, str]
    devices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True)
class MeasuredArtifact:
    """An artifact of a benchmark: the name and digest of its model, and its name among that model's artifacts."""

    model: str
    artifact: str
    digest: str | None = None


def digest_of(files: Mapping[str, str]) -> str | None:
    """Return one sha256 for the files of a model, from their digests; None without files. File names do not matter: a
    moved file stays the same."""
    if len(files) < 2:
        return next(iter(files.values()), None)
    return hashlib.sha256("\n".join(sorted(files.values())).encode()).hexdigest()


def rows_of_report(report: Report, machine: MeasuredMachine, kind: Kind = "run") -> list[ResultRow]:
    """Return a row for each measured or verified artifact of a run."""
    measured = MeasuredMachine({**machine.environment, **report.environment}, machine.devices, machine.name)
    model, time = report.name, moment(report.created)
    digest = digest_of(report.provenance.source.sha256)
    times = {row.artifact: row for row in report.bench.results} if report.bench else {}
    engines = {engine.artifact: engine for engine in report.engines}
    found = []
    for name in dict.fromkeys([*times, *engines]):
        engine, row = engines.get(name), times.get(name)
        what = engine or row
        assert what is not None
        made = _made(kind, time, MeasuredArtifact(model, name, digest), what.target, what.precision, measured)
        made = _timed(made, row, report.bench) if row and report.bench else made
        found.append(_verified(made, engine) if engine else made)
    return found


def rows_of_bench(
    bench: Bench, names: Mapping[str, MeasuredArtifact], machine: MeasuredMachine, time: datetime.datetime
) -> list[ResultRow]:
    """Return a row for each artifact of a benchmark; `names` resolves their names."""
    found = []
    for row in bench.results:
        what = names.get(row.artifact, MeasuredArtifact(row.artifact, row.artifact))
        found.append(_timed(_made("bench", time, what, row.target, row.precision, machine), row, bench))
    return found


def rows_of_comparison(
    document: comparison.ComparisonDocument, candidate: MeasuredArtifact, machine: MeasuredMachine
) -> list[ResultRow]:
    """Return a row for each engine of the candidate, which was compared with the baseline. Engines of reports were not
    measured: their rows have only accuracies and gates."""
    measured = MeasuredMachine({**machine.environment, **document.environment}, machine.devices, machine.name)
    time, found = moment(document.created), []
    for pair in document.engines:
        artifact = pair.engine.rpartition(" → ")[2]
        row = document.bench.row(f"{CANDIDATE}{artifact}") if document.bench else None
        target, _, precision = artifact.rpartition("-")
        if row is not None:
            target, precision = row.target, row.precision
        what = MeasuredArtifact(candidate.model, artifact, candidate.digest)
        made = _made("compare", time, what, target, precision, measured if document.measured else MeasuredMachine({}))
        made = _timed(made, row, document.bench) if row and document.bench else made
        found.append(_compared(made, pair))
    return found


def rows_of_sweep(document: sweep.SweepDocument, machine: MeasuredMachine) -> list[ResultRow]:
    """Return the rows of each recipe's report, and one row for each failed recipe."""
    rows: list[ResultRow] = []
    for recipe in document.recipes:
        if recipe.report is not None:
            there = MeasuredMachine(recipe.report.environment, name=recipe.host) if recipe.host is not None else machine
            rows += rows_of_report(recipe.report, there, "sweep")
        elif recipe.error is not None:
            rows.append(_failed(recipe, recipe.error, document, machine))
    return rows


def row_of_canary(
    error: AnswersError, what: MeasuredArtifact, machine: MeasuredMachine, time: datetime.datetime
) -> ResultRow:
    """Return the row of an engine that failed its golden answers."""
    target, _, precision = what.artifact.rpartition("-")
    made = _made("canary", time, what, target, precision, machine)
    return dataclasses.replace(made, decided=False, gate="fail", error=f"{error.code}: {error.message}: {error.found}")


def moment(iso: str) -> datetime.datetime:
    """Parse a document's time, in UTC; return the current time if it is invalid."""
    try:
        # The suffix "Z" is only understood from Python 3.11 on.
        found = datetime.datetime.fromisoformat(f"{iso[:-1]}+00:00" if iso.endswith("Z") else iso)
    except ValueError:
        return now()
    utc = datetime.timezone.utc
    return found.astimezone(utc) if found.tzinfo else found.replace(tzinfo=utc)


def _failed(
    recipe: sweep.SweptRecipe, error: ErrorFacts, document: sweep.SweepDocument, machine: MeasuredMachine
) -> ResultRow:
    kind: Kind = "canary" if error.code == AnswersError.code else "sweep"
    made = _made(kind, moment(document.created), MeasuredArtifact(recipe.name, ""), "", "", machine)
    text = f"{error.code}: {error.message}" + (f": {error.found}" if error.found else "")
    return dataclasses.replace(made, decided=False, error=text)


def _made(
    kind: Kind, time: datetime.datetime, what: MeasuredArtifact, target: str, precision: str, machine: MeasuredMachine
) -> ResultRow:
    """Return a row with artifact and machine, without measurements."""
    facts, device = machine.environment, machine.devices.get(target, {})
    # The original runs in PyTorch, or in ONNX Runtime if it is a graph; reports do not record which.
    runtime = TARGETS[target].package if target in TARGETS else "torch" if target == "original" else ""
    cores = facts.get("cores", "")
    return ResultRow(
        kind=kind,
        time=time,
        model=what.model,
        model_digest=what.digest,
        artifact=what.artifact,
        target=target,
        precision=precision,
        device=" ".join(filter(None, [machine.name, device.get("gpu") or device.get("device", "")])),
        cpu=", ".join(name_host(facts)),
        isa=facts.get("isa", ""),
        cores=int(cores) if cores.isdecimal() else None,
        system=facts.get("system", ""),
        python=facts.get("python", ""),
        vitdeploy=facts.get("vitdeploy", ""),
        runtime=runtime,
        runtime_version=facts.get(runtime, "") or device.get(runtime, ""),
        driver=device.get("driver", ""),
    )


def _timed(made: ResultRow, row: summary.Row, bench: Bench) -> ResultRow:
    """Return the row with the measurements of its artifact."""
    latency, ci95 = row.latency_ms, row.latency_ms_ci95
    reason = bench.undecided.get(row.artifact, "")
    return dataclasses.replace(
        made,
        provider=row.provider,
        batch=row.batch.single,
        offline_batch=row.batch.offline,
        threads=bench.protocol.threads,
        p50_ms=latency.p50,
        p90_ms=latency.p90,
        p99_ms=latency.p99,
        mean_ms=latency.mean,
        **_bounds("p50_ms", ci95.p50),
        **_bounds("p90_ms", ci95.p90),
        **_bounds("p99_ms", ci95.p99),
        throughput=row.throughput,
        **_bounds("throughput", row.throughput_ci95),
        peak_memory_bytes=row.peak_memory_bytes,
        flags=" ".join(row.flags),
        decided=not reason,
        undecided=reason,
    )


def _verified(made: ResultRow, engine: EngineFacts) -> ResultRow:
    """Return the row with the verification of its engine."""
    verify = engine.verify
    return dataclasses.replace(
        made,
        provider=engine.provider,
        size_bytes=engine.bytes,
        gate=engine.gate.status,
        **_answers(verify, verify.value, verify.reference_value),
    )


def _compared(made: ResultRow, pair: comparison.PairFacts) -> ResultRow:
    """Return the row with the results of its pair; flags are those of both sides."""
    flags = " ".join(dict.fromkeys([*made.flags.split(), *pair.flags]))
    gates = [check.status for check in pair.checks]
    gate = next((status for status in ("fail", "undecided", "pass") if status in gates), "none")
    made, accuracy = dataclasses.replace(made, flags=flags, gate=gate), pair.accuracy
    if accuracy is None or accuracy.how == "same files":  # nothing was evaluated
        return made
    return dataclasses.replace(made, **_answers(accuracy, accuracy.candidate, accuracy.baseline))


def _answers(
    facts: Comparison | comparison.AccuracyChange, value: float | None, reference_value: float | None
) -> dict[str, Any]:
    return {
        **{"metric": facts.metric, "samples": facts.n, "value": value, "reference_value": reference_value},
        **{"drop": facts.drop, **_bounds("drop", facts.drop_ci95)},
        **{"agreement": facts.agreement, **_bounds("agreement", facts.agreement_ci95)},
    }


def _bounds(name: str, interval: evidence.Interval | Sequence[float] | None) -> dict[str, Any]:
    low, high = interval if interval is not None else (None, None)
    return {f"{name}_low": low, f"{name}_high": high}
