"""Values that the API returns, and their display in notebooks and terminals."""

from __future__ import annotations

import contextlib
import functools
import html
import sys
import tempfile
import textwrap
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from vitdeploy import limits
from vitdeploy.errors import InputError, visible
from vitdeploy.publish import check_replaceable, replacing

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

    from vitdeploy.document.bench import ArtifactContext, Bench, ContextFacts, LayerGroup
    from vitdeploy.verification.comparison import Control


# --- Bundles pinned by the SHA-256 of their manifest ------------------------------------------------------------------


def require_pinned(expect_digest: str | None, named: Iterable[str | Path]) -> None:
    """Check that the only bundle among `named` has this manifest, and every file that it lists. None: no check.

    Raises:
        InputError: no bundle, or several.
        DigestError: another manifest, or a file that differs from its recorded digest.
    """
    if expect_digest is None:
        return
    from vitdeploy.bundle.checked import open_checked
    from vitdeploy.bundle.read import is_bundle

    bundles = [Path(each) for each in named if is_bundle(Path(each))]
    if len(bundles) != 1:
        raise InputError(
            "--expect-digest needs exactly one bundle",
            found=", ".join(map(str, bundles)) or "no bundle",
            expected="one bundle's folder",
            fix="check each bundle on its own: vitdeploy bundle verify BUNDLE --expect-digest ..." if bundles else "",
        )
    open_checked(bundles[0], "all", expect_digest)


# --- Format values: tables that fit the terminal, numbers and sizes ---------------------------------------------------
# On a narrow terminal, columns are dropped in a fixed order, and a note names them.


@dataclass(frozen=True)
class Column:
    """`keep`: on a narrow terminal the lowest is dropped first; the first column stays. Numbers are right-aligned."""

    name: str
    keep: int = 0
    left: bool = False
    least: int = 0


@dataclass(frozen=True)
class Table:
    """Rows of cells, one per column; a shorter row is a subject and a remark: "failed: ..."."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self, width: int | None = None) -> list[str]:
        """The table in at most `width` characters; None: unlimited."""
        every = range(len(self.columns))
        shown = list(every)
        while width is not None and self._wide(shown) > width and len(shown) > 1:
            shown.remove(min(shown[1:], key=lambda index: (self.columns[index].keep, -index)))
        for index in sorted(set(every) - set(shown), key=lambda index: -self.columns[index].keep):
            if width is not None and self._wide(sorted([*shown, index])) <= width:  # a dropped wide one left room
                shown = sorted([*shown, index])
        dropped = [self.columns[index].name for index in every if index not in shown]
        lines = [line for row in self._all() for line in self._row(row, shown, width)]
        if dropped:
            lines += wrapped(f"(not shown in {width} columns: {', '.join(dropped)}; --json has all)", width)
        return lines

    def html(self) -> str:
        """The table for a notebook."""
        head = "".join(f"<th>{html.escape(column.name)}</th>" for column in self.columns)
        rows = "".join(f"<tr>{self._html_cells(row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _html_cells(self, row: tuple[str, ...]) -> str:
        if len(row) < len(self.columns):
            rest = html.escape("  ".join(row[1:]))
            return f'<td>{html.escape(row[0])}</td><td colspan="{len(self.columns) - 1}">{rest}</td>'
        return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)

    def _all(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(column.name for column in self.columns), *self.rows)

    def _widths(self, shown: Sequence[int]) -> list[int]:
        full = [row for row in self._all() if len(row) == len(self.columns)]
        widths = [max(self.columns[index].least, *(len(row[index]) for row in full)) for index in shown]
        if self.columns[shown[-1]].left:  # no column follows
            widths[-1] = max(len(row[shown[-1]]) for row in full)
        return widths

    def _wide(self, shown: Sequence[int]) -> int:
        return sum(self._widths(shown)) + 2 * (len(shown) - 1)

    def _row(self, row: tuple[str, ...], shown: Sequence[int], width: int | None) -> list[str]:
        widths = self._widths(shown)
        if len(row) < len(self.columns):
            return wrapped("  ".join([row[0].ljust(widths[0]), *row[1:]]), width)
        cells = [
            row[index].ljust(size) if self.columns[index].left or index == 0 else row[index].rjust(size)
            for index, size in zip(shown, widths, strict=True)
        ]
        return wrapped("  ".join(cells).rstrip(), width)


Line = str | Table


def printed(lines: Sequence[Line], width: int | None) -> list[str]:
    """Lines of text; tables and long texts fit in `width` characters (None: unlimited)."""
    found: list[str] = []
    for line in lines:
        found += line.lines(width) if isinstance(line, Table) else wrapped(line, width)
    return found


def wrapped(text: str, width: int | None) -> list[str]:
    """The lines of a text; long ones are broken between words and continue indented. Paths stay whole."""
    found = []
    for line in text.split("\n"):
        if width is None or len(line) <= width:
            found.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
        found += textwrap.wrap(
            line,
            max(width, 20),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
    return found


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def unrelated(control: Control | None) -> str:
    """The suffix of an agreement: the agreement on unrelated images (a control)."""
    return "" if control is None else f", unrelated {control.agreement:.2f} %"


def interval(value: float, bounds: Sequence[float] | None, digits: int = 2) -> str:
    """A value with its interval, if it has one."""
    if bounds is None:
        return f"{value:.{digits}f}"
    low, high = bounds
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


# --- Display results: as text in a terminal, as tables and plots in a notebook ----------------------------------------


STYLE = "overflow-x:auto;font-variant-numeric:tabular-nums"


class Shown(ABC):
    """A value with lines of text, tables and optional plots."""

    @abstractmethod
    def lines(self) -> Sequence[Line]:
        """The result as printed lines."""

    def plots(self) -> Sequence[str]:
        """SVG elements shown below the lines in a notebook."""
        return ()

    def __str__(self) -> str:
        return "\n".join(printed(self.lines(), None))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [line.html() if isinstance(line, Table) else f"<div>{html.escape(line)}</div>" for line in self.lines()]
        return f'<div style="{STYLE}">{"".join([*parts, *self.plots()])}</div>'


# --- Folders for results: a temporary one, removed when Python ends, unless a name is given ---------------------------


@functools.cache
def _session() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vitdeploy-", ignore_cleanup_errors=True)


def unnamed_folder(name: str) -> Path:
    """A new empty folder, removed when this process ends."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_session().name))


def is_unnamed(folder: Path) -> bool:
    """Whether a folder is removed when this process ends."""
    return folder.is_relative_to(_session().name)


def placed(folder: Path) -> str:
    """The line that names the folder of a result."""
    return f"in {folder}" + (", until Python ends; folder= keeps it" if is_unnamed(folder) else "")


def home_of(folder: str | Path | None, name: str, names: tuple[str, ...]) -> Path:
    """Return the folder of a result: the requested one, or a new one.

    Raises:
        OutputError: it holds something other than `names`.
    """
    home = Path(folder) if folder is not None else unnamed_folder(name) / name
    check_replaceable(home, names)
    return home


@contextlib.contextmanager
def filling(home: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """A folder to write a result to, renamed to `home` once it is complete: interrupted work leaves nothing."""
    with replacing(home, names) as work:
        yield work


# --- Progress in a notebook: a bar for each running phase, drawn by the browser; finished phases disappear ------------


SECONDS_BETWEEN = 0.2


class Bars:
    """The progress bars of one call; thread-safe. A new phase of a thread ends its previous one."""

    def __init__(self) -> None:
        self._phases: dict[int, tuple[str, int, int]] = {}
        self._handle: DisplayHandle | None = None
        self._drawn = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        from IPython.display import HTML, display  # installed wherever a kernel runs

        self._handle = display(HTML(""), display_id=True)

    def update(self, text: str, done: int, total: int) -> None:
        with self._lock:
            before = self._phases.get(threading.get_ident())
            self._phases[threading.get_ident()] = (text, done, total)
            new = before is None or before[0] != text
            if new or done >= total or time.monotonic() - self._drawn >= SECONDS_BETWEEN:
                self._draw()

    def stop(self) -> None:
        with self._lock:
            self._phases.clear()
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML

        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(HTML("".join(_bar(*phase) for phase in self._phases.values())))


def _bar(text: str, done: int, total: int) -> str:
    count = f" {done}/{total}" if total > 1 else ""
    return f'<div><progress value="{done}" max="{max(total, 1)}"></progress> {html.escape(text)}{count}</div>'


# --- Report the progress of long work: on a terminal, in a notebook, or as lines --------------------------------------


class _Display(Protocol):
    """A live display of the phases of the work."""

    def start(self) -> None: ...
    def update(self, text: str, done: int, total: int) -> None: ...
    def stop(self) -> None: ...


# Seconds without output after which line-based progress prints a sign of life.
SILENCE = 30.0


class Reporter:
    """Progress and notes of one call, on standard error. A context manager around the work.

    On a terminal with rich, each phase is one live line; in a notebook, a bar; elsewhere, one line when it starts, and
    one more after each half minute without output.
    """

    def __init__(self, *, verbose: int = 0, quiet: bool = False) -> None:
        self.verbose, self.quiet = verbose, quiet
        self._display: _Display | None = None
        self._begun: set[str] = set()
        self._lock = threading.Lock()
        self._phase = ("", 0, 0)
        self._since = self._said = time.monotonic()
        self._ended = threading.Event()

    def progress(self, text: str, done: int, total: int) -> None:
        """`done` of `total` units of the phase `text`."""
        limits.phase(text)
        if self.quiet:
            return
        if self._display is not None:
            self._display.update(text, done, total)
            return
        with self._lock:
            new = text not in self._begun
            self._begun.add(text)
            if self._phase[0] != text:
                self._since = time.monotonic()
            self._phase = (text, done, total)
        if new:
            self._print(text)

    def note(self, text: str) -> None:
        """Show a line in addition to the result."""
        if not self.quiet:
            self._print(text)

    def detail(self, text: str) -> None:
        """Show a line if output is verbose."""
        if self.verbose:
            self.note(text)

    def __enter__(self) -> Reporter:
        self._display = None if self.quiet else _display()
        if self._display is not None:
            self._display.start()
        elif not self.quiet:
            self._ended.clear()
            threading.Thread(target=self._beat, name="vitdeploy-progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None
        self._ended.set()

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        print(visible(text), file=sys.stderr, flush=True)

    def _beat(self) -> None:
        """Print a line after each long silence, until the work ends."""
        while not self._ended.wait(max(0.1, self._said + SILENCE - time.monotonic())):
            now = time.monotonic()
            if now < self._said + SILENCE:
                continue
            with self._lock:
                (text, done, total), since = self._phase, self._since
            if text:
                self._print(f"{text}: {now - since:.0f} s elapsed{f', {done} of {total}' if total > 1 else ''}")
            else:
                self._said = now


def reporting(progress: bool | Reporter) -> Reporter:
    """The reporter of a call: the given one, or a new one (quiet for False)."""
    return progress if isinstance(progress, Reporter) else Reporter(quiet=not progress)


def _display() -> _Display | None:
    if in_notebook():
        return Bars()
    if not sys.stderr.isatty():
        return None
    try:
        from vitdeploy.api.live import Live
    except ModuleNotFoundError:  # a device has no rich
        return None
    return Live()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


# --- Print the context of a bench's latencies: one line on the machine, a few on each artifact ------------------------


SHOWN_LAYERS = 5
LONGEST_NAME = 70


def context_lines(context: ContextFacts | None) -> list[str]:
    """The lines on the `context` of a bench; None: the bench was too short to measure it."""
    if context is None:
        return ["context: not measured (the benchmark was shorter than one second)"]
    lines = [f"machine: {context.machine}"] if context.machine else []
    lines += [f"not measured: {each.what}: {each.why}" for each in context.left_out]
    for artifact in context.artifacts:
        lines += [f"{artifact.artifact}: {text}" for text in _artifact(artifact)]
        lines += _groups(artifact.groups)
    return lines


def _artifact(context: ArtifactContext) -> list[str]:
    lines = [] if context.line is None else [context.line]
    work, time = context.work, context.time
    if work is not None:
        images = "image" if work.batch == 1 else f"{work.batch} images"
        lines.append(
            f"{_giga(sum(work.flops.values()))} GFLOP and at least {human_bytes(work.bytes)} per {images} "
            f"(weights {human_bytes(work.weight_bytes)})"
        )
    elif time is not None:
        lines.append(f"FLOPs unknown: {context.work_unknown}")
    if time is not None:
        over = 100 * (time.layers_ms / time.latency_ms - 1)
        reason = f" (+{over:.0f} %: profiler overhead, or a different moment)" if over >= 1 else ""
        precisions = ", ".join(f"{name.upper()} {ms:.2f}" for name, ms in time.by_precision_ms.items())
        lines.append(f"layers {time.layers_ms:.2f} of {time.latency_ms:.2f} ms{reason}: {precisions}")
    return lines


def _groups(groups: Sequence[LayerGroup]) -> list[str]:
    """The layers that take most of the time; one line for the same layer of all blocks."""
    return [
        f"  {group.ms:>8.2f} ms {100 * group.share:>3.0f} %  {group.precision.upper():<5}"
        f"{'' if group.count == 1 else str(group.count) + ' x ':>6}{_short(group.name)} ({_short(group.kind)})"
        for group in groups[:SHOWN_LAYERS]
    ]


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 3]}..."


def _giga(value: float) -> str:
    return f"{value / 1e9:,.0f}" if value >= 1e12 else f"{value / 1e9:.3g}"


# --- Plots of the report in a notebook, which lacks the colours of the report's page ----------------------------------


def latency_plots(bench: Bench | None) -> list[str]:
    """The latency distribution per artifact, as an SVG element; [] without a bench."""
    if bench is None:
        return []
    from vitdeploy.report.latency import latency_plot
    from vitdeploy.report.page import measured_alone

    plot = latency_plot(measured_alone(bench))
    return [] if plot is None else [coloured(plot.wide)]


def coloured(svg: str) -> str:
    """An SVG element of the report with the colours of its page."""
    from vitdeploy.report.figures import VARIABLES

    for colour, variable in VARIABLES.items():
        svg = svg.replace(variable, colour)
    return f'<div style="max-width:720px">{svg}</div>'
