"""What every command prints: progress and last lines for people, or one JSON document for programs."""

from __future__ import annotations

import functools
import json
import math
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

from vitdeploy.cli.table import Line, printed
from vitdeploy.spec import encode

if TYPE_CHECKING:
    from vitdeploy.cli.live import Live

F = TypeVar("F", bound=Callable[..., Any])


class Console:
    """One command's output. Use as a context manager around the work, so that progress is closed before text.

    On a terminal, a phase of the work is one line that lives (rich, where it is installed); elsewhere it is one line,
    when it begins. Tables and long lines fit a terminal; into a pipe they go whole. With `as_json` the document goes to
    standard output and everything else to standard error.
    """

    def __init__(self, as_json: bool, verbose: int, quiet: bool) -> None:
        self.as_json, self.verbose, self.quiet = as_json, verbose, quiet
        self._started = time.perf_counter()
        self._live: Live | None = None
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def progress(self, text: str, done: int, total: int) -> None:
        """`done` of `total` units of the phase `text`."""
        if self.quiet:
            return
        if self._live is not None:
            self._live.update(text, done, total)
            return
        with self._lock:
            new = text not in self._begun
            self._begun.add(text)
        if new:
            click.echo(text, err=True)

    def note(self, text: str) -> None:
        """A line beside the result."""
        if not self.quiet:
            click.echo(text, err=True)

    def detail(self, text: str) -> None:
        """A line for -v."""
        if self.verbose:
            self.note(text)

    def finish(self, document: object, lines: Sequence[Line], path: Path | None, then: str = "") -> None:
        """The last lines: result, seconds, size, path, next command; or the JSON document, which may be a
        dataclass."""
        seconds = time.perf_counter() - self._started
        if self.as_json:
            click.echo(json.dumps(encode(document), indent=1, allow_nan=False))
        for line in printed(lines, terminal_width(sys.stderr if self.as_json else sys.stdout)):
            click.echo(line, err=self.as_json)
        if self.quiet:
            return
        size = f", {human_bytes(folder_bytes(path))} in {path}" if path else ""
        click.echo(f"done in {seconds:.1f} s{size}", err=self.as_json)
        if then:
            click.echo(f"next: {then}", err=self.as_json)

    def __enter__(self) -> Console:
        if sys.stderr.isatty() and not self.quiet:
            try:
                from vitdeploy.cli.live import Live
            except ModuleNotFoundError:  # a device has no rich
                return self
            self._live = Live()
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def terminal_width(stream: TextIO) -> int | None:
    """Columns of the terminal that a stream is; None where it is none, and lines may be of any length."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def command_line(*words: object) -> str:
    """A command to be typed: paths with spaces in quotes."""
    return shlex.join(map(str, words))


def output_options(function: F) -> F:
    """--json, -v and -q; the command gets a Console as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
    @click.option("-v", "--verbose", count=True, help="More lines; -vv shows tracebacks.")
    @click.option("-q", "--quiet", is_flag=True, help="Results only.")
    @functools.wraps(function)
    def wrapper(as_json: bool, verbose: int, quiet: bool, **options: Any) -> Any:
        return function(Console(as_json, verbose, quiet), **options)

    return wrapper  # type: ignore[return-value]


class Number(click.FloatRange):
    """A finite number within bounds; click's own range lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def folder_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def interval(value: float, bounds: Any, digits: int = 2) -> str:
    low, high = bounds
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
