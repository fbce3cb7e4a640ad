"""Group the rows of a history into series, with their changes and what differs before and after each."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from vitdeploy.document.bench import Omission
from vitdeploy.document.history import ChangeFacts, Difference, HistoryDocument, PointFacts, SeriesFacts, ShareFacts
from vitdeploy.extensions import lazy
from vitdeploy.history.canaries import canaries_of
from vitdeploy.history.changes import LEAST_OF_LEVEL, LEAST_RESULTS, Change, find_changes
from vitdeploy.history.row import ResultRow, joined, now

stats = lazy("scipy.stats")
# Facts of a row that may explain a change: their names in a sentence, and their values.
FACTS: dict[str, tuple[str, Callable[[ResultRow], str]]] = {
    "runtime": ("the runtime", lambda row: f"{row.runtime} {row.runtime_version}".strip()),
    "driver": ("the driver", lambda row: row.driver),
    "vitdeploy": ("vitdeploy", lambda row: row.vitdeploy),
    "model digest": ("the model", lambda row: (row.model_digest or "")[:12]),
    "host": ("the host", lambda row: row.host),
    "system": ("the system", lambda row: row.system),
    "Python": ("Python", lambda row: row.python),
    "command": ("the command", lambda row: row.kind),
}
# The position of a detected change may be off by this many results.
_BESIDE = 1
# Results on either side of a change that are searched for values that appeared with it, and the significance level.
_NEAR, _CHANCE = 30, 0.001

_Head = tuple[str, str, str, str, str]
_Key = tuple[_Head, tuple[int | None, int | None, int | None]]


def history_document(
    rows: Sequence[ResultRow],
    left_out: Sequence[Omission],
    place: str,
    document_of: Callable[[ResultRow], str | None] = lambda row: None,
) -> HistoryDocument:
    """Return the document of a history's rows, given in its order. `document_of`: the document of a row, as JSON."""
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
    """Return the rows of each series. Rows without times, such as those of engines that failed their golden answers,
    belong to all series of their artifact on their machine, or form their own series."""
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
        decided = f"{len(judged)} decided result{'' if len(judged) == 1 else 's'}"
        too_few = f"{decided} (change detection needs {LEAST_RESULTS})"
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
    sides = {what: _sides(fact, before, after) for what, (_, fact) in FACTS.items()}
    unclear = tuple(what for what, side in sides.items() if side == "unclear")
    facts = ChangeFacts(
        number=number,
        time=row.time.isoformat(timespec="seconds"),
        direction="slower" if change.ratio > 1 else "faster",
        before_ms=change.before,
        after_ms=change.after,
        ratio=change.ratio,
        ci95=change.ci95,
        differences=tuple(
            Difference(what, *(FACTS[what][1](row) for row in (before[-1 - _BESIDE], after[_BESIDE])))
            for what, side in sides.items()
            if side == "other"
        ),
        same=tuple(what for what, side in sides.items() if side == "same"),
        unclear=unclear,
        shares=tuple(share for what in unclear for share in _shares(what, before, after)),
        sentence="",
    )
    return dataclasses.replace(facts, sentence=change_sentence(name, facts))


def _shares(what: str, before: Sequence[ResultRow], after: Sequence[ResultRow]) -> list[ShareFacts]:
    """Return the values of a fact that appeared with a change, among the results next to it. A value that all of them
    already have appeared elsewhere."""
    fact, before, after, found = FACTS[what][1], before[-_NEAR:], after[:_NEAR], []
    for value in dict.fromkeys(map(fact, after)):
        old, having = sum(fact(row) == value for row in before), [row for row in after if fact(row) == value]
        rest = [row for row in after if fact(row) != value]
        table = [[len(having), len(rest)], [old, len(before) - old]]
        if stats.fisher_exact(table, alternative="greater").pvalue < _CHANCE:
            times, others = ([row.p50_ms or 0.0 for row in rows] for rows in (having, rest))
            enough = min(len(times), len(others)) >= LEAST_OF_LEVEL
            ratio = statistics.median(times) / statistics.median(others) if enough else None
            found.append(ShareFacts(what, value, old, len(before), len(having), len(after), ratio))
    return found


def _sides(
    fact: Callable[[ResultRow], str], before: Sequence[ResultRow], after: Sequence[ResultRow]
) -> Literal["other", "same", "unclear", "unknown"]:
    """Whether a fact differs between both sides of a change, except for the results right at it."""
    every = {fact(row) for row in (*before, *after)}
    if every == {""}:
        return "unknown"
    if len(every) == 1:
        return "same"
    sides = {fact(row) for row in before[:-_BESIDE]}, {fact(row) for row in after[_BESIDE:]}
    return "unclear" if sides[0] & sides[1] else "other"


# --- A change of a series in one sentence -----------------------------------------------------------------------------


def change_sentence(name: str, change: ChangeFacts) -> str:
    """Return a sentence on a change of the series called `name`."""
    amount, bounds = _share(change.ratio), sorted(_share(each) for each in change.ci95)
    slower = change.direction == "slower"
    low, high = bounds if slower else (-bounds[1], -bounds[0])
    begin = (
        f"{name} got {abs(amount):.1f} % {change.direction} ({low:.1f} to {high:.1f}) "
        f"at result {change.number} of {change.time[:10]}"
    )
    return f"{begin}{_reasons(change)}."


def _reasons(change: ChangeFacts) -> str:
    parts = []
    if change.differences:
        several = "; the series does not show which of these is the cause" if len(change.differences) > 1 else ""
        parts.append(", when " + joined([_difference(difference) for difference in change.differences]) + several)
    if change.shares:
        parts.append(", " + joined([_share_of(share) for share in change.shares]))
    return "".join(parts) or ", and no recorded fact changed with it"


def _difference(found: Difference) -> str:
    before, after = (_value(found.what, each) for each in (found.before, found.after))
    return f"{FACTS[found.what][0]} changed from {before} to {after}"


def _share_of(found: ShareFacts) -> str:
    value = f"{'model' if found.what == 'model digest' else found.what} {_value(found.what, found.value)}"
    text = f"with {value} in {found.after} of {found.of_after} results after it, in {found.before} of "
    text += f"{found.of_before} before"
    if found.ratio is not None:
        share = _share(found.ratio)
        text += f" ({abs(share):.1f} % {'slower' if share > 0 else 'faster'} than the others)"
    return text


def _value(what: str, value: str) -> str:
    return (f"sha256:{value}" if what == "model digest" else value) if value else "unknown"


def _share(ratio: float) -> float:
    return 100 * (ratio - 1)
