"""A memory of results: each is one more file of a history, and a history says where its series changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.api.history_lines import history_lines
from vitdeploy.api.history_rows import Result, graph_of, named_engine, rows_of, this_machine
from vitdeploy.api.reporter import Reporter, reporting
from vitdeploy.api.shown import Shown
from vitdeploy.api.tables import Line
from vitdeploy.errors import AnswersError, VitdeployError

if TYPE_CHECKING:
    from vitdeploy.document.history import ChangeFacts, HistoryDocument, SeriesFacts
    from vitdeploy.history.trackers.outcome import Outcome


@dataclass(frozen=True, repr=False)
class History(Shown):
    """The series of a history; `document` is what the command line prints with --json."""

    document: HistoryDocument

    @property
    def slower(self) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        """Each series with each of its changes to a longer latency."""
        return self._of("slower")

    @property
    def faster(self) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        """Each series with each of its changes to a shorter latency."""
        return self._of("faster")

    def _of(self, direction: str) -> tuple[tuple[SeriesFacts, ChangeFacts], ...]:
        every = [(series, change) for series in self.document.series for change in series.changes]
        return tuple((series, change) for series, change in every if change.direction == direction)

    def lines(self) -> list[Line]:
        return history_lines(self.document)


def read_history(where: str | Path, page: str | Path | None = None, *, progress: bool | Reporter = True) -> History:
    """Read a history: its series, and where each changed.

    Args:
        where: a folder, or a URI that fsspec knows, such as "s3://bucket/folder".
        page: a file for the HTML page.
        progress: as for `vitdeploy.export`.

    Raises:
        MissingFileError: there is no history. InputError: an unknown URI. StorageError: it cannot be read, or the page
            not be written. MissingPackageError: without the extra `history`. OutputError: `page` is a folder or a file
            of something else.
    """
    from vitdeploy.history.files import documents_of, read_rows
    from vitdeploy.history.place import open_place
    from vitdeploy.history.series import history_document

    place, reporter = open_place(where), reporting(progress)
    with reporter:
        rows, left_out = read_rows(place, reporter.progress)
        document = history_document(rows, left_out, place.name, documents_of(place))
        if page is not None:
            _write_page(Path(page), document)
    return History(document)


def record(where: str | Path, result: Result) -> str:
    """Add a result to a history, as one new file; returns the file's name. It may run in many processes at once.

    Args:
        where: a folder, which is made where it is missing, or a URI.
        result: what `bench`, `deploy`, `run`, `compare` or `sweep` returned, on this machine.

    Raises:
        Errors as `read_history`; StorageError: nothing can be written there.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> found = vd.bench(graph, scenarios=["single"], duration=0.1, progress=False)
    >>> _ = vd.record("history", found)
    >>> vd.read_history("history", progress=False).document.results
    1
    """
    from vitdeploy.history.files import append
    from vitdeploy.history.place import open_place

    return append(open_place(where), rows_of(result), result.document)


@contextlib.contextmanager
def recorded(
    where: str | Path | None, trackers: Sequence[str] = (), *, bundle: bool = False, progress: bool | Reporter = False
) -> Iterator[Callable[[Result], None]]:
    """Around what measures: a history that cannot be written, and a tracker that cannot be sent to, are told before,
    and an engine that does not give its golden answers is recorded too. The block calls what it is given with the
    result; without a history and trackers that does nothing. An error of writing or sending the result is raised with
    `after_document`: it has been printed by then.

    Raises:
        Errors as `record` and `report_to`.
    """
    if where is None and not trackers:
        yield lambda result: None
        return

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
        with contextlib.suppress(VitdeployError):  # wrong answers are what has to be told
            memory.keep_canary(error)
        raise


class _Memory:
    """Where results go; raises when it is made if one of the places does not take any."""

    def __init__(self, where: str | Path | None, trackers: Sequence[str], bundle: bool, reporter: Reporter) -> None:
        from vitdeploy.history.files import require_packages
        from vitdeploy.history.place import open_place
        from vitdeploy.history.trackers.named import open_tracker

        self._place, self._bundle, self._reporter = None, bundle, reporter
        if where is not None:
            require_packages()
            self._place = open_place(where)
            self._place.prepare()
        self._trackers = [open_tracker(each) for each in trackers]
        for each in self._trackers:
            each.prepare()

    def keep(self, result: Result) -> None:
        from vitdeploy.api.tracking import outcomes_of_result
        from vitdeploy.history.files import append, of_one_result

        rows = of_one_result(rows_of(result))
        if self._place is not None:
            append(self._place, rows, result.document)
        if self._trackers:
            self._send(outcomes_of_result(result, rows, self._bundle))

    def keep_canary(self, error: AnswersError) -> None:
        from vitdeploy.history.canaries import GRAPH
        from vitdeploy.history.files import append, of_one_result
        from vitdeploy.history.of_documents import row_of_canary
        from vitdeploy.history.row import now
        from vitdeploy.history.trackers.outcome import Outcome

        what = named_engine(Path(error.bundle), error.engine or error.message)
        target = what.artifact.rpartition("-")[0]
        rows = of_one_result([row_of_canary(error, what, this_machine([target]), now())])
        if self._place is not None:
            append(self._place, rows, {**error.to_dict(), GRAPH: graph_of(Path(error.bundle), error.engine)})
        self._send([Outcome(tuple(rows))])

    def _send(self, outcomes: Sequence[Outcome]) -> None:
        from vitdeploy.api.tracking import sent_lines

        for each in self._trackers:
            for line in sent_lines(each.send(outcomes, self._reporter.progress)):
                self._reporter.note(str(line))


def _write_page(page: Path, document: HistoryDocument) -> None:
    from vitdeploy.publish import replacing_file
    from vitdeploy.report.html import is_history_page, render_history

    with replacing_file(page, is_history_page) as file:
        file.write_text(render_history(document), encoding="utf-8")
