"""The section of attention maps: a few examples, each with the map of the original and those of engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitdeploy.document.report import Report
from vitdeploy.report import lookup, text
from vitdeploy.report.page import RunPage
from vitdeploy.tasks.answers import MappedExample


@dataclass(frozen=True)
class Look:
    """One map with the answer that goes with it. `note`: how much of it is on patches, or where that of the original
    is."""

    artifact: str
    source: str | None
    alt: str
    answer: str
    differs: bool
    note: str


@dataclass(frozen=True)
class LookedAt:
    """One example, its image first. `differs`: an engine whose map is here answers something other than the
    original."""

    source: str | None
    alt: str
    differs: bool
    views: list[Look]


@dataclass(frozen=True)
class Attention:
    """The content of the section. `whose`: what the maps of engines are read from; empty if there are none.
    `left_out`: engines without maps, and why."""

    blocks: int
    grid: str
    reader: str
    whose: str
    left_out: list[str]
    examples: list[LookedAt]


def attention_view(page: RunPage) -> list[Attention]:
    """Nothing where the report has no maps."""
    report, images = page.report, page.images
    found = report.attention
    if found is None:
        return []
    examples = [_looked_at(report, each, images) for each in found.examples]
    engines = any(len(each.views) > 1 for each in examples)
    whose = (
        "An engine fuses its attention, so its map is that of the graph it was compiled from, quantized as it is, run "
        "on ONNX Runtime. All maps of an image have one scale."
    )
    attention = Attention(
        found.blocks,
        "{} × {}".format(*found.grid),
        found.reader,
        whose if engines else "",
        [f"No map of {name}: {why}." for name, why in found.left_out.items()],
        examples,
    )
    return [attention]


def _looked_at(report: Report, row: MappedExample, images: Mapping[str, bytes]) -> LookedAt:
    example = report.examples[row.example]
    answers = {lookup.ORIGINAL: example.reference, **example.engines}
    views = []
    for each in row.maps:
        name, answer = each.artifact, answers[each.artifact]
        score = "" if answer.score is None else f", {text.percent(answer.score)}"
        note = f"{text.percent(each.on_patches, 0)} on patches"
        if each.shared is not None:
            note = f"{text.percent(each.shared)} of it as the original"
        views.append(
            Look(
                artifact=name,
                source=lookup.data_uri(images.get(each.image)),
                alt=f"Where {name} looks in example {report.data.noun} {row.example + 1}",
                answer=f"{answer.label}{score}",
                differs=answer.label != example.reference.label,
                note=note,
            )
        )
    source = None if example.image is None else lookup.data_uri(images.get(example.image))
    alt = f"Example {report.data.noun} {row.example + 1}"
    return LookedAt(source, alt, any(look.differs for look in views), views)
