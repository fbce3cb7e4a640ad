"""report.json as one self-contained HTML page: no scripts, no external requests, readable offline and in print."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vitdeploy.report import lookup, table, text
from vitdeploy.report.plots import render_plots


@dataclass(frozen=True)
class Answer:
    """How sure one artifact was of its answer."""

    artifact: str
    confidence: str
    bar: str


@dataclass(frozen=True)
class AnswerGroup:
    """The artifacts that gave the same answer about an example image."""

    label: str
    differs: bool
    correct: bool
    answers: list[Answer]


@dataclass(frozen=True)
class Example:
    """An example image with all answers, those that agree with the original first."""

    source: str | None
    alt: str
    label: str | None
    groups: list[AnswerGroup]

    @property
    def disagreements(self) -> int:
        """How many engines answered something other than the original."""
        return sum(len(group.answers) for group in self.groups if group.differs)


def render_html(report: dict[str, Any], images: Mapping[str, bytes]) -> str:
    """The report page. `report` is the content of report.json, `images` holds the PNG files its examples name.

    All text in the report is taken as untrusted: it is escaped, and cleaned of control characters.
    """
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
        soft_breaks=_soft_breaks,
    )
    return environment.get_template("template.html.jinja").render(_context(text.cleaned(report), images))


def _context(report: dict[str, Any], images: Mapping[str, bytes]) -> dict[str, Any]:
    """Everything that the template shows."""
    examples = _examples(report, images)
    return {
        "report": report,
        "gate": table.gate(report["verdict"]["gate"]),
        "gate_of": table.gate,
        "headline": table.headline(report),
        "rows": table.main_rows(report),
        "benched": bool(lookup.bench_results(report)),
        "labelled": lookup.reference_top1(report) is not None,
        # Inline SVG is markup by design; its serialiser escapes every text and attribute.
        "plots": [
            {
                "title": plot.title,
                "caption": plot.caption,
                "wide": Markup(plot.wide),  # noqa: S704
                "narrow": Markup(plot.narrow),  # noqa: S704
            }
            for plot in render_plots(report)
        ],
        "examples": examples,
        "examples_labelled": any(example.label is not None for example in examples),
        "differing": sum(example.disagreements > 0 for example in examples),
        "recipe": json.dumps(report["provenance"]["recipe"], indent=2, ensure_ascii=False),
        "digests": _digests(report),
    }


def _soft_breaks(value: str) -> Markup:
    """A CamelCase name, escaped, that may be broken before each capital."""
    return Markup("<wbr>").join(re.split(r"(?<=[a-z])(?=[A-Z])", value))


def _examples(report: Mapping[str, Any], images: Mapping[str, bytes]) -> list[Example]:
    """The examples, those with most disagreements first, else in the report's order."""
    examples = [_example(example, index, images) for index, example in enumerate(report["examples"], start=1)]
    return sorted(examples, key=lambda example: -example.disagreements)


def _example(example: Mapping[str, Any], index: int, images: Mapping[str, bytes]) -> Example:
    """One example: its image as a data URI and its answers."""
    label, content = example["label"], images.get(example["image"])
    source = None if content is None else f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
    alt = f"Example image {index}" + ("" if label is None else f", labelled {label}")
    return Example(source, alt, label, _answer_groups(example))


def _answer_groups(example: Mapping[str, Any]) -> list[AnswerGroup]:
    """The answers to one image by what they say: the original's answer first, the others as they come."""
    original = example["reference"]["label"]
    groups: dict[str, AnswerGroup] = {}
    for artifact, answer in {lookup.ORIGINAL: example["reference"], **example["engines"]}.items():
        label = answer["label"]
        group = groups.setdefault(label, AnswerGroup(label, label != original, label == example["label"], []))
        group.answers.append(_answer(artifact, answer["score"]))
    return list(groups.values())


def _answer(artifact: str, score: float | None) -> Answer:
    """An artifact's confidence in words and as the length of a bar."""
    share = score if score is not None and text.known(score) else 0.0
    return Answer(artifact, text.percent(score), f"{100 * min(max(share, 0.0), 1.0):.1f}%")


def _digests(report: Mapping[str, Any]) -> dict[str, str]:
    """The digests that are not those of a bundle file."""
    calibration = report["calibration"]
    digests = {
        "Checkpoint (sha256)": report["model"]["checkpoint_sha256"],
        "Calibration": calibration["digest"] if calibration else None,
    }
    return {name: digest for name, digest in digests.items() if digest}
