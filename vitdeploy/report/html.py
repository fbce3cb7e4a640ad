"""Documents as self-contained HTML pages: no scripts, no external requests, readable offline and in print.

Each page is a table of sections. All text of a document is taken as untrusted: it is escaped, and cleaned of control
characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.history import HistoryDocument
from vitdeploy.document.report import Judgement, Report, VerdictFacts
from vitdeploy.document.selftest import SelftestDocument
from vitdeploy.document.sweep import SweepDocument, TuneDocument
from vitdeploy.report import lookup, measures, quantization, table, text
from vitdeploy.report import page as notes
from vitdeploy.report.context import model_views
from vitdeploy.report.measures import Cell
from vitdeploy.report.page import Document, RunPage, Section, shown
from vitdeploy.report.sections import COMPARISON, HISTORY, RUN, SELFTEST, SWEEP, TUNING
from vitdeploy.report.sweep import progressed
from vitdeploy.report.table import Gate
from vitdeploy.runtime.host import name_host
from vitdeploy.search.mixed import Sensitivity
from vitdeploy.spec import bound_words

TEMPLATES = (Path(__file__).parent / "templates",)


@dataclass(frozen=True)
class Verdict:
    """The part above the sections of a run and of a search. `grade`: of its speed, if that was judged. `reasons`: what
    the remarks do not say. `headline`: the leading artifact in numbers; `starred`: the same, if it is recommended."""

    gate: Gate
    grade: Gate | None
    reasons: list[str]
    headline: list[Cell]
    starred: str | None
    leading: str | None


def render_html(report: Report, images: Mapping[str, bytes]) -> str:
    """The report page. `images` holds the pictures that its examples name."""
    found = text.cleaned(report)
    return _render("run_page", RUN, RunPage(found, images), **_judged(found))


def render_sensitivity(sensitivity: Sensitivity, name: str) -> str:
    """The page of what each layer costs in INT8, of the model with this name; both are taken as untrusted."""
    found = text.cleaned(sensitivity)
    layers, groups = quantization.sensitivity_rows(found)
    plot = quantization.sensitivity_plot(found, "", "sensitivity")
    return (
        _environment()
        .get_template("sensitivity_page.html.jinja")
        .render(
            name=text.clean(name),
            target=found.target,
            unit=found.unit,
            headline=quantization.headline(found),
            summary=quantization.sensitivity_summary(found),
            plot=plot,
            layers=layers,
            groups=groups,
        )
    )


def render_tuning(document: TuneDocument, recipe: str) -> str:
    """The page of a search; `recipe` is the file of what to ship, and as untrusted."""
    found = text.cleaned(document)
    lines = "\n".join(text.clean(line) for line in recipe.splitlines())
    last = Section[TuneDocument]("recipe", "Recipe", lambda _: [Recipe(lines)], "recipe.html.jinja")
    return _render("tuning_page", (*TUNING, last), found, **_judged(found))


@dataclass(frozen=True)
class Recipe:
    """The section of a recipe."""

    text: str


def render_selftest(document: SelftestDocument) -> str:
    """The page of a self-test."""
    found = text.cleaned(document)
    legend = notes.legend(flag for model in model_views(found) for row in model.rows for flag in row.flags)
    noticed = notes.notices((), *(model.bench.undecided for model in found.models if model.bench))
    return _render("selftest_page", SELFTEST, found, report=found, legend=legend, notices=noticed)


def render_regression(document: ComparisonDocument) -> str:
    """The page of a comparison of two bundles or reports."""
    found = text.cleaned(document)
    noticed = notes.notices((), found.bench.undecided if found.bench else {})
    gate = table.gate(found.gate.status, "Limits")
    return _render("regression_page", COMPARISON, found, report=found, gate=gate, notices=noticed)


def render_sweep(document: SweepDocument) -> str:
    """The page of many recipes."""
    found = text.cleaned(document)
    reports = [each.report for each in found.recipes if each.report]
    warnings = [f"{each.name}: {line}" for each in reports for line in each.warnings]
    noticed = notes.notices(warnings, *(_named(each) for each in reports))
    return _render("sweep_page", SWEEP, found, report=found, notices=noticed, progress=progressed(found))


def render_history(document: HistoryDocument) -> str:
    """The page of a history."""
    found = text.cleaned(document)
    legend = notes.legend(flag for series in found.series for point in series.points for flag in point.flags)
    return _render("history_page", HISTORY, found, report=found, legend=legend)


def is_history_page(path: Path) -> bool:
    """Whether a file is a page of a history, by its title."""
    with path.open("rb") as file:
        return b"<title>History of " in file.read(4096)


def _render(page: str, sections: Sequence[Section[Document]], document: Document, **head: object) -> str:
    """A page with its sections; `head` is what stands around them."""
    template = _environment().get_template(f"{page}.html.jinja")
    return template.render(sections=list(shown(sections, document)), **head)


def _named(report: Report) -> dict[str, str]:
    """The undecided points of one recipe of many, under the recipe's name."""
    return {f"{report.name}: {name}": why for name, why in lookup.undecided(report).items()}


def _judged(report: Judgement) -> dict[str, object]:
    """The part above the sections of a run and of a search."""
    facts, undecided = report.verdict, lookup.undecided(report)
    graded = facts.grade is not None
    verdict = Verdict(
        table.gate(facts.gate, table.judges(report)),
        table.grade(facts),
        [*_reasons(facts), *(notes.by_reason(undecided) if graded else [])],
        table.headline(report),
        lookup.starred(report),
        facts.stands_for_all,
    )
    return {"report": report, "top": verdict, "notices": notes.notices(report.warnings, {} if graded else undecided)}


def _reasons(verdict: VerdictFacts) -> list[str]:
    """The reasons of the gate that no remark has said already."""
    said = " ".join([verdict.sentence, *verdict.remarks])
    return [reason for reason in dict.fromkeys(verdict.reasons) if reason not in said]


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=text.number,
        significant=text.significant,
        small=text.small,
        size=text.size,
        parameters=text.parameters,
        interval=text.interval,
        ratio_interval=text.ratio_interval,
        date=text.date,
        host=name_host,
        counted=text.count,
        measured=measures.cell,
        badge=table.gate,
        bound_words=bound_words,
        with_contents=_with_contents,
        soft_breaks=_soft_breaks,
    )
    return environment


def _with_contents(body: Markup) -> Markup:
    """The body of a page with links to its headings on top, where there are a few."""
    found = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', body, re.DOTALL)
    if len(found) < 3:
        return body
    # Both are markup already: what the template wrote was escaped then.
    links = Markup("").join(Markup(f'<li><a href="#{name}">{title}</a></li>') for name, title in found)  # noqa: S704
    return Markup('<nav class="contents" aria-label="Contents"><ul>{}</ul></nav>\n').format(links) + body


def _soft_breaks(value: str) -> Markup:
    """A CamelCase name, escaped, that may be broken before each capital."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z])(?=[A-Z])", value))
