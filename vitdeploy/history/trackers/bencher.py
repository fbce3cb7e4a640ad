"""The Bencher Metric Format: a JSON file of numbers by benchmark and measure, for `bencher run --adapter json`.

https://bencher.dev/docs/reference/bencher-metric-format defines the format. Latencies are in nanoseconds and throughput
in operations per second, as in Bencher's built-in measures of these names. The format cannot mark a number as
undecided: undecided times are left out and listed.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from vitdeploy.document.bench import Omission
from vitdeploy.history.row import ResultRow
from vitdeploy.history.trackers import Sent, TrackedResult, Tracker
from vitdeploy.progress import Progress
from vitdeploy.publish import replacing_file

_MS, _LONGEST = 1e6, 1024


def metrics_of(rows: Sequence[ResultRow]) -> tuple[dict[str, dict[str, dict[str, float]]], list[Omission]]:
    """Return the last row of each series as a benchmark, and the omissions with their reasons. The name of a benchmark
    includes the machine, so that times of two machines never form one series."""
    latest = {_benchmark(row): row for row in rows}
    found = {name: measures for name, row in latest.items() if (measures := _measures(row))}
    reasons = [Omission(name, row.error or row.undecided) for name, row in latest.items() if row.error or row.undecided]
    return found, reasons


class Bencher(Tracker):
    """A file in the Bencher Metric Format with all results sent since it was opened."""

    def __init__(self, file: str) -> None:
        self.name, self._file = f"bencher:{Path(file)}", Path(file)
        self._rows: list[ResultRow] = []

    def prepare(self) -> None:
        with contextlib.suppress(_Enough), replacing_file(self._file, is_metrics):
            raise _Enough

    def send(self, outcomes: Sequence[TrackedResult], progress: Progress) -> Sent:
        self._rows += [row for outcome in outcomes for row in outcome.rows]
        found, left_out = metrics_of(self._rows)
        with replacing_file(self._file, is_metrics) as work:
            work.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return Sent(self.name, len(outcomes), 0, tuple(left_out))


class _Enough(Exception):
    """Raised to leave a test write without writing the file."""


def is_metrics(file: Path) -> bool:
    """Whether a file has the Bencher Metric Format."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and all(
        isinstance(measures, dict) and all(isinstance(each, dict) and "value" in each for each in measures.values())
        for measures in found.values()
    )


def _benchmark(row: ResultRow) -> str:
    what = row.artifact if row.artifact == f"{row.target}-{row.precision}" else None
    about = [what] if what else [row.artifact, row.target, row.precision]
    sizes = [f"batch {row.batch}"] if row.batch is not None else []
    sizes += [f"{row.threads} threads"] if row.threads else []
    cores = [f"{row.cores} cores"] if row.cores is not None else []
    parts = [row.model, *about, *sizes, row.device, row.cpu, *cores]
    return ", ".join(part for part in parts if part)[:_LONGEST]


def _measures(row: ResultRow) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    if row.decided:
        found |= {
            "latency": _metric(row.p50_ms, row.p50_ms_low, row.p50_ms_high, _MS),
            "p99-latency": _metric(row.p99_ms, row.p99_ms_low, row.p99_ms_high, _MS),
            "throughput": _metric(row.throughput, row.throughput_low, row.throughput_high),
        }
    found |= {
        "file-size": _metric(row.size_bytes),
        "agreement": _metric(row.agreement, row.agreement_low, row.agreement_high),
        "drop": _metric(row.drop, row.drop_low, row.drop_high),
    }
    if row.metric is not None:
        found[re.sub(r"[^a-z0-9]+", "-", row.metric.lower()).strip("-")] = _metric(row.value)
    return {name: metric for name, metric in found.items() if metric}


def _metric(
    value: float | None, low: float | None = None, high: float | None = None, unit: float = 1.0
) -> dict[str, float]:
    """Return a metric with its known bounds; empty without a value."""
    if value is None:
        return {}
    bounds = {"lower_value": low, "upper_value": high}
    return {"value": value * unit, **{name: each * unit for name, each in bounds.items() if each is not None}}
