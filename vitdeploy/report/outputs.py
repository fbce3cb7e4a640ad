"""Outputs of no known task, each by how far every engine's lies from the original's."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.verified import VerifiedTensors
from vitdeploy.report import text
from vitdeploy.report.page import RunPage
from vitdeploy.verification.tensors import LEAST_EQUAL, LEAST_SNR, OutputFacts


@dataclass(frozen=True)
class OutputRow:
    """One output of one engine, in words."""

    artifact: str
    output: str
    difference: str
    cosine: str
    snr: str
    equal: str


@dataclass(frozen=True)
class OutputsView:
    """The section, with the bounds from which an image counts as answered alike."""

    rows: list[OutputRow]
    least_snr: str
    least_equal: str


def outputs_view(page: RunPage) -> list[OutputsView]:
    """The section; none of a task that reads its outputs."""
    rows = [
        _row(engine.artifact, facts)
        for engine in page.report.engines
        if isinstance(engine.verify, VerifiedTensors)
        for facts in engine.verify.outputs
    ]
    return [OutputsView(rows, text.significant(LEAST_SNR), text.significant(100 * LEAST_EQUAL))] if rows else []


def _row(artifact: str, facts: OutputFacts) -> OutputRow:
    exact = facts.equal is not None
    return OutputRow(
        artifact,
        facts.name,
        text.small(facts.max_difference),
        f"{text.number(facts.cosine_mean, 5)}, least {text.number(facts.cosine_min, 5)}" if not exact else text.MISSING,
        text.MISSING if exact else _decibels(facts.snr, facts.snr_min),
        text.number(facts.equal),
    )


def _decibels(whole: float | None, least: float | None) -> str:
    if whole is None:
        return "no error"
    return f"{text.number(whole, 1)}, least {'no error' if least is None else text.number(least, 1)}"
