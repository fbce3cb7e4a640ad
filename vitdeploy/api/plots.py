"""Plots of the report in a notebook, which has none of its page's colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitdeploy.document.bench import Bench


def latency_plots(bench: Bench | None) -> list[str]:
    """The latency distribution per artifact, as an SVG element; nothing without a bench."""
    if bench is None:
        return []
    from vitdeploy.report.latency import latency_plot
    from vitdeploy.report.lookup import measured_alone

    plot = latency_plot(measured_alone(bench))
    return [] if plot is None else [coloured(plot.wide)]


def coloured(svg: str) -> str:
    """An SVG element of the report with the colours that its page would give it."""
    from vitdeploy.report.figures import VARIABLES

    for colour, variable in VARIABLES.items():
        svg = svg.replace(variable, colour)
    return f'<div style="max-width:720px">{svg}</div>'
