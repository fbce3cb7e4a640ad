"""report.json as one self-contained HTML page: no scripts, no external requests, readable offline and in print."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitdeploy.document.bench import Bench
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.report import Judgement, Report, VerdictFacts
from vitdeploy.document.selftest import SelftestDocument
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.document.tuning import TuneDocument
from vitdeploy.report import (
    answers,
    attention_views,
    changes,
    context,
    examples,
    flags,
    half,
    lookup,
    measures,
    notices,
    quantization,
    regression,
    selftest,
    summary,
    sweep,
    table,
    text,
    tuning,
)
from vitdeploy.report.plots import bench_plots, render_plots
from vitdeploy.report.svg import Plot
from vitdeploy.search.sensitivity import Sensitivity


def render_html(report: Report, images: Mapping[str, bytes]) -> str:
    """The report page. `images` holds the pictures that its examples name.

    All text in the report is taken as untrusted: it is escaped, and cleaned of control characters.
    """
    return _environment().get_template("template.html.jinja").render(_context(text.cleaned(report), images))


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
            plot=_shown(plot) if plot is not None else None,
            layers=layers,
            groups=groups,
        )
    )


def render_tuning(document: TuneDocument, recipe: str) -> str:
    """The page of a search; `recipe` is the file of what to ship. Both are taken as untrusted."""
    report = text.cleaned(document)
    return (
        _environment()
        .get_template("tuning_page.html.jinja")
        .render(
            **_judged(report),
            pareto=_shown(tuning.pareto_plot(report)),
            variants=tuning.variant_rows(report),
            targets=lookup.target_colours(report),
            aligned=tuning.aligned_rows(report),
            schedules=tuning.schedule_rows(report),
            left_out=tuning.left_out(report),
            recipe="\n".join(text.clean(line) for line in recipe.splitlines()),
        )
    )


def render_selftest(document: SelftestDocument) -> str:
    """The page of a self-test, which is taken as untrusted."""
    report = text.cleaned(document)
    models = [selftest.model_view(model) for model in report.models]
    template = _environment().get_template("selftest_page.html.jinja")
    return template.render(
        report=report,
        models=models,
        chips=selftest.CHIPS,
        legend=flags.legend(flag for model in models for row in model.rows for flag in row.flags),
        notices=notices.notices((), *(model.bench.undecided for model in report.models if model.bench)),
    )


def render_regression(document: ComparisonDocument) -> str:
    """The page of a comparison of two bundles or reports, which is taken as untrusted."""
    report = text.cleaned(document)
    return (
        _environment()
        .get_template("regression_page.html.jinja")
        .render(
            report=report,
            gate=table.gate(report.gate.status),
            notices=notices.notices((), report.bench.undecided if report.bench else {}),
            rows=regression.pair_rows(report),
            legend=flags.legend(flag for engine in report.engines for flag in engine.flags),
            metrics=regression.metrics(report),
            context=_where_time_goes(report.bench),
            missing=measures.Cell(text.MISSING),
            changed=regression.changed(report),
            plots=[_shown(plot) for plot in bench_plots(lookup.measured_alone(report.bench) if report.bench else None)],
        )
    )


def render_sweep(document: SweepDocument) -> str:
    """The page of many recipes, which is taken as untrusted."""
    report = text.cleaned(document)
    recipes, reports = sweep.swept(report), [each.report for each in report.recipes if each.report]
    return (
        _environment()
        .get_template("sweep_page.html.jinja")
        .render(
            report=report,
            recipes=recipes,
            plots=[_shown(plot) for plot in sweep.sweep_plots(report)],
            legend=flags.legend(flag for each in recipes for _, row in each.rows for flag in row.flags),
            notices=notices.notices(
                [f"{each.name}: {line}" for each in reports for line in each.warnings],
                *(_named(each) for each in reports),
            ),
        )
    )


def _named(report: Report) -> dict[str, str]:
    """What is undecided of a recipe among many, under the recipe's name."""
    return {f"{report.name}: {name}": why for name, why in lookup.undecided(report).items()}


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
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
        counted=text.count,
        measured=measures.cell,
        with_contents=_with_contents,
        soft_breaks=_soft_breaks,
    )
    return environment


def _context(report: Report, images: Mapping[str, bytes]) -> dict[str, Any]:
    """Everything that the template shows."""
    changed, others = examples.examples(report, images)
    reliability = answers.reliability_plot(report)
    return {
        **_judged(report),
        "summary": summary.summary(report),
        "changed": changed,
        "changed_rows": answers.changed_rows(report),
        "class_views": answers.class_views(report),
        "left": answers.left(report),
        "reliability": _shown(reliability) if reliability else None,
        "gate_of": table.gate,
        "measures": measures.columns(report),
        "changes": changes.graph_changes(report.optimize),
        "context": _where_time_goes(report.bench),
        "bars": examples.BARS.get(report.task),
        "quantized": quantization.quantized_engines(report),
        "half": half.half_engines(report),
        "shown": quantization.SHOWN_LAYERS,
        "examples": others,
        "chosen": _why(report),
        "attention": attention_views.attention_maps(report, images),
        "ticked": any(group.correct for each in (*changed, *others) for group in each.groups),
        "recipe": json.dumps(report.provenance.recipe, indent=2, ensure_ascii=False),
        "digests": _digests(report),
    }


def _judged(report: Judgement) -> dict[str, Any]:
    """The verdict, and every engine against the original: of a run and of a search."""
    return {
        "report": report,
        "notices": notices.notices(report.warnings, lookup.undecided(report)),
        "gate": table.gate(report.verdict.gate),
        "reasons": _reasons(report.verdict),
        "headline": table.headline(report),
        "starred": lookup.starred(report),
        "leading": report.verdict.stands_for_all,
        "rows": (rows := table.main_rows(report)),
        "legend": flags.legend(flag for row in rows for flag in row.flags),
        "benched": bool(lookup.bench_results(report)),
        "metric": measures.metric(report),
        "agreement_of": measures.agreement_of(report),
        "counts_nothing": measures.counts_nothing(report),
        "noun": report.data.noun,
        "plots": [_shown(plot) for plot in render_plots(report)],
    }


def _where_time_goes(bench: Bench | None) -> dict[str, Any] | None:
    found = context.section(bench)
    return None if found is None else {**vars(found), "plot": _shown(found.plot) if found.plot else None}


def _shown(plot: Plot) -> dict[str, str]:
    """Inline SVG is markup by design; its serialiser escapes every text and attribute."""
    wide, narrow = Markup(plot.wide), Markup(plot.narrow)  # noqa: S704
    return {"title": plot.title, "caption": plot.caption, "wide": wide, "narrow": narrow}


def _with_contents(body: Markup) -> Markup:
    """The body of a page with links to its headings on top, where there are a few."""
    found = re.findall(r'<h2 id="([^"]+)">(.*?)</h2>', body, re.DOTALL)
    if len(found) < 3:
        return body
    # Both are markup already: what the template wrote was escaped then.
    links = Markup("").join(Markup(f'<li><a href="#{name}">{title}</a></li>') for name, title in found)  # noqa: S704
    return Markup('<nav class="contents" aria-label="Contents"><ul>{}</ul></nav>\n').format(links) + body


def _reasons(verdict: VerdictFacts) -> list[str]:
    """The reasons of the gate that no remark has said already."""
    said = " ".join([verdict.sentence, *verdict.remarks])
    return [reason for reason in dict.fromkeys(verdict.reasons) if reason not in said]


def _why(report: Report) -> dict[str, int]:
    """How many examples are shown for which reason."""
    reasons = [example.why or "usual" for example in report.examples]
    return {reason: reasons.count(reason) for reason in ("changed", "unsure", "usual")}


def _soft_breaks(value: str) -> Markup:
    """A CamelCase name, escaped, that may be broken before each capital."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z])(?=[A-Z])", value))


def _digests(report: Report) -> dict[str, str]:
    """The digests that are not those of a bundle file: what the model was read from, and the data."""
    provenance, data = report.provenance, report.provenance.data
    digests = {
        **{f"{name} (sha256)": digest for name, digest in provenance.source.sha256.items()},
        "Calibration data": data.calibration if report.calibration else None,
        "Evaluation data": data.evaluation,
    }
    return {name: digest for name, digest in digests.items() if digest}
