"""The evaluation samples shown in a report, each with the reason for showing it and all answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.tasks.adapter import Data, TaskAdapter
from vitdeploy.tasks.answers import ExampleFacts, PanelFacts, Why
from vitdeploy.verification.records import Answers

ORIGINAL = "original"
# The most samples of each kind.
CHANGED, UNSURE, USUAL = 16, 4, 8


@dataclass(frozen=True)
class Chosen:
    """The index of a sample, the reason for showing it, the engine with the worst answer, and the engines whose answers
    changed."""

    index: int
    why: Why
    engine: str
    differing: tuple[str, ...] = ()


def choose(adapter: TaskAdapter, reference: Answers, engines: Mapping[str, Answers], data: Data) -> list[Chosen]:
    """Return the samples to show: first those with changed answers, worst first (`verification.changes`); then those
    with the original's least certain answers; then one per class, or evenly spread ones if there are no classes or too
    many."""
    names = list(engines)
    changes = [adapter.changes(answers, reference, data) for answers in engines.values()]
    severity = np.stack([change.severity for change in changes])
    worst, by = severity.max(axis=0), severity.argmax(axis=0)
    order = np.argsort(-worst, kind="stable")
    chosen: dict[int, Why] = {int(i): "changed" for i in order[:CHANGED] if worst[i] > 0}
    certainty = adapter.certainty(reference)
    if certainty is not None:
        _take(chosen, np.argsort(certainty, kind="stable"), "unsure", UNSURE)
    _take(chosen, _spread(adapter, reference, data), "usual", USUAL)

    def differing(i: int) -> tuple[str, ...]:
        return tuple(name for name, each in zip(names, changes, strict=True) if each.changed[i])

    return [Chosen(i, why, names[by[i]], differing(i)) for i, why in chosen.items()]


def _take(chosen: dict[int, Why], order: Iterable[int], why: Why, count: int) -> None:
    """Return the first `count` of an order that are not chosen yet."""
    free = list(dict.fromkeys(int(i) for i in order if int(i) not in chosen))
    chosen.update(dict.fromkeys(free[:count], why))


def _spread(adapter: TaskAdapter, reference: Answers, data: Data) -> Iterator[int]:
    """Yield samples of evenly spread classes, then any."""
    n = len(reference)
    known = adapter.classified(reference, data)
    if known is not None:
        classes, first = np.unique(known.truth, return_index=True)
        yield from (int(first[i]) for i in _even(len(classes), USUAL))
    yield from _even(n, min(n, CHANGED + UNSURE + USUAL))


def _even(n: int, count: int) -> list[int]:
    return list(dict.fromkeys(np.linspace(0, n - 1, count).round().astype(int).tolist()))


def example(
    adapter: TaskAdapter,
    data: Data,
    chosen: Chosen,
    reference: Answers,
    engines: Mapping[str, Answers],
    labels: Sequence[str] | None,
) -> tuple[ExampleFacts, dict[str, bytes]]:
    """Return a sample for report.json with all answers, and the name of its picture if it is an image."""
    i = chosen.index
    picture = adapter.picture(data, i)
    name = None if picture is None else f"{i}.{_suffix(picture)}"
    pictures = {} if name is None or picture is None else {name: picture}
    panels: list[PanelFacts] = []
    shown = {ORIGINAL: reference, chosen.engine: engines[chosen.engine]}
    for place, (title, content) in enumerate(adapter.panels(data, i, shown)):
        panels.append(PanelFacts(title, f"{i}-{place}.{_suffix(content)}"))
        pictures[panels[-1].image] = content
    row = ExampleFacts(
        number=i,
        why=chosen.why,
        sample=adapter.sample_name(data, i),
        image=name,
        label=adapter.truth_of(data, i, labels),
        reference=adapter.show(reference, i, labels),
        engines={artifact: adapter.show(found, i, labels) for artifact, found in engines.items()},
        marks=adapter.marks(chosen.engine, engines[chosen.engine], reference, i),
        panels=tuple(panels),
        differing=chosen.differing,
    )
    return row, pictures


def _suffix(picture: bytes) -> str:
    return "png" if picture.startswith(b"\x89PNG") else "jpg"
