"""The plots of the report."""

from __future__ import annotations

from vitdeploy.document.bench import Bench
from vitdeploy.document.report import Judgement
from vitdeploy.report import lookup
from vitdeploy.report.accuracy import accuracy_plot
from vitdeploy.report.figures import Plot
from vitdeploy.report.latency import latency_plot, timeline_plots
from vitdeploy.report.lookup import Measured
from vitdeploy.report.quantization import sensitivity_plots


def render_plots(report: Judgement) -> list[Plot]:
    """Every plot for which the report has data."""
    found = [accuracy_plot(report), *bench_plots(lookup.measured(report)), *sensitivity_plots(report)]
    return [plot for plot in found if plot is not None]


def bench_plots(measured: Measured | None) -> list[Plot]:
    """Plots of the distribution of latencies, and of their drift over time; none without a bench."""
    latency = latency_plot(measured) if measured is not None else None
    return [] if measured is None or latency is None else [latency, *timeline_plots(measured)]


def plots_alone(bench: Bench | None) -> list[Plot]:
    """The plots of a bench of what is in no report."""
    return bench_plots(lookup.measured_alone(bench) if bench is not None else None)
