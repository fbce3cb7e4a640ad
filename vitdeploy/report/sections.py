"""The tables of all pages: which sections each has, in which order."""

from __future__ import annotations

from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.history import HistoryDocument
from vitdeploy.document.selftest import SelftestDocument
from vitdeploy.document.sweep import SweepDocument, TuneDocument
from vitdeploy.report.accuracy import classes_view, outputs_view
from vitdeploy.report.attention_views import attention_view
from vitdeploy.report.context import context_view, details_view, model_views, reliability_view, steps_view
from vitdeploy.report.examples import examples_view
from vitdeploy.report.history import canaries_view, changes_view, files_view, overview_view, series_views
from vitdeploy.report.images import parts_view, sizes_view
from vitdeploy.report.page import RunPage, Section
from vitdeploy.report.plots import plots_alone, render_plots
from vitdeploy.report.quantization import costs_view
from vitdeploy.report.regression import pairs_view, sides_view
from vitdeploy.report.summary import changed_view, summary_view
from vitdeploy.report.sweep import sweep_plots, swept_view
from vitdeploy.report.table import comparison_view
from vitdeploy.report.tuning import left_out_view, merging_view, pruning_view, rows_view, variants_view

COMPARED = "Every artifact against the original"
TIME = "Where the time goes"

RUN: tuple[Section[RunPage], ...] = (
    Section("summary", "Summary", summary_view, "summary.html.jinja", "summary"),
    Section("comparison", COMPARED, lambda page: comparison_view(page.report), "comparison.html.jinja"),
    Section("outputs", "Output by output", outputs_view, "outputs.html.jinja"),
    Section("sizes", "Image sizes", sizes_view, "sizes.html.jinja"),
    Section("changed", "{view.title} whose answer changed", changed_view, "changed.html.jinja"),
    Section("classes", "Class by class", classes_view, "classes.html.jinja"),
    Section("reliability", "{view.title}", reliability_view, "plot.html.jinja"),
    Section("plot-{number}", "{view.title}", lambda page: render_plots(page.report), "plot.html.jinja"),
    Section("context", TIME, lambda page: context_view(page.report.bench), "context.html.jinja"),
    Section("parts", "Graph by graph", parts_view, "parts.html.jinja"),
    Section(
        "sensitivity-of-{number}",
        "Layer by layer: {view.artifact}",
        lambda page: costs_view(page.report),
        "costs.html.jinja",
    ),
    Section("examples", "{view.which} {view.noun}s", examples_view, "examples.html.jinja"),
    Section("attention", "Where the model looks", attention_view, "attention.html.jinja"),
    Section("details", "How it was made and measured", details_view, "details.html.jinja"),
)
TUNING: tuple[Section[TuneDocument], ...] = (
    Section("variants", "{view.title}", variants_view, "variants.html.jinja"),
    Section("comparison", COMPARED, comparison_view, "comparison.html.jinja"),
    Section("plot-{number}", "{view.title}", render_plots, "plot.html.jinja"),
    Section("rows", "Number of rows", rows_view, "aligned_rows.html.jinja"),
    Section("merging", "Token merging", merging_view, "merging.html.jinja"),
    Section("pruning", "Pruning", pruning_view, "pruning.html.jinja"),
    Section("left-out", "Not tried", left_out_view, "left_out.html.jinja"),
)
COMPARISON: tuple[Section[ComparisonDocument], ...] = (
    Section("engines", "Engine by engine", pairs_view, "pairs.html.jinja"),
    Section("plot-{number}", "{view.title}", lambda document: plots_alone(document.bench), "plot.html.jinja"),
    Section("context", TIME, lambda document: context_view(document.bench), "context.html.jinja"),
    Section("details", "What was compared, and where", sides_view, "sides.html.jinja"),
)
SWEEP: tuple[Section[SweepDocument], ...] = (
    Section("verdicts", "Verdicts", swept_view, "verdicts.html.jinja"),
    Section("plot-{number}", "{view.title}", sweep_plots, "plot.html.jinja"),
    Section("engines", "Every engine", swept_view, "swept_engines.html.jinja"),
    Section("machine", "Machine", lambda document: [document], "machine.html.jinja"),
)
HISTORY: tuple[Section[HistoryDocument], ...] = (
    Section("changes", "What got slower or faster", changes_view, "history_changes.html.jinja"),
    Section("canaries", "Wrong answers", canaries_view, "history_canaries.html.jinja"),
    Section("all", "All series", overview_view, "history_series.html.jinja"),
    Section("series-{number}", "{view.title}", series_views, "history_one.html.jinja"),
    Section("left-out", "Files that are left out", files_view, "left_out.html.jinja"),
)
SELFTEST: tuple[Section[SelftestDocument], ...] = (
    Section("machine", "What the target needs of this machine", lambda document: [document], "needs.html.jinja"),
    Section("steps", "Steps", steps_view, "steps.html.jinja"),
    Section("model-{number}", "{view.name}", model_views, "tested_model.html.jinja"),
)
