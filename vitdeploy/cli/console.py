"""The output of every command: progress and last lines for people, or one JSON document for programs."""

from __future__ import annotations

import functools
import json
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from vitdeploy.api.reporter import Reporter
from vitdeploy.api.tables import Line, human_bytes, printed
from vitdeploy.errors import visible
from vitdeploy.paths import is_dir
from vitdeploy.spec import encode

F = TypeVar("F", bound=Callable[..., Any])


class Console(Reporter):
    """One command's output. Use as a context manager around the work, so that progress is closed before text.

    Tables and long lines fit a terminal; into a pipe they go whole. With `as_json` the document goes to standard output
    and everything else to standard error.
    """

    def __init__(self, as_json: bool, verbose: int, quiet: bool) -> None:
        super().__init__(verbose=verbose, quiet=quiet)
        self.as_json = as_json
        self._started = time.perf_counter()
        output = (click.get_current_context(silent=True) or click.Context(click.Command(""))).params.get("output")
        self._replaced = output if isinstance(output, Path) and is_dir(output) and any(output.iterdir()) else None

    def finish(self, document: object, lines: Sequence[Line], path: Path | None, then: str = "") -> None:
        """The last lines: result, seconds, size, path, next command; or the JSON document, which may be a
        dataclass."""
        seconds = time.perf_counter() - self._started
        if self.as_json:
            click.echo(json.dumps(encode(document), indent=1, allow_nan=False))
        for line in printed(lines, terminal_width(sys.stderr if self.as_json else sys.stdout)):
            click.echo(visible(line), err=self.as_json)
        if self.quiet:
            return
        if path is not None and path == self._replaced:
            click.echo(f"replaced what was made in {path} before", err=self.as_json)
        size = f", {human_bytes(folder_bytes(path))} in {path}" if path else ""
        click.echo(f"done in {seconds:.1f} s{size}", err=self.as_json)
        if then:
            click.echo(f"next: {then}", err=self.as_json)


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


def folder_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
