"""Rows of a history as series, each with where it changed and what is another one on both sides."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from vitdeploy.document.bench import Omission
from vitdeploy.document.history import ChangeFacts, Difference, HistoryDocument, PointFacts, SeriesFacts, ShareFacts
from vitdeploy.history.canaries import canaries_of
from vitdeploy.history.changes import LEAST_OF_LEVEL, LEAST_RESULTS, Change, find_changes
from vitdeploy.history.row import ResultRow, change_sentence, now

# What may explain a change: the facts of a row, in words.
FACTS: dict[str, Callable[[ResultRow], str]] = {
    "runtime": lambda row: f"{row.runtime} {row.runtime_version}".strip(),
    "driver": lambda row: row.driver,
    "vitdeploy": lambda row: row.vitdeploy,
    "model digest": lambda row: (row.model_digest or "")[:12],
    "host": lambda row: row.host,
    "system": lambda row: row.system,
    "Python": lambda row: row.python,
    "command": lambda row: row.kind,
}
# A change may be found this many results beside where it is.
_BESIDE = 1
# So many results on either side of a change say what came up with it, where chance does the same this rarely.
_NEAR, _CHANCE = 30, 0.001

_Head = tuple[str, str, str, str, str]
_Key = tuple[_Head, tuple[int | None, int | None, int | None]]


def history_document(
    rows: Sequence[ResultRow],
    left_out: Sequence[Omission],
    place: str,
    document_of: Callable[[ResultRow], str | None] = lambda row: None,
) -> HistoryDocument:
    """The document of a history's rows, which are in its order. `document_of`: the document of a row, as JSON."""
    return HistoryDocument(
        format=1,
        created=now().isoformat(timespec="seconds"),
        place=place,
        results=len({row.run for row in rows}),
        series=tuple(_series(key, each) for key, each in _grouped(rows).items()),
        canaries=canaries_of(rows, document_of),
        left_out=tuple(left_out),
    )


def _grouped(rows: Sequence[ResultRow]) -> dict[_Key, list[ResultRow]]:
    """The rows of each series. Those without times, as of engines that did not give their golden answers, are part of
    all series of their artifact on their machine, and one of their own where there is none."""
    timed: dict[_Key, list[ResultRow]] = {}
    for row in rows:
        if row.p50_ms is not None:
            timed.setdefault(_key(row), [])
    heads = {key[0] for key in timed}
    for row in rows:
        if row.p50_ms is None and _head(row) in heads:
            for key in timed:
                if key[0] == _head(row):
                    timed[key].append(row)
        else:
            timed.setdefault(_key(row), []).append(row)
    return dict(sorted(timed.items(), key=lambda item: (item[0][0], [each or 0 for each in item[0][1]])))


def _head(row: ResultRow) -> _Head:
    cores = f"{row.cores} cores" if row.cores is not None else ""
    machine = ", ".join(filter(None, [row.device, row.cpu, cores]))
    return row.model, row.artifact, row.target, row.precision, machine


def _key(row: ResultRow) -> _Key:
    return _head(row), (row.batch, row.offline_batch, row.threads)


def _series(key: _Key, rows: Sequence[ResultRow]) -> SeriesFacts:
    (model, artifact, target, precision, machine), (batch, offline_batch, threads) = key
    judged = [(number, row) for number, row in enumerate(rows, 1) if row.p50_ms is not None and row.decided]
    changes: list[Change] = []
    noise, too_few = None, ""
    if len(judged) < LEAST_RESULTS:
        too_few = f"{len(judged)} decided results; a change is looked for from {LEAST_RESULTS} on"
    else:
        changes, noise = find_changes([row.p50_ms for _, row in judged if row.p50_ms is not None])
    edges = [0, *(change.first for change in changes), len(judged)]
    return SeriesFacts(
        model=model,
        artifact=artifact,
        target=target,
        precision=precision,
        machine=machine,
        batch=batch,
        offline_batch=offline_batch,
        threads=threads,
        points=tuple(_point(number, row) for number, row in enumerate(rows, 1)),
        changes=tuple(
            _change(
                " ".join(filter(None, [model, artifact])),
                change,
                judged[change.first],
                [row for _, row in judged[start:first]],
                [row for _, row in judged[first:end]],
            )
            for change, start, first, end in zip(changes, edges, edges[1:], edges[2:], strict=False)
        ),
        noise=noise.deviation if noise else None,
        correlation=noise.correlation if noise else None,
        too_few=too_few,
    )


def _point(number: int, row: ResultRow) -> PointFacts:
    return PointFacts(
        number=number,
        sequence=row.sequence,
        time=row.time.isoformat(timespec="seconds"),
        host=row.host,
        kind=row.kind,
        p50_ms=row.p50_ms,
        p50_ms_ci95=(row.p50_ms_low, row.p50_ms_high),
        throughput=row.throughput,
        agreement=row.agreement,
        value=row.value,
        gate=row.gate,
        flags=tuple(row.flags.split()),
        decided=row.decided,
        undecided=row.undecided,
        error=row.error,
        runtime_version=row.runtime_version,
        vitdeploy=row.vitdeploy,
    )


def _change(
    name: str, change: Change, first: tuple[int, ResultRow], before: Sequence[ResultRow], after: Sequence[ResultRow]
) -> ChangeFacts:
    number, row = first
    sides = {what: _sides(fact, before, after) for what, fact in FACTS.items()}
    unclear = tuple(what for what, side in sides.items() if side == "unclear")
    found = ChangeFacts(
        number=number,
        time=row.time.isoformat(timespec="seconds"),
        direction="slower" if change.ratio > 1 else "faster",
        before_ms=change.before,
        after_ms=change.after,
        ratio=change.ratio,
        ci95=change.ci95,
        differences=tuple(
            Difference(what, FACTS[what](before[-1 - _BESIDE]), FACTS[what](after[_BESIDE]))
            for what, side in sides.items()
            if side == "other"
        ),
        same=tuple(what for what, side in sides.items() if side == "same"),
        unclear=unclear,
        shares=tuple(each for what in unclear for each in _shares(what, before, after)),
        sentence="",
    )
    return dataclasses.replace(found, sentence=change_sentence(name, found))


def _shares(what: str, before: Sequence[ResultRow], after: Sequence[ResultRow]) -> list[ShareFacts]:
    """The values of a fact that came up with a change among the results next to it. A value that all have by then came
    up somewhere else, as the results next to the change show."""
    from scipy.stats import fisher_exact

    fact, before, after, found = FACTS[what], before[-_NEAR:], after[:_NEAR], []
    for value in dict.fromkeys(map(fact, after)):
        old, having = sum(fact(row) == value for row in before), [row for row in after if fact(row) == value]
        rest = [row for row in after if fact(row) != value]
        table = [[len(having), len(rest)], [old, len(before) - old]]
        if fisher_exact(table, alternative="greater").pvalue < _CHANCE:
            times, others = ([row.p50_ms or 0.0 for row in rows] for rows in (having, rest))
            enough = min(len(times), len(others)) >= LEAST_OF_LEVEL
            ratio = statistics.median(times) / statistics.median(others) if enough else None
            found.append(ShareFacts(what, value, old, len(before), len(having), len(after), ratio))
    return found


def _sides(
    fact: Callable[[ResultRow], str], before: Sequence[ResultRow], after: Sequence[ResultRow]
) -> Literal["other", "same", "unclear", "unknown"]:
    """Whether a fact is another one on both sides of a change, but for the results right at it."""
    every = {fact(row) for row in (*before, *after)}
    if every == {""}:
        return "unknown"
    if len(every) == 1:
        return "same"
    sides = {fact(row) for row in before[:-_BESIDE]}, {fact(row) for row in after[_BESIDE:]}
    return "unclear" if sides[0] & sides[1] else "other"
