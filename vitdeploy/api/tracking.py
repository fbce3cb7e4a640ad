"""Results for MLflow, Weights & Biases and Bencher."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.deploy import Deployment
from vitdeploy.api.history_rows import Result, rows_of
from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.shown import Shown
from vitdeploy.api.sweep import Swept
from vitdeploy.api.tables import Line
from vitdeploy.errors import MissingPackageError

if TYPE_CHECKING:
    from vitdeploy.history.row import ResultRow
    from vitdeploy.history.trackers.outcome import Attached, Outcome
    from vitdeploy.history.trackers.tracker import Sent


@dataclass(frozen=True, repr=False)
class Reported(Shown):
    """What became of results at each tracker."""

    sent: tuple[Sent, ...]

    def lines(self) -> list[Line]:
        return [line for each in self.sent for line in sent_lines(each)]


def sent_lines(sent: Sent) -> list[Line]:
    """What became of results at one tracker."""
    return [sent.sentence, *(f"left out of {sent.where}: {each.what}: {each.why}" for each in sent.left_out)]


def report_to(
    trackers: str | Sequence[str],
    results: Result | str | Path,
    *,
    bundle: bool = False,
    progress: bool | Reporter = True,
) -> Reported:
    """Send a result, or all of a history, to trackers of experiments. What is there already is not sent again: it is
    known by its run in the history. A result that is in none is new each time.

    Args:
        trackers: "mlflow" or "mlflow:URI", "wandb" or "wandb:PROJECT", with "ENTITY/" before it or not, and
            "bencher:FILE", which has the latest result of each series in the Bencher Metric Format.
        results: what `bench`, `deploy`, `run`, `compare` or `sweep` returned, or a history: a folder or a URI.
        bundle: send the bundle of a `run`, and those of a `sweep`, too.
        progress: as for `vitdeploy.export`.

    Raises:
        InputError: no tracker that is known. MissingPackageError: its client is not installed. HostError: it does not
            answer, or refuses. OutputError, StorageError: of a file. Errors of a history as `read_history`.

    >>> import json, vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, scenarios=["single"], duration=0.1, progress=False)
    >>> vd.report_to("bencher:measured.json", found, progress=False)
    bencher:measured.json: 1 result sent
    >>> [sorted(measures) for measures in json.load(open("measured.json")).values()]
    [['latency', 'p99-latency', 'throughput']]
    """
    from vitdeploy.history.files import of_one_result
    from vitdeploy.history.trackers.named import open_tracker

    opened = [open_tracker(each) for each in ([trackers] if isinstance(trackers, str) else trackers)]
    reporter = reporting(progress)
    with reporter:
        for each in opened:
            each.prepare()
        if isinstance(results, str | Path):
            outcomes = outcomes_of_history(results, reporter)
        else:
            outcomes = outcomes_of_result(results, of_one_result(rows_of(results)), bundle)
        return Reported(tuple(each.send(outcomes, reporter.progress) for each in opened))


def outcomes_of_history(where: str | Path, reporter: Reporter) -> list[Outcome]:
    """All results of a history, in its order; the files that are none of it are left out, as `read_history` tells."""
    from vitdeploy.history.files import documents_of, read_rows
    from vitdeploy.history.place import open_place
    from vitdeploy.history.trackers.outcome import Outcome, outcomes_of

    place = open_place(where)
    rows, _ = read_rows(place, reporter.progress)
    document_of = documents_of(place)

    def attaching(rows: tuple[ResultRow, ...]) -> Callable[[], Attached]:
        return lambda: _attached(rows[0], document_of(rows[0]), None)

    return [Outcome(each, attaching(each)) for each in outcomes_of(rows)]


def outcomes_of_result(result: Result, rows: Sequence[ResultRow], bundle: bool) -> list[Outcome]:
    """A result with its rows, and with its bundles if they are wanted."""
    from vitdeploy.history.trackers.outcome import Outcome, outcomes_of
    from vitdeploy.spec import encode

    text = json.dumps(encode(result.document), allow_nan=False)

    def outcome(rows: tuple[ResultRow, ...]) -> Outcome:
        home = _home(result, rows[0].model)
        has = bundle and home is not None and (home / "manifest.json").is_file()
        return Outcome(rows, lambda: _attached(rows[0], text, home), home if has else None)

    return [outcome(each) for each in outcomes_of(rows)]


def _home(result: Result, model: str) -> Path | None:
    """The folder of the bundle that was made of a model."""
    if isinstance(result, Swept):
        return result.folder / model
    return result.folder if isinstance(result, Deployment) else None


def _attached(row: ResultRow, text: str | None, home: Path | None) -> Attached:
    """The document with its page, which is the one in the folder `home` where there is one, and the recipe."""
    from vitdeploy.history.trackers.outcome import Attached, flat

    document = json.loads(text) if text is not None else None
    if not isinstance(document, dict):
        return Attached()
    if isinstance(document.get("recipes"), list):  # of a sweep, what is about this model
        parts = [each["report"] or {"name": each["name"], **(each["error"] or {})} for each in document["recipes"]]
        document = next((each for each in parts if each["name"] == row.model), {})
    files = {"result.json": json.dumps(document, indent=1).encode()}
    page = home / "report.html" if home is not None else None
    html = page.read_bytes() if page is not None and page.is_file() else _rendered(document)
    if html is not None:
        files["report.html"] = html
    provenance = document.get("provenance")
    return Attached(files, flat(provenance.get("recipe"), "recipe") if isinstance(provenance, dict) else {})


def _rendered(document: dict[str, object]) -> bytes | None:
    """The page of a document that has one, without pictures; None of others, and of what is not read here."""
    from vitdeploy.document.comparison import ComparisonDocument
    from vitdeploy.document.report import Report
    from vitdeploy.spec import DecodeError, decode

    try:
        from vitdeploy.report.html import render_html, render_regression

        if "provenance" in document:
            return render_html(decode(Report, document), {}).encode()
        if "baseline" in document:
            return render_regression(decode(ComparisonDocument, document)).encode()
    except (DecodeError, MissingPackageError, ModuleNotFoundError):  # of another version; without the extra `export`
        return None
    return None
