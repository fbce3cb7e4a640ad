"""report.json as one self-contained HTML page: no scripts, no external requests, readable offline and in print."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitdeploy.report import (
    changes,
    context,
    half,
    looks,
    lookup,
    measures,
    quantization,
    regression,
    selftest,
    sweep,
    table,
    text,
    tuning,
)
from vitdeploy.report.plots import bench_plots, render_plots
from vitdeploy.report.svg import Plot


@dataclass(frozen=True)
class Answer:
    """The score of one artifact's answer, in words and as the length of a bar; None where the task has none."""

    artifact: str
    score: str | None
    bar: str


@dataclass(frozen=True)
class AnswerGroup:
    """The artifacts that gave the same answer to an example."""

    label: str
    differs: bool
    correct: bool
    answers: list[Answer]


@dataclass(frozen=True)
class Example:
    """An example with all answers, those that agree with the original first. `pictured`: it is an image at all."""

    pictured: bool
    source: str | None
    alt: str
    label: str | None
    groups: list[AnswerGroup]

    @property
    def disagreements(self) -> int:
        """How many engines answered something other than the original."""
        return sum(len(group.answers) for group in self.groups if group.differs)


# What the score of an answer is; other tasks' answers have none.
_BARS = {
    "classification": "the confidence",
    "features": "the cosine similarity",
    "detection": "the score of the surest object",
}
# Tasks whose answer in words is the whole answer, so that it is right where it is the label.
_ANSWERED_IN_WORDS = ("classification", "sequence")


def render_html(report: dict[str, Any], images: Mapping[str, bytes]) -> str:
    """The report page. `report` is the content of report.json, `images` holds the PNG files its examples name.

    All text in the report is taken as untrusted: it is escaped, and cleaned of control characters.
    """
    return _environment().get_template("template.html.jinja").render(_context(text.cleaned(report), images))


def render_sensitivity(sensitivity: dict[str, Any], name: str) -> str:
    """The page of what each layer costs in INT8. `sensitivity` is the content of sensitivity.json, `name` the model's;
    both are taken as untrusted."""
    found = text.cleaned(sensitivity)
    layers, groups = quantization.sensitivity_rows(found)
    plot = quantization.sensitivity_plot(found, "", "sensitivity")
    return (
        _environment()
        .get_template("sensitivity_page.html.jinja")
        .render(
            name=text.clean(name),
            target=found["target"],
            unit=found["unit"],
            headline=quantization.headline(found),
            summary=quantization.sensitivity_summary(found),
            plot=_shown(plot) if plot is not None else None,
            layers=layers,
            groups=groups,
        )
    )


def render_tuning(document: dict[str, Any], recipe: str) -> str:
    """The page of a search. `document` is the content of tune.json, `recipe` the file of what to ship; both are taken
    as untrusted."""
    report = text.cleaned(document)
    return (
        _environment()
        .get_template("tuning_page.html.jinja")
        .render(
            **_judged(report),
            pareto=_shown(tuning.pareto_plot(report)),
            variants=tuning.variant_rows(report),
            aligned=tuning.aligned_rows(report),
            schedules=tuning.schedule_rows(report),
            recipe="\n".join(text.clean(line) for line in recipe.splitlines()),
        )
    )


def render_selftest(document: dict[str, Any]) -> str:
    """The page of a self-test. `document` is the content of selftest.json, and taken as untrusted."""
    report = text.cleaned(document)
    models = [
        {
            "name": model["name"],
            "trained": model["trained"],
            "rows": selftest.engine_rows(model),
            "reference": model["bench"]["ratios"][0]["b"] if model["bench"] and model["bench"]["ratios"] else None,
        }
        for model in report["models"]
    ]
    template = _environment().get_template("selftest_page.html.jinja")
    return template.render(report=report, models=models, chips=selftest.CHIPS)


def render_regression(document: dict[str, Any]) -> str:
    """The page of a comparison of two bundles or reports. `document` is the content of compare.json, and taken as
    untrusted."""
    report = text.cleaned(document)
    return (
        _environment()
        .get_template("regression_page.html.jinja")
        .render(
            report=report,
            gate=table.gate(report["gate"]["status"]),
            rows=regression.pair_rows(report),
            metrics=regression.metrics(report),
            context=_where_time_goes(report["bench"]),
            missing=measures.Cell(text.MISSING),
            changed=regression.changed(report),
            plots=[_shown(plot) for plot in bench_plots({"engines": [], "bench": report["bench"]})],
        )
    )


def render_sweep(document: dict[str, Any]) -> str:
    """The page of many recipes. `document` is the content of sweep.json, and taken as untrusted."""
    report = text.cleaned(document)
    return _environment().get_template("sweep_page.html.jinja").render(report=report, recipes=sweep.swept(report))


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
        soft_breaks=_soft_breaks,
    )
    return environment


def _context(report: dict[str, Any], images: Mapping[str, bytes]) -> dict[str, Any]:
    """Everything that the template shows."""
    examples = _examples(report, images)
    return {
        **_judged(report),
        "gate_of": table.gate,
        "measures": measures.columns(report),
        "changes": changes.graph_changes(report),
        "context": _where_time_goes(report["bench"]),
        "bars": _BARS.get(report["task"]),
        "quantized": quantization.quantized_engines(report),
        "half": half.half_engines(report),
        "shown": quantization.SHOWN,
        "examples": examples,
        "attention": looks.attention_maps(report, images),
        "ticked": any(group.correct for example in examples for group in example.groups),
        "differing": sum(example.disagreements > 0 for example in examples),
        "recipe": json.dumps(report["provenance"]["recipe"], indent=2, ensure_ascii=False),
        "digests": _digests(report),
    }


def _judged(report: dict[str, Any]) -> dict[str, Any]:
    """The verdict, and every engine against the original: of a run and of a search."""
    return {
        "report": report,
        "gate": table.gate(report["verdict"]["gate"]),
        "headline": table.headline(report),
        "rows": table.main_rows(report),
        "benched": bool(lookup.bench_results(report)),
        "metric": measures.metric(report),
        "agreement_of": measures.agreement_of(report),
        "counts_nothing": measures.counts_nothing(report),
        "noun": report["data"]["noun"],
        "plots": [_shown(plot) for plot in render_plots(report)],
    }


def _where_time_goes(bench: Mapping[str, Any] | None) -> dict[str, Any] | None:
    found = context.section(bench)
    return None if found is None else {**vars(found), "plot": _shown(found.plot) if found.plot else None}


def _shown(plot: Plot) -> dict[str, str]:
    """Inline SVG is markup by design; its serialiser escapes every text and attribute."""
    wide, narrow = Markup(plot.wide), Markup(plot.narrow)  # noqa: S704
    return {"title": plot.title, "caption": plot.caption, "wide": wide, "narrow": narrow}


def _soft_breaks(value: str) -> Markup:
    """A CamelCase name, escaped, that may be broken before each capital."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z])(?=[A-Z])", value))


def _examples(report: Mapping[str, Any], images: Mapping[str, bytes]) -> list[Example]:
    """The examples, those with most disagreements first, else in the report's order."""
    examples = [_example(report, example, index, images) for index, example in enumerate(report["examples"], start=1)]
    return sorted(examples, key=lambda example: -example.disagreements)


def _example(report: Mapping[str, Any], example: Mapping[str, Any], index: int, images: Mapping[str, bytes]) -> Example:
    """One example: its image, if it is one, as a data URI, and its answers."""
    label, name = example["label"], example["image"]
    source = None if name is None else lookup.data_uri(images.get(name))
    alt = f"Example {report['data']['noun']} {index}" + ("" if label is None else f", labelled {label}")
    return Example(name is not None, source, alt, label, _answer_groups(report["task"], example))


def _answer_groups(task: str, example: Mapping[str, Any]) -> list[AnswerGroup]:
    """The answers to one sample by what they say: the original's answer first, the others as they come."""
    original = example["reference"]["label"]
    wanted = example["label"] if task in _ANSWERED_IN_WORDS else None
    groups: dict[str, AnswerGroup] = {}
    for artifact, answer in {lookup.ORIGINAL: example["reference"], **example["engines"]}.items():
        label = answer["label"]
        group = groups.setdefault(label, AnswerGroup(label, label != original, label == wanted, []))
        group.answers.append(_answer(artifact, answer["score"]))
    return list(groups.values())


def _answer(artifact: str, score: float | None) -> Answer:
    """An artifact's score in words and as the length of a bar."""
    share = score if score is not None and text.known(score) else 0.0
    shown = None if score is None else text.percent(score)
    return Answer(artifact, shown, f"{100 * min(max(share, 0.0), 1.0):.1f}%")


def _digests(report: Mapping[str, Any]) -> dict[str, str]:
    """The digests that are not those of a bundle file: what the model was read from, and the data."""
    provenance, data = report["provenance"], report["provenance"]["data"]
    digests = {
        **{f"{name} (sha256)": digest for name, digest in provenance["source"]["sha256"].items()},
        "Calibration data": data["calibration"] if report["calibration"] else None,
        "Evaluation data": data["evaluation"],
    }
    return {name: digest for name, digest in digests.items() if digest}
