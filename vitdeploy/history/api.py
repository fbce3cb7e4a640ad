"""Read, extend and send histories of results."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union, cast

from vitdeploy import __version__
from vitdeploy.api.values import Column, Line, Reporter, Shown, Table, interval, reporting
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import file_sha256, read_bundle
from vitdeploy.document.bench import BenchDocument, DeviceBench
from vitdeploy.document.comparison import ComparisonDocument
from vitdeploy.document.history import ChangeFacts, HistoryDocument, PointFacts, SeriesFacts
from vitdeploy.document.report import Provenance, Report, read_report
from vitdeploy.document.sweep import SweepDocument
from vitdeploy.errors import AnswersError, MissingPackageError, VitdeployError
from vitdeploy.history import canaries, of_documents
from vitdeploy.history.files import append, documents_of, of_one_result, read_rows, require_packages
from vitdeploy.history.of_documents import MeasuredArtifact, MeasuredMachine, digest_of, row_of_canary
from vitdeploy.history.row import ResultRow, now, open_place
from vitdeploy.history.series import history_document
from vitdeploy.history.trackers import Attached, Sent, TrackedResult, flat, open_tracker, outcomes_of
from vitdeploy.paths import is_dir, is_file
from vitdeploy.pipeline.early import REPORT_FILE
from vitdeploy.publish import replacing_file
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import DecodeError, decode, encode
from vitdeploy.stages.step import find_graph, package_versions

if TYPE_CHECKING:
    # Deploying a bundle needs PyTorch; recording a benchmark does not.
    from vitdeploy.api.bench import Benchmark
    from vitdeploy.api.deploy import Deployment
    from vitdeploy.api.sweep import Swept
    from vitdeploy.api.verify import Compared

# --- A history as text: one line per series, then the changes of each -------------------------------------------------


def history_lines(document: HistoryDocument) -> list[Line]:
    """Return a table of the series, then each change in words, then remarks."""
    results = f"{document.results} result{'' if document.results == 1 else 's'}"
    several = f"{results} in {len(document.series)} series at {document.place}"
    lines: list[Line] = [several, *([_table(document)] if document.series else [])]
    for number, series in enumerate(document.series, 1):
        lines += [line for change in series.changes for line in change_lines(number, change)]
        lines += [f"series {number}: {text}" for text in _remarks(series)]
    for canary in document.canaries:
        lines.append(f"wrong answers: {canary.sentence}")
        if canary.proposal is not None:
            lines.append("    --json contains a proposed entry for the known-bad table (docs/results/known-bad.md)")
    return [*lines, *(f"left out: {each.what}: {each.why}" for each in document.left_out)]


def _table(document: HistoryDocument) -> Table:
    columns = (
        Column("no."),
        Column("model", 95, left=True),
        Column("engine", 90, left=True),
        Column("precision", 30, left=True),
        Column("machine", 40, left=True),
        Column("batch", 20),
        Column("results", 60),
        Column("last p50 ms", 100, left=True),
        Column("changes", 98, left=True),
        Column("flags (last)", 70, left=True),
    )
    return Table(columns, tuple(_row(number, series) for number, series in enumerate(document.series, 1)))


def _row(number: int, series: SeriesFacts) -> tuple[str, ...]:
    last = series.points[-1]
    timed = next((point for point in reversed(series.points) if point.p50_ms is not None), None)
    return (
        str(number),
        series.model,
        series.artifact,
        series.precision,
        series.machine,
        "" if series.batch is None else str(series.batch),
        str(len(series.points)),
        "" if timed is None else _p50(timed),
        " ".join(f"{change.direction} at {change.number}" for change in series.changes)
        or ("" if series.too_few else "none"),
        " ".join([*last.flags, *([] if last.decided else ["not decided"])]),
    )


def _p50(point: PointFacts) -> str:
    low, high = point.p50_ms_ci95
    assert point.p50_ms is not None
    return interval(point.p50_ms, (low, high) if low is not None and high is not None else None, 3)


def change_lines(number: int, change: ChangeFacts) -> list[str]:
    """Return a change in words: the sentence, then the levels and further facts of both sides."""
    level = f"{change.before_ms:.4g} to {change.after_ms:.4g} ms"
    return [f"series {number}: {change.sentence}", *(f"    {line}" for line in (level, *change.further))]


def _remarks(series: SeriesFacts) -> list[str]:
    undecided = [str(point.number) for point in series.points if not point.decided and not point.error]
    remarks = [f"undecided results, left out of change detection: {', '.join(undecided)}"] if undecided else []
    remarks += [f"result {point.number} ({point.time}): {point.error}" for point in series.points if point.error]
    return remarks + ([series.too_few] if series.too_few else [])


# --- The rows of one result: from its document, with the machine and the model ----------------------------------------


Result: TypeAlias = Union["Benchmark", "Deployment", "Compared", "Swept"]


def rows_of(result: Result) -> list[ResultRow]:
    """Return the rows of a result that was measured on this machine, or on a registered device."""
    document = result.document
    if isinstance(document, Report):
        return of_documents.rows_of_report(document, this_machine(engine.target for engine in document.engines))
    if isinstance(document, SweepDocument):
        reports = [recipe.report for recipe in document.recipes if recipe.report is not None]
        targets = {engine.target for report in reports for engine in report.engines}
        return of_documents.rows_of_sweep(document, this_machine(targets))
    if isinstance(document, ComparisonDocument):
        machine = this_machine(row.target for row in document.bench.results) if document.bench else this_machine(())
        return of_documents.rows_of_comparison(document, _candidate(document), machine)
    names = {row.artifact: _named(row.artifact) for row in document.results}
    return of_documents.rows_of_bench(document, names, _machine_of(document, cast("Benchmark", result).device), now())


def _machine_of(document: BenchDocument, device: str) -> MeasuredMachine:
    """Return the machine of a benchmark: this one, or the `device` that ran it."""
    if not isinstance(document, DeviceBench):
        return this_machine(row.target for row in document.results)
    engines = document.engines.values()
    # The device runs the version of vitdeploy that was sent from here.
    return MeasuredMachine(
        {"vitdeploy": __version__, **document.host}, {engine.target: engine.device for engine in engines}, device
    )


def this_machine(targets: Iterable[str]) -> MeasuredMachine:
    """Return this machine, with the devices of these targets."""
    known = sorted({target for target in targets if target in TARGETS})
    devices: dict[str, Mapping[str, str]] = {}
    for target in known:
        with contextlib.suppress(VitdeployError):
            devices[target] = RUNTIME[target].describe_device()
    versions = package_versions(["torch", *(TARGETS[target].package for target in known)])
    return MeasuredMachine({**describe_host(), "vitdeploy": __version__, **versions}, devices)


def _named(text: str) -> MeasuredArtifact:
    """Resolve the name of a benchmarked artifact: FOLDER:ENGINE of a bundle, a graph, or a model. Duplicates end in a
    number."""
    name = re.sub(r" \([0-9]+\)$", "", text)
    folder, _, engine = name.rpartition(":")
    if folder and (found := _of_bundle(Path(folder), engine)) is not None:
        return found
    path = Path(name)
    with contextlib.suppress(VitdeployError, OSError):
        return MeasuredArtifact(path.stem, path.name, file_sha256(path if is_file(path) else find_graph(path)))
    return MeasuredArtifact(path.name or name, path.name or name)


def named_engine(bundle: Path, engine: str) -> MeasuredArtifact:
    """Return an engine of a bundle, by its names if the bundle cannot be read."""
    return _of_bundle(bundle, engine) or MeasuredArtifact(bundle.name, engine)


def graph_of(bundle: Path, engine: str) -> dict[str, object] | None:
    """Return the operators and the opset of an engine's graph, to find what its runtime computes wrongly; None if it
    cannot be read."""
    try:
        from vitdeploy.graph.io.admit import admit_graph

        found = next(each for each in read_bundle(bundle).engines if each.artifact == engine)
        model = admit_graph(bundle / found.graph)
    except (VitdeployError, ModuleNotFoundError, StopIteration):
        return None
    names = sorted({node.op_type for node in model.graph if node.domain in ("", "ai.onnx")})
    return {"operators": names, "opset": model.opset_imports.get("", 0)}


def _of_bundle(folder: Path, engine: str) -> MeasuredArtifact | None:
    """Return an engine of a bundle; None without a readable bundle."""
    try:
        manifest = read_bundle(folder)
    except VitdeployError:
        return None
    try:
        files = decode(Provenance, manifest.provenance).source.sha256
    except DecodeError:  # a bundle that `run` did not make
        graphs = {engine.graph or engine.files[0] for engine in manifest.engines}
        files = {entry.path: entry.sha256 for entry in manifest.files if entry.path in graphs}
    return MeasuredArtifact(manifest.name, engine, digest_of(files))


def _candidate(document: ComparisonDocument) -> MeasuredArtifact:
    """Return the candidate of a comparison: a bundle or a report."""
    path = Path(document.candidate)
    if (of_bundle := _of_bundle(path, "") if is_dir(path) else None) is not None:
        return of_bundle
    with contextlib.suppress(VitdeployError):
        report = read_report(path / REPORT_FILE if is_dir(path) else path)
        return MeasuredArtifact(report.name, "", digest_of(report.provenance.source.sha256))
    return MeasuredArtifact(path.name, "")


# --- Record results: each adds one file to a history ------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class History(Shown):
    """The series of a history; `document` is what the command line prints with --json."""

    document: HistoryDocument

    @property
    def slower(self) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        """Pairs of a series and one of its changes to a longer latency."""
        return self._of("slower")

    @property
    def faster(self) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        """Pairs of a series and one of its changes to a shorter latency."""
        return self._of("faster")

    def _of(self, direction: str) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        every = [(series, change) for series in self.document.series for change in series.changes]
        return tuple((series, change) for series, change in every if change.direction == direction)

    def lines(self) -> list[Line]:
        return history_lines(self.document)


def read_history(where: str | Path, page: str | Path | None = None, *, progress: bool | Reporter = True) -> History:
    """Read a history: its series and their changes.

    Args:
        where: a folder, or a URI that fsspec knows, such as "s3://bucket/folder".
        page: the file to write the HTML page to.
        progress: as for `vitdeploy.export`.

    Raises:
        MissingFileError: no history at `where`. InputError: an unknown URI. StorageError: the history cannot be read,
            or the page cannot be written. MissingPackageError: the extra `data` is not installed. OutputError:
            `page` is a folder, or a file that vitdeploy did not write.
    """
    place, reporter = open_place(where), reporting(progress)
    with reporter:
        rows, left_out = read_rows(place, reporter.progress)
        document = history_document(rows, left_out, place.name, documents_of(place))
        if page is not None:
            _write_page(Path(page), document)
    return History(document)


def record(where: str | Path, result: Result) -> str:
    """Add a result to a history as one new file; return the file's name. Safe to call from several processes at once.

    Args:
        where: a folder, created if missing, or a URI.
        result: a result of `bench`, `deploy`, `run`, `compare` or `sweep` on this machine.

    Raises:
        Errors as `read_history`; StorageError: nothing can be written there.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, scenarios=["single"], duration=0.1, progress=False)
    >>> _ = vd.record("history", found)
    >>> vd.read_history("history", progress=False).document.results
    1
    """
    return append(open_place(where), rows_of(result), result.document)


@contextlib.contextmanager
def recorded(
    where: str | Path | None, trackers: Sequence[str] = (), *, bundle: bool = False, progress: bool | Reporter = False
) -> Iterator[Callable[[Result], None]]:
    """Context manager around a measurement; yields a function that records and sends its result.

    An unwritable history or unusable tracker raises before the block. An engine that fails its golden answers is
    recorded too. Errors of recording the result have `after_document` set: the result has been printed by then.

    Raises:
        Errors as `record` and `report_to`.
    """
    memory = _Memory(where, trackers, bundle, reporting(progress))

    def write(result: Result) -> None:
        try:
            memory.keep(result)
        except VitdeployError as error:
            error.after_document = True
            raise

    try:
        yield write
    except AnswersError as error:
        with contextlib.suppress(VitdeployError):  # the wrong answers are the error to report
            memory.keep_canary(error)
        raise


class _Memory:
    """The destinations of results; the constructor raises if one of them is not usable."""

    def __init__(self, where: str | Path | None, trackers: Sequence[str], bundle: bool, reporter: Reporter) -> None:
        self._place, self._bundle, self._reporter = None, bundle, reporter
        if where is not None:
            require_packages()
            self._place = open_place(where)
            self._place.prepare()
        self._trackers = [open_tracker(each) for each in trackers]
        for each in self._trackers:
            each.prepare()

    def keep(self, result: Result) -> None:
        rows = of_one_result(rows_of(result))
        if self._place is not None:
            append(self._place, rows, result.document)
        if self._trackers:
            self._send(outcomes_of_result(result, rows, self._bundle))

    def keep_canary(self, error: AnswersError) -> None:
        what = named_engine(Path(error.bundle), error.engine or error.message)
        target = what.artifact.rpartition("-")[0]
        rows = of_one_result([row_of_canary(error, what, this_machine([target]), now())])
        if self._place is not None:
            append(self._place, rows, {**error.to_dict(), canaries.GRAPH: graph_of(Path(error.bundle), error.engine)})
        self._send([TrackedResult(tuple(rows))])

    def _send(self, outcomes: Sequence[TrackedResult]) -> None:
        for each in self._trackers:
            for line in sent_lines(each.send(outcomes, self._reporter.progress)):
                self._reporter.note(str(line))


def _write_page(page: Path, document: HistoryDocument) -> None:
    from vitdeploy.report.html import is_history_page, render_history

    with replacing_file(page, is_history_page) as file:
        file.write_text(render_history(document), encoding="utf-8")


# --- Results for MLflow, Weights & Biases and Bencher -----------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Reported(Shown):
    """The outcome of sending results: `sent` has one entry per tracker."""

    sent: tuple[Sent, ...]

    def lines(self) -> list[Line]:
        return [line for each in self.sent for line in sent_lines(each)]


def sent_lines(sent: Sent) -> list[Line]:
    """Return the outcome of sending results to one tracker, as lines."""
    return [sent.sentence, *(f"left out of {sent.where}: {each.what}: {each.why}" for each in sent.left_out)]


def report_to(
    trackers: str | Sequence[str],
    results: Result | str | Path,
    *,
    bundle: bool = False,
    progress: bool | Reporter = True,
) -> Reported:
    """Send a result, or a whole history, to experiment trackers. Results that a tracker already has are not sent again:
    their run in the history identifies them. A result outside a history is new each time.

    Args:
        trackers: "mlflow" or "mlflow:URI"; "wandb", "wandb:PROJECT" or "wandb:ENTITY/PROJECT"; "bencher:FILE", which
            holds the latest result of each series in the Bencher Metric Format.
        results: a result of `bench`, `deploy`, `run`, `compare` or `sweep`; or a history: a folder or a URI.
        bundle: also send the bundle of a `run`, and those of a `sweep`.
        progress: as for `vitdeploy.export`.

    Raises:
        InputError: an unknown tracker. MissingPackageError: its client is not installed. HostError: the tracker does
            not answer, or refuses. OutputError, StorageError: a file cannot be written. Errors of a history as
            `read_history`.

    >>> import json, vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, scenarios=["single"], duration=0.1, progress=False)
    >>> vd.report_to("bencher:measured.json", found, progress=False)
    bencher:measured.json: 1 result sent
    >>> [sorted(measures) for measures in json.load(open("measured.json")).values()]
    [['latency', 'p99-latency', 'throughput']]
    """
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


def outcomes_of_history(where: str | Path, reporter: Reporter) -> list[TrackedResult]:
    """Return all results of a history, in its order, without foreign files, which `read_history` reports."""
    place = open_place(where)
    rows, _ = read_rows(place, reporter.progress)
    document_of = documents_of(place)

    def attaching(rows: tuple[ResultRow, ...]) -> Callable[[], Attached]:
        return lambda: _attached(rows[0], document_of(rows[0]), None)

    return [TrackedResult(each, attaching(each)) for each in outcomes_of(rows)]


def outcomes_of_result(result: Result, rows: Sequence[ResultRow], bundle: bool) -> list[TrackedResult]:
    """Return a result with its rows, and with its bundles if requested."""
    text = json.dumps(encode(result.document), allow_nan=False)

    def outcome(rows: tuple[ResultRow, ...]) -> TrackedResult:
        home = _home(result, rows[0].model)
        has = bundle and home is not None and (home / "manifest.json").is_file()
        return TrackedResult(rows, lambda: _attached(rows[0], text, home), home if has else None)

    return [outcome(each) for each in outcomes_of(rows)]


def _home(result: Result, model: str) -> Path | None:
    """Return the folder of a model's bundle."""
    if isinstance(result.document, Report | SweepDocument):
        return result.folder / model if isinstance(result.document, SweepDocument) else result.folder
    return None


def _attached(row: ResultRow, text: str | None, home: Path | None) -> Attached:
    """Return the document with its page (that of the folder `home`, if it has one) and the recipe."""
    document = json.loads(text) if text is not None else None
    if not isinstance(document, dict):
        return Attached()
    if isinstance(document.get("recipes"), list):  # a sweep: the part for this model
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
    """Return the page of a document, without pictures; None if it has none or cannot be read."""
    try:
        from vitdeploy.report.html import render_html, render_regression

        if "provenance" in document:
            return render_html(decode(Report, document), {}).encode()
        if "baseline" in document:
            return render_regression(decode(ComparisonDocument, document)).encode()
    except (DecodeError, MissingPackageError, ModuleNotFoundError):  # of another version; without the extra `export`
        return None
    return None
