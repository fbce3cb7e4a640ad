"""Every digest of the two sides of a comparison, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vitdeploy.spec import Manifest
from vitdeploy.workflows.regression.recorded import RecordedProvenance, RecordedReport


def of_bundle(manifest: Manifest) -> dict[str, str]:
    """The sha256 of every file of a bundle, and of what it was made from, as far as it says."""
    files = {entry.path: entry.sha256 for entry in manifest.files}
    try:
        return {**_inputs(RecordedProvenance.model_validate(manifest.provenance)), **files}
    except ValidationError:  # a bundle of something else than `run`
        return files


def of_report(report: RecordedReport) -> dict[str, str]:
    """The same of what a report lists: what it was made from, the exported graph, and what engines were compiled to."""
    return {**_inputs(report.provenance), **{each.path: each.sha256 for each in report.provenance.files}}


def _inputs(provenance: RecordedProvenance) -> dict[str, str]:
    data = {"calibration data": provenance.data.calibration, "evaluation data": provenance.data.evaluation}
    return {**provenance.source.sha256, **{name: digest for name, digest in data.items() if digest}}


def side_by_side(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each name, in the baseline's order; None where a side has nothing of that name."""
    return [
        {"name": name, "baseline": baseline.get(name), "candidate": candidate.get(name)}
        for name in dict.fromkeys([*baseline, *candidate])
    ]
