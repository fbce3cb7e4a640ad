"""Documents as self-contained HTML pages: no scripts, no external requests, readable offline and in print.

Each page is a table of sections, whose templates read the document itself. All text of a document is untrusted: it is
escaped, and control characters are removed.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitdeploy.benchmark.run import spelt
from vitdeploy.document import commands, comparison, sweep
from vitdeploy.document.bench import Bench, ContextFacts
from vitdeploy.document.history import HistoryDocument
from vitdeploy.document.report import Judgement, Report
from vitdeploy.report import context, figures, first, history, latency, planes, summary, table, text
from vitdeploy.report import page as notes
from vitdeploy.report.page import Document, RunPage, Section, measured, measured_alone
from vitdeploy.runtime.host import name_host
from vitdeploy.search.precision import Sensitivity
from vitdeploy.tasks import tensors

TEMPLATES = (Path(__file__).parent / "templates",)
# Modules whose public functions are template filters, and whose constants are template globals.
MODULES: tuple[ModuleType, ...] = (
    text,
    notes,
    table,
    tensors,
    planes,
    context,
    history,
    summary,
)

# --- The ordered sections of all pages --------------------------------------------------------------------------------


COMPARED = "Every artifact against the original"
TIME = "Where the time goes"
TITLE, LAYERS = "{view.title}", "Layer by layer: {view.artifact}"
CHANGED, EXAMPLES = "{view.data.nouns} with changed answers", "Example {document.report.data.noun}s"


def _context(bench: Bench | None) -> list[ContextFacts]:
    return [bench.context] if bench and bench.context and bench.context.machine else []


def _plots(report: Judgement) -> list[figures.Plot]:
    found = [planes.accuracy_plot(report), *latency.bench_plots(measured(report)), *context.sensitivity_plots(report)]
    return [plot for plot in found if plot is not None]


def _outputs(report: Report) -> list[tuple[str, tensors.OutputFacts]]:
    """The outputs of a model without a known task, with the engine of each."""
    return [
        (engine.artifact, output)
        for engine in report.engines
        if isinstance(engine.verify, tensors.TensorComparison)
        for output in engine.verify.outputs
    ]


def _parts(report: Report) -> dict[str, dict[str, float]]:
    """The milliseconds of each graph by artifact, for a model with several graphs."""
    return {name: row.parts_ms for name, row in report.results.items() if row.parts_ms}


def _some(view: object) -> list[object]:
    """One view, if it has any content."""
    return [view] if view else []


RUN: tuple[Section[RunPage], ...] = (
    Section("summary", "Summary", lambda page: _some(summary.summary(page.report)), "summary.html.jinja", "summary"),
    Section("comparison", COMPARED, lambda page: [page.report], "comparison.html.jinja"),
    Section("outputs", "Output by output", lambda page: _some(_outputs(page.report)), "outputs.html.jinja"),
    Section("heads", "Head by head", lambda page: _some(table.heads(page.report)), "heads.html.jinja"),
    Section("sizes", "Image sizes", lambda page: _some(page.report.sizes), "sizes.html.jinja"),
    Section("changed", CHANGED, lambda page: summary.changed(page.report), "changed.html.jinja"),
    Section("classes", "Class by class", lambda page: _some(summary.class_engines(page.report)), "classes.html.jinja"),
    Section("reliability", TITLE, lambda page: _some(context.reliability_plot(page.report)), "plot.html.jinja"),
    Section("plot-{number}", "{view.title}", lambda page: _plots(page.report), "plot.html.jinja"),
    Section("context", TIME, lambda page: _context(page.report.bench), "context.html.jinja"),
    Section("parts", "Graph by graph", lambda page: _some(_parts(page.report)), "parts.html.jinja"),
    Section(
        "sensitivity-of-{number}", LAYERS, lambda page: context.engines_with_costs(page.report), "costs.html.jinja"
    ),
    Section("examples", EXAMPLES, lambda page: _some(summary.examples(page.report, False)), "examples.html.jinja"),
    Section("attention", "Where the model looks", lambda page: _some(page.report.attention), "attention.html.jinja"),
    Section("details", "How it was made and measured", lambda page: [page.report], "details.html.jinja"),
)
TUNING: tuple[Section[sweep.TuneDocument], ...] = (
    Section("variants", "{view.title}", lambda document: [planes.pareto_plot(document)], "variants.html.jinja"),
    Section("comparison", COMPARED, lambda document: [document], "comparison.html.jinja"),
    Section("heads", "Head by head", lambda document: _some(table.heads(document)), "heads.html.jinja"),
    Section("plot-{number}", "{view.title}", _plots, "plot.html.jinja"),
    Section(
        "merging",
        "Token merging",
        lambda document: _some([trial for trial in document.merging.values() if trial.schedules]),
        "merging.html.jinja",
    ),
    Section("pruning", "Pruning", lambda document: _some(document.pruning), "pruning.html.jinja"),
    Section("left-out", "Not tried", lambda document: _some(planes.left_out(document)), "left_out.html.jinja"),
)
COMPARISON: tuple[Section[comparison.ComparisonDocument], ...] = (
    Section("engines", "Engine by engine", lambda document: [document], "pairs.html.jinja"),
    Section(
        "plot-{number}",
        "{view.title}",
        lambda document: latency.bench_plots(measured_alone(document.bench) if document.bench else None),
        "plot.html.jinja",
    ),
    Section("context", TIME, lambda document: _context(document.bench), "context.html.jinja"),
    Section("details", "What was compared, and where", lambda document: [document], "sides.html.jinja"),
)
SWEEP: tuple[Section[sweep.SweepDocument], ...] = (
    Section("verdicts", "Verdicts", lambda document: [document], "verdicts.html.jinja"),
    Section("plot-{number}", "{view.title}", planes.sweep_plots, "plot.html.jinja"),
    Section("engines", "Every engine", lambda document: [document], "swept_engines.html.jinja"),
    Section("machine", "Machine", lambda document: [document], "machine.html.jinja"),
)
HISTORY: tuple[Section[HistoryDocument], ...] = (
    Section(
        "changes",
        "Changes of latency",
        lambda document: [history.latest_changes(document)] if document.series else [],
        "history_changes.html.jinja",
    ),
    Section("canaries", "Wrong answers", lambda document: _some(document.canaries), "history_canaries.html.jinja"),
    Section("all", "All series", lambda document: _some(document.series), "history_series.html.jinja"),
    Section("series-{number}", "{view.title}", lambda document: document.series, "history_one.html.jinja"),
    Section(
        "left-out",
        "Skipped files",
        lambda document: _some([(each.what, each.why) for each in document.left_out]),
        "left_out.html.jinja",
    ),
)
SELFTEST: tuple[Section[commands.SelftestDocument], ...] = (
    Section("machine", "Requirements of the target", lambda document: [document], "needs.html.jinja"),
    Section("steps", "Steps", lambda document: [document], "steps.html.jinja"),
    Section("model-{number}", "{view.name}", lambda document: document.models, "tested_model.html.jinja"),
)

# --- The pages --------------------------------------------------------------------------------------------------------


def render_html(report: Report, images: Mapping[str, bytes]) -> str:
    """The report page. `images`: the pictures of its examples, by name."""
    found = text.cleaned(report)
    return _render(
        "run_page",
        RUN,
        RunPage(found, images),
        report=found,
        first=first.of_run(found),
        notices=notes.notices(found.warnings),
    )


def render_sensitivity(sensitivity: Sensitivity, name: str) -> str:
    """The page of the INT8 cost of each layer of the model with this name; both arguments are untrusted."""
    found = text.cleaned(sensitivity)
    plot = context.sensitivity_plot(found, "", "sensitivity")
    return _render("sensitivity_page", (), found, sensitivity=found, name=text.clean(name), plot=plot)


def render_tuning(document: sweep.TuneDocument, recipe: str) -> str:
    """The page of a search; `recipe`: the text of the recommended recipe. Both arguments are untrusted."""
    found = text.cleaned(document)
    lines = "\n".join(text.clean(line) for line in recipe.splitlines())
    last = Section[sweep.TuneDocument]("recipe", "Recipe", lambda _: [lines], "recipe.html.jinja")
    return _render(
        "tuning_page",
        (*TUNING, last),
        found,
        report=found,
        first=first.of_run(found),
        notices=notes.notices(found.warnings),
    )


def render_selftest(document: commands.SelftestDocument) -> str:
    """The page of a self-test."""
    found = text.cleaned(document)
    benches = [model.bench for model in found.models if model.bench]
    flags = [flag for bench in benches for row in bench.results for flag in row.flags]
    noticed = notes.notices((), *(bench.undecided for bench in benches))
    return _render("selftest_page", SELFTEST, found, report=found, flags=flags, notices=noticed)


def render_regression(document: comparison.ComparisonDocument) -> str:
    """The page of a comparison of two bundles or reports."""
    found = text.cleaned(document)
    return _render("regression_page", COMPARISON, found, report=found, first=first.of_comparison(found))


def render_sweep(document: sweep.SweepDocument) -> str:
    """The page of many recipes."""
    found = text.cleaned(document)
    warnings = [f"{one.name}: {line}" for one in found.recipes if one.report for line in one.report.warnings]
    noticed = notes.notices(warnings)
    return _render("sweep_page", SWEEP, found, report=found, first=first.of_sweep(found), notices=noticed)


def render_history(document: HistoryDocument) -> str:
    """The page of a history."""
    found = text.cleaned(document)
    flags = [flag for series in found.series for point in series.points for flag in point.flags]
    return _render("history_page", HISTORY, found, report=found, first=first.of_history(found), flags=flags)


def is_history_page(path: Path) -> bool:
    """Whether a file is a page of a history, by its title."""
    with path.open("rb") as file:
        return b"<title>History of " in file.read(4096)


def _render(page: str, sections: Sequence[Section[Document]], document: Document, **head: object) -> str:
    """A page with its sections; `head`: the variables of the template around them."""
    return _environment().get_template(f"{page}.html.jinja").render(sections=sections, document=document, **head)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters = {**_filters(), **environment.filters}
    constants = {name: value for module in MODULES for name, value in vars(module).items() if name.isupper()}
    environment.globals.update(constants)
    return environment


def _filters() -> dict[str, Callable[..., object]]:
    """The filters of templates: the public functions of `MODULES` by name, and a few others."""
    public = {name: each for module in MODULES for name, each in vars(module).items() if inspect.isfunction(each)}
    return {
        **public,
        "counted": text.count,
        "json": json.dumps,
        "host": name_host,
        "badge": table.gate,
        "measured": table.cell,
        "quote": quote,
        "signed": _signed,
        "soft_breaks": _soft_breaks,
        "spelt": spelt,
        "with_contents": _with_contents,
    }


def _with_contents(body: Markup) -> Markup:
    """The body of a page with links to its headings on top, if it has at least three."""
    found = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', body, re.DOTALL)
    if len(found) < 3:
        return body
    # Both are markup: the template has escaped them.
    links = Markup("").join(Markup(f'<li><a href="#{name}">{title}</a></li>') for name, title in found)  # noqa: S704
    whole = Markup('<nav class="contents" aria-label="Contents"><ul>{}</ul></nav>\n').format(links) + body
    # A link into a collapsed section opens it; one to its heading does not.
    collapsed = "|".join(re.findall(r'<summary><h2 id="([^"]+)"', body))
    return Markup(re.sub(f'href="#({collapsed})"', r'href="#\1-open"', str(whole)))  # noqa: S704


def _soft_breaks(value: str) -> Markup:
    """A CamelCase name, escaped, with optional line breaks before each capital."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z])(?=[A-Z])", value))


def _signed(change: int) -> str:
    """A signed difference of counts; "" for 0."""
    return f"{change:+d}".replace("-", "−") if change else ""
