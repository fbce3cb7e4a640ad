"""Commands built from the options of `api.options`, and their output."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

import vitdeploy
from vitdeploy.api.option import Chosen, Option, OptionError, Options, described
from vitdeploy.api.options import (
    REWRITES,
    Build,
    Labelled,
    Recorded,
    RecordedBundle,
)
from vitdeploy.api.values import Line, Reporter, human_bytes, printed
from vitdeploy.cli.complete import COMPLETE
from vitdeploy.errors import InputError, visible
from vitdeploy.extensions import wing
from vitdeploy.paths import is_dir
from vitdeploy.spec import MAX_BATCH, encode

if TYPE_CHECKING:
    from vitdeploy.compilation.backend import BuildOptions
    from vitdeploy.verification.gate import Kind


# --- Parsers of option values -----------------------------------------------------------------------------------------


class _Number(click.FloatRange):
    """A finite number within bounds; click's own range lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class _WholeChoice(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on only
    """One of the values of a type that other packages extend; the packages are searched only when needed."""

    def __init__(self, whole: Callable[[], Any]) -> None:
        self._whole, self.case_sensitive = whole, True

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return typing.get_args(self._whole())


class ParsedText(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A text that `read` parses; its ValueError becomes the error. `whole`: many values are one text. `bare`: the error
    shows the option's name without quotes."""

    def __init__(self, name: str, read: Callable[[str], Any], whole: bool = False, bare: bool = False) -> None:
        self.name, self.read, self.whole, self.bare = name, read, whole, bare

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except ValueError as error:
            hint = param.opts[0] if param is not None and self.bare else None
            raise click.BadParameter(str(error), ctx, param, hint) from None


def duration(text: str) -> float:
    """Parse "90s", "20m" or "1.5h"; return seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a time like 90s, 20m or 1h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def image_size(text: str) -> tuple[int, int]:
    """Parse one side in pixels, or HEIGHTxWIDTH."""
    sides = text.lower().split("x")
    if not (1 <= len(sides) <= 2 and all(side.isdecimal() and int(side) > 0 for side in sides)):
        raise ValueError(f"{text!r} is not an image size; expected 384, or 256x320 (height x width).")
    return int(sides[0]), int(sides[-1])


def profile(text: str) -> tuple[int, ...]:
    """Parse MIN,OPT,MAX: batch sizes in ascending order."""
    texts = text.split(",")
    batches = tuple(int(each) for each in texts if each.isdecimal())
    if len(texts) != 3 or len(batches) != 3 or not 1 <= batches[0] <= batches[1] <= batches[2]:
        raise ValueError(f"{text!r} is not a profile; expected minimum, optimum and maximum batch: 1,8,32.")
    return batches


def rows(text: str) -> str | tuple[int, ...]:
    """Parse --split-rows."""
    if text in ("auto", "none"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not auto, none or row counts such as 192,5 or 200") from None


def scenarios(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of scenarios."""
    from vitdeploy.benchmark.protocol import parse_scenario

    names = tuple(text.split(","))
    for name in names:
        parse_scenario(name)
    if len(set(names)) < len(names):
        raise ValueError(f"{text!r} names a scenario twice; expected each scenario once")
    return names


def batches(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not (1 <= len(sizes) <= 2 and all(size.isdecimal() and 0 < int(size) <= MAX_BATCH for size in sizes)):
        raise ValueError(f"expected one or two numbers from 1 to {MAX_BATCH:,}, such as 1,8")
    return tuple(int(size) for size in sizes)


def percentiles(text: str) -> tuple[float, ...]:
    """Parse comma-separated percentiles; return them in ascending order."""
    try:
        numbers = sorted({float(each) for each in text.split(",")})
    except ValueError:
        numbers = []
    # Above 99.9999, the first statement needs about seven million queries.
    if not numbers or not all(1 <= number <= 99.9999 for number in numbers):
        raise ValueError(f"{text!r}: expected numbers from 1 to 99.9999, such as 50,90,99,99.9")
    return tuple(numbers)


def merging(text: str) -> tuple[int, int]:
    """Parse `BLOCK:TOKENS`: the block, and the number of tokens kept after its attention."""
    match = re.fullmatch(r"(\d{1,4}):(\d{1,6})", text)
    if match is None:
        raise ValueError(f"{text!r} is not BLOCK:TOKENS, such as 1:192.")
    return int(match[1]), int(match[2])


def box(text: str) -> tuple[float, ...]:
    """Parse left,top,right,bottom in pixels."""
    try:
        left, top, right, bottom = (float(side) for side in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not left,top,right,bottom in pixels") from None
    return left, top, right, bottom


def point(text: str) -> tuple[float, float, bool]:
    """Parse x,y in pixels; a suffix ,0 marks a point outside of the object."""
    parts = text.split(",")
    try:
        x, y = map(float, parts[:2])
        return x, y, {"": True, "1": True, "0": False}[",".join(parts[2:]).strip()]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not x,y or x,y,0 or x,y,1") from None


def digest(text: str) -> str:
    """Parse a SHA-256; return its hex digits."""
    from vitdeploy.bundle.layout import digest_hex

    try:
        return digest_hex(text)
    except InputError as error:
        raise ValueError(f"{error.message}: {error.expected}.") from None


def embedding(text: str) -> str:
    """Parse a kind of app of `vitdeploy embed`."""
    kinds = wing("embed.command").KINDS
    if text not in kinds:
        raise ValueError(f"{text!r}: expected " + ", ".join(f"{name} ({kind.what})" for name, kind in kinds.items()))
    return text


# Parsers by `Option.kind`.
KINDS: dict[str, click.ParamType] = {  # type: ignore[type-arg]
    "path": click.Path(path_type=Path),
    "file": click.Path(path_type=Path, dir_okay=False),
    "folder": click.Path(path_type=Path, file_okay=False),
    "input": click.Path(allow_dash=True),
    "duration": ParsedText("duration", duration),
    "size": ParsedText("size", image_size),
    "profile": ParsedText("profile", profile),
    "rows": ParsedText("text", rows, bare=True),
    "scenarios": ParsedText("scenarios", scenarios, whole=True),
    "batches": ParsedText("text", batches, whole=True, bare=True),
    "percentiles": ParsedText("percentiles", percentiles, whole=True),
    "merging": ParsedText("block:tokens", merging),
    "rewrite": click.Choice(REWRITES),
    "box": ParsedText("text", box, bare=True),
    "point": ParsedText("text", point, bare=True),
    "digest": ParsedText("text", digest),
    "embedding": ParsedText("kind", embedding),
}


# --- Commands built from options --------------------------------------------------------------------------------------


class _Advanced(click.Option):
    """An option that --help lists last if the command has many."""


class _Command(click.Command):
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(param, row) for param in self.get_params(ctx) if (row := param.get_help_record(ctx)) is not None]
        last = [row for param, row in rows if len(rows) > 12 and isinstance(param, _Advanced)]
        for title, shown in (("Options", [row for _, row in rows if row not in last]), ("Advanced", last)):
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)


def command_of(
    options: type[Options],
    *groups: type[Options] | tuple[type[Options] | str, str],
    name: str = "",
    parent: click.Group | None = None,
    waits: bool = False,
) -> Callable[[Callable[..., None]], click.Command]:
    """Turn a function that takes a Console, the options and the values of each group into a command.

    Args:
        groups: further options, shown by --help after the others, or before the named option; a name instead of a group
            moves that option in --help.
        name: name of the command. Default: the function's name.
        parent: the group that the command belongs to.
        waits: the command measures, and has --max-wait.
    """
    placed = [group if isinstance(group, tuple) else (group, "") for group in groups]
    parts = [options, *(part for part, _ in placed if not isinstance(part, str))]
    by_name = {each.name: _parameter(each, about) for each, about in described(options)}
    moved = {part: by_name[part] for part, _ in placed if isinstance(part, str)}

    def before(field: str) -> list[click.Parameter]:
        found = [
            moved[part] if isinstance(part, str) else _parameters(part) for part, place in placed if place == field
        ]
        return [parameter for several in found for parameter in several]

    parameters: list[click.Parameter] = []
    for field, own in by_name.items():
        parameters += [*before(field), *([] if field in moved else own)]
    parameters += before("")

    def decorate(function: Callable[..., None]) -> click.Command:
        def callback(as_json: bool, verbose: int, quiet: bool, **values: Any) -> None:
            console = Console(as_json, verbose, quiet)
            try:
                function(console, *(_chosen(part, values, console) for part in parts))
            except OptionError as error:
                raise click.UsageError(error.worded(flag_of)) from None

        made = _Command(
            name or function.__name__,
            params=[*parameters, *([WAIT] if waits else []), *OUTPUT],
            callback=callback,
            help=inspect.cleandoc(function.__doc__ or ""),
        )
        if parent is not None:
            parent.add_command(made)
        return made

    return decorate


def _parameters(options: type[Options]) -> list[click.Parameter]:
    return [parameter for each, about in described(options) for parameter in _parameter(each, about)]


def _parameter(each: Field[Any], about: Option) -> list[click.Parameter]:
    """The click parameter of a field; [] for a field that only the API has."""
    default = None if each.default is MISSING or _no_value(each.default, about) else each.default
    shared: dict[str, Any] = {
        "type": _type(each.type, about),
        "required": each.default is MISSING or about.required,
        "metavar": about.metavar,
        "shell_complete": COMPLETE.get(about.complete),
    }
    if about.place:
        needed = shared.pop("required") and about.place != "optional"
        return [click.Argument([each.name], nargs=-1 if about.place == "many" else 1, required=needed, **shared)]
    if not about.help:
        return []
    names = [*(about.flag.split() or [f"--{each.name.replace('_', '-')}"]), each.name]
    made = _Advanced if about.advanced else click.Option
    if about.default is not None:
        default, shared["required"] = about.default, False
    shown = default is not None and default is not False and default != ()
    shared |= {"help": about.help.strip() or None}
    if shared["type"] is click.BOOL:
        del shared["type"], shared["required"], shared["metavar"], shared["shell_complete"]
        if "/" in about.flag:
            return [made(names, default=default, show_default=shown, **shared)]
        shared |= {"flag_value": False} if default is True else {}
        return [made(names, is_flag=True, default=default, **shared)]
    many = typing.get_origin(each.type) in (Sequence, Iterable) or about.kind == "merging"
    if many and not getattr(shared["type"], "whole", False):
        return [made(names, multiple=True, **shared)]
    if default is not None:  # click would treat None as a value
        shared |= {"default": default, "show_default": shown}
    return [made(names, **shared)]


def _no_value(default: Any, about: Option) -> bool:
    """Whether a default, such as 0 jobs, is not a valid value on the command line."""
    return isinstance(default, int | float) and not isinstance(default, bool) and not about.allows(default)


def _type(annotation: Any, about: Option) -> click.ParamType:  # type: ignore[type-arg]
    """The click type of a field."""
    if about.kind:
        return KINDS[about.kind]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        choices = [each for each in typing.get_args(annotation) if each is not types.NoneType]
        return _type(Path if Path in choices else choices[0], about)
    if typing.get_origin(annotation) is Sequence:
        return _type(typing.get_args(annotation)[0], about)
    if typing.get_origin(annotation) is typing.Annotated:  # of `spec.Extensible`
        return _WholeChoice(annotation.__metadata__[0].whole)
    if typing.get_origin(annotation) is typing.Literal:
        return click.Choice(typing.get_args(annotation))
    if annotation is Path:
        return KINDS["path"]
    if annotation is int and (about.min, about.max) != (None, None):
        return click.IntRange(about.min, about.max)
    if annotation is float:
        return _Number(about.min, about.max, min_open=about.above)
    return {int: click.INT, bool: click.BOOL}.get(annotation, click.STRING)


def _chosen(options: type[Options], values: Mapping[str, Any], console: Console) -> Options:
    """The options with the values from the command line."""
    names = {each.name: each for each, _ in described(options)}
    given = {name: value for name, value in values.items() if name in names and value not in (None, ())}
    for name, value in given.items():
        if names[name].metadata["option"].kind == "merging":
            if len(dict(value)) < len(value):
                raise click.UsageError(f"{flag_of(name)} names a block twice")
            given[name] = dict(value)
    return options(**given, **({"progress": console} if "progress" in names else {}))


def flag_of(name: str) -> str:
    """The flag of an option of the current command."""
    for parameter in click.get_current_context().command.params:
        if parameter.name == name:
            return max(parameter.opts, key=len)
    return name


def call(name: str, options: Options, *first: object) -> Any:
    """Call a function of the API; its options are checked before anything heavy is imported. `first`: arguments before
    the options."""
    from vitdeploy.api.calls import check_early

    check_early(options)
    return getattr(vitdeploy, name).of(*first, options)


def api(name: str) -> Any:
    """Import a module of the API, which may be heavy."""
    return importlib.import_module(f"vitdeploy.api.{name}")


def with_images(options: Chosen, described: Labelled) -> Chosen:
    """The options with the images of --data and the labels and texts of `described`."""
    data: dict[str, Any] = {"data": api("images").images(vars(options)["data"], **vars(described))}
    return replace(options, **data)


@contextlib.contextmanager
def recording(console: Console, places: Recorded) -> Iterator[Callable[[Any], None]]:
    """Yield a function that records a result, as `history.api.recorded`; imports nothing without a history or
    trackers."""
    if places.history is None and not places.trackers:
        yield lambda result: None
        return
    bundle = isinstance(places, RecordedBundle) and places.report_bundle
    with wing("history.api").recorded(places.history, places.trackers, bundle=bundle, progress=console) as record:
        yield record


def _set_longest_wait(context: click.Context, parameter: click.Parameter, value: float | None) -> None:
    """Set the longest wait of this process for other measurements."""
    if value is not None:
        from vitdeploy.benchmark.machine import MACHINE

        MACHINE.max_wait = value


WAIT = _Advanced(
    ["--max-wait"],
    type=KINDS["duration"],
    expose_value=False,
    callback=_set_longest_wait,
    help="Longest wait for other measurements on this machine, such as 20m. Default: until they end.",
)
OUTPUT = (
    click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on standard output."),
    click.Option(["-v", "--verbose"], count=True, help="Print more lines; -vv shows tracebacks."),
    click.Option(["-q", "--quiet"], is_flag=True, help="Print only results."),
)


def to_build(target: str, options: Build) -> BuildOptions | None:
    """The build options; None if none was given.

    Raises:
        click.UsageError: an option was given for a target other than tensorrt.
    """
    given = {each.name: value for each in fields(options) if (value := getattr(options, each.name)) not in ((), None)}
    if not given:
        return None
    if target != "tensorrt":
        raise click.UsageError(f"{', '.join(map(flag_of, given))}: only for --target tensorrt, not for {target}.")
    from vitdeploy.recipe.recipe import TensorRtSection

    return TensorRtSection(**given).to_options()


# --- The output of every command: progress and last lines as text, or one JSON document -------------------------------


class Console(Reporter):
    """The output of one command. Use it as a context manager around the work, so that progress ends before the result.

    Tables and long lines are fitted to a terminal, but not to a pipe. With `as_json` the document goes to standard
    output and everything else to standard error.
    """

    def __init__(self, as_json: bool, verbose: int, quiet: bool) -> None:
        super().__init__(verbose=verbose, quiet=quiet)
        self.as_json = as_json
        self._started = time.perf_counter()
        output = (click.get_current_context(silent=True) or click.Context(click.Command(""))).params.get("folder")
        self._replaced = output if isinstance(output, Path) and is_dir(output) and any(output.iterdir()) else None

    def finish(self, document: object, lines: Sequence[Line], home: str | Path | None, then: str = "") -> None:
        """Print the last lines (result, seconds, size, path, next command), or the JSON of `document`, which may be a
        dataclass."""
        path = None if home is None else Path(home)
        seconds = time.perf_counter() - self._started
        if self.as_json:
            click.echo(json.dumps(encode(document), indent=1, allow_nan=False))
        for line in printed(lines, terminal_width(sys.stderr if self.as_json else sys.stdout)):
            click.echo(visible(line), err=self.as_json)
        if self.quiet:
            return
        if path is not None and path == self._replaced:
            click.echo(f"replaced the previous content of {path}", err=self.as_json)
        size = f", {human_bytes(folder_bytes(path))} in {path}" if path else ""
        click.echo(f"done in {seconds:.1f} s{size}", err=self.as_json)
        if then:
            click.echo(f"next: {then}", err=self.as_json)


def terminal_width(stream: TextIO) -> int | None:
    """Columns of a terminal; None if the stream is not one (lines of any length)."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def command_line(*words: object) -> str:
    """A command to type: paths with spaces are quoted."""
    return shlex.join(map(str, words))


def folder_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


# --- Fixes for an unmet budget, by the kind of bound ------------------------------------------------------------------


_FIXES: dict[Kind, str] = {
    "answers": "evaluate on more images, or set another bound: --set budget.min_agreement=PERCENT or "
    "--set budget.max_drop=POINTS",
    "latency": "measure for longer on a quiet machine (--set bench.duration=SECONDS), or set another bound: "
    "--set budget.max_latency=MILLISECONDS",
    "memory": "use a smaller batch (--set bench.batch=1), or set another bound: --set budget.max_memory=BYTES",
    "size": "set another bound: --set budget.max_size=BYTES",
}
# For a bound that unrelated answers meet as well.
NOTHING_SHOWN = "evaluate on images for which the original gives different answers, ideally with labels"


def unmet_fix(reasons: Iterable[str]) -> str:
    """The fixes for these reasons of gates."""
    from vitdeploy.verification.gate import PROVES_NOTHING, kinds_of

    reasons = list(reasons)
    found = kinds_of(reasons)
    fixes = [fix for kind, fix in _FIXES.items() if kind in found]
    return "; ".join([NOTHING_SHOWN, *fixes] if any(PROVES_NOTHING in reason for reason in reasons) else fixes)


# --- The command imports nothing from the working folder --------------------------------------------------------------
# A folder `onnx` in it must not be imported as the package.


SAFE_PATH = "PYTHONSAFEPATH"  # read by Python 3.11 and newer


@contextlib.contextmanager
def outside_working_folder() -> Iterator[None]:
    """Keep this process, and the Python processes that it starts, from importing anything from the working folder.

    The `vitdeploy` command never has that folder on its path; `python -m vitdeploy.cli.main` has it first.
    """
    path, safe = list(sys.path), os.environ.get(SAFE_PATH)
    try:
        here = os.path.realpath(Path.cwd())
    except OSError:  # it was removed
        here = ""
    named = {os.path.realpath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each}
    home = str(Path(vitdeploy.__file__).resolve().parents[1])
    kept = [each for each in path if each and (os.path.realpath(each) != here or here in named)]
    sys.path[:] = kept if home in map(os.path.realpath, kept) else [*kept, home]
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        sys.path[:] = path
        if safe is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = safe


# Commands that read a recipe, changed by `--set`; and options that they lack, as the recipe's section source has them.
WITH_RECIPE = ("run", "tune", "sweep")
OF_SOURCE = "checkpoint|image-size|heads|text-features|task|normal|labels|bind"


def as_keys(fix: str, command: str) -> str:
    """Rewrite a fix for a command that reads a recipe: options of the source become recipe keys."""
    if command not in WITH_RECIPE:
        return fix

    def size(match: re.Match[str]) -> str:
        sides = [", ".join(pair.split("x")) for pair in match[1].split(" or ")]
        return " or ".join(f"--set 'source.image_size=[{pair}]'" for pair in sides)

    fix = fix.replace("--labels none", "--set data.labels=none")  # no source, whose labels are names of classes
    fix = re.sub(r"--image-size ((?:\d+x\d+|HEIGHTxWIDTH)(?: or \d+x\d+)*)", size, fix)
    fix = re.sub(rf"(?<!leave )--({OF_SOURCE}) (\S+)", lambda match: f"--set source.{_key(match[1])}={match[2]}", fix)
    return re.sub(rf"--({OF_SOURCE})\b", lambda match: f"source.{_key(match[1])}", fix)


def _key(option: str) -> str:
    return option.replace("-", "_")
