"""Every digest of the two sides of a comparison, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from vitdeploy.document.comparison import DigestPair
from vitdeploy.document.report import Provenance, Report
from vitdeploy.spec import DecodeError, Manifest, decode


def of_bundle(manifest: Manifest) -> dict[str, str]:
    """The sha256 of every file of a bundle, and of its sources if recorded."""
    files = {entry.path: entry.sha256 for entry in manifest.files}
    try:
        return {**_inputs(decode(Provenance, manifest.provenance)), **files}
    except DecodeError:  # a bundle of something else than `run`
        return files


def of_report(report: Report) -> dict[str, str]:
    """The same of what a report lists: what it was made from, the exported graph, and what engines were compiled to."""
    return {**_inputs(report.provenance), **{each.path: each.sha256 for each in report.provenance.files}}


def _inputs(provenance: Provenance) -> dict[str, str]:
    data = {"calibration data": provenance.data.calibration, "evaluation data": provenance.data.evaluation}
    return {**provenance.source.sha256, **{name: digest for name, digest in data.items() if digest}}


def side_by_side(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> tuple[DigestPair, ...]:
    """A row for each name, in the baseline's order."""
    names = dict.fromkeys([*baseline, *candidate])
    return tuple(DigestPair(name, baseline.get(name), candidate.get(name)) for name in names)
