"""Commands made of the options of `api.options`, and what they print."""

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


# --- How texts of the command line are read ---------------------------------------------------------------------------


class _Number(click.FloatRange):
    """A finite number within bounds; click's own range lets NaN through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class _WholeChoice(click.Choice):  # type: ignore[type-arg]  # generic from click 8.2 on only
    """One of the values of a type that other packages add to; these are searched when something needs the values."""

    def __init__(self, whole: Callable[[], Any]) -> None:
        self._whole, self.case_sensitive = whole, True

    @functools.cached_property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        return typing.get_args(self._whole())


class ParsedText(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A text that `read` makes a value of; a ValueError says why not. `whole`: an option of many values is one text.
    `bare`: its name stands without quotes in the error."""

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
    """ "90s", "20m", "1.5h", in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a time like 90s, 20m or 1h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def image_size(text: str) -> tuple[int, int]:
    """A side in pixels, or HEIGHTxWIDTH."""
    sides = text.lower().split("x")
    if not (1 <= len(sides) <= 2 and all(side.isdecimal() and int(side) > 0 for side in sides)):
        raise ValueError(f"{text!r} is no image size; expected 384, or 256x320 (height x width).")
    return int(sides[0]), int(sides[-1])


def profile(text: str) -> tuple[int, ...]:
    """MIN,OPT,MAX: batches, in ascending order."""
    texts = text.split(",")
    batches = tuple(int(each) for each in texts if each.isdecimal())
    if len(texts) != 3 or len(batches) != 3 or not 1 <= batches[0] <= batches[1] <= batches[2]:
        raise ValueError(f"{text!r} is no profile; expected the smallest, best and largest batch: 1,8,32.")
    return batches


def rows(text: str) -> str | tuple[int, ...]:
    """The parts of --split-rows."""
    if text in ("auto", "none"):
        return text
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not auto, none or rows, such as 192,5 or 200") from None


def scenarios(text: str) -> tuple[str, ...]:
    """Names of scenarios, with commas between them."""
    from vitdeploy.benchmark.protocol import parse_scenario

    names = tuple(text.split(","))
    for name in names:
        parse_scenario(name)
    if len(set(names)) < len(names):
        raise ValueError("expected each scenario once")
    return names


def batches(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not (1 <= len(sizes) <= 2 and all(size.isdecimal() and 0 < int(size) <= MAX_BATCH for size in sizes)):
        raise ValueError(f"expected one or two numbers from 1 to {MAX_BATCH:,}, such as 1,8")
    return tuple(int(size) for size in sizes)


def percentiles(text: str) -> tuple[float, ...]:
    """Percentiles, with commas between them; in rising order."""
    try:
        numbers = sorted({float(each) for each in text.split(",")})
    except ValueError:
        numbers = []
    # Beyond 99.9999 some seven million queries are needed for the first statement.
    if not numbers or not all(1 <= number <= 99.9999 for number in numbers):
        raise ValueError(f"{text!r}: expected numbers from 1 to 99.9999, such as 50,90,99,99.9")
    return tuple(numbers)


def merging(text: str) -> tuple[int, int]:
    """`BLOCK:TOKENS`: the block and how many tokens remain behind its attention."""
    match = re.fullmatch(r"(\d{1,4}):(\d{1,6})", text)
    if match is None:
        raise ValueError(f"{text!r} is not BLOCK:TOKENS, as 1:192.")
    return int(match[1]), int(match[2])


def box(text: str) -> tuple[float, ...]:
    """left,top,right,bottom, in pixels."""
    try:
        left, top, right, bottom = (float(side) for side in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is not left,top,right,bottom in pixels") from None
    return left, top, right, bottom


def point(text: str) -> tuple[float, float, bool]:
    """x,y in pixels; with ,0 behind it what is not part of an object."""
    parts = text.split(",")
    try:
        x, y = map(float, parts[:2])
        return x, y, {"": True, "1": True, "0": False}[",".join(parts[2:]).strip()]
    except (ValueError, KeyError):
        raise ValueError(f"{text!r} is not x,y or x,y,0 or x,y,1") from None


def digest(text: str) -> str:
    """The hex of a SHA-256."""
    from vitdeploy.bundle.layout import digest_hex

    try:
        return digest_hex(text)
    except InputError as error:
        raise ValueError(f"{error.message}: {error.expected}.") from None


def embedding(text: str) -> str:
    """A kind of app that `vitdeploy embed` writes."""
    kinds = wing("embed.command").KINDS
    if text not in kinds:
        raise ValueError(f"{text!r}: expected " + ", ".join(f"{name} ({kind.what})" for name, kind in kinds.items()))
    return text


# How options are read whose type does not say it.
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


# --- Commands of options ----------------------------------------------------------------------------------------------


def command_of(
    options: type[Options],
    *groups: type[Options] | tuple[type[Options] | str, str],
    name: str = "",
    parent: click.Group | None = None,
    waits: bool = False,
) -> Callable[[Callable[..., None]], click.Command]:
    """Makes a command of a function that takes a Console, the options, and the values of each group.

    Args:
        groups: further options, which --help has behind the others, or before the option that is named; a name instead
            of a group is that of an option, which --help has elsewhere than the API.
        name: of the command; by default that of the function.
        parent: the group of commands that it is one of.
        waits: it measures, and has --max-wait.
    """
    placed = [each if isinstance(each, tuple) else (each, "") for each in groups]
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

        made = click.Command(
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
    """What click makes of a field; nothing where it is of the API alone."""
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
    if about.default is not None:
        default, shared["required"] = about.default, False
    shown = default is not None and default is not False and default != ()
    shared |= {"help": about.help.strip() or None}
    if shared["type"] is click.BOOL:
        del shared["type"], shared["required"], shared["metavar"], shared["shell_complete"]
        if "/" in about.flag:
            return [click.Option(names, default=default, show_default=shown, **shared)]
        shared |= {"flag_value": False} if default is True else {}
        return [click.Option(names, is_flag=True, default=default, **shared)]
    many = typing.get_origin(each.type) in (Sequence, Iterable) or about.kind == "merging"
    if many and not getattr(shared["type"], "whole", False):
        return [click.Option(names, multiple=True, **shared)]
    if default is not None:  # which click would take for a value
        shared |= {"default": default, "show_default": shown}
    return [click.Option(names, **shared)]


def _no_value(default: Any, about: Option) -> bool:
    """Whether a default, such as 0 jobs, is none that could be named on the command line."""
    return isinstance(default, int | float) and not isinstance(default, bool) and not about.allows(default)


def _type(annotation: Any, about: Option) -> click.ParamType:  # type: ignore[type-arg]
    """How the values of a type are read."""
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
    """The options with what was given of them."""
    names = {each.name: each for each, _ in described(options)}
    given = {name: value for name, value in values.items() if name in names and value not in (None, ())}
    for name, value in given.items():
        if names[name].metadata["option"].kind == "merging":
            if len(dict(value)) < len(value):
                raise click.UsageError(f"{flag_of(name)} names a block twice")
            given[name] = dict(value)
    return options(**given, **({"progress": console} if "progress" in names else {}))


def flag_of(name: str) -> str:
    """What the command line calls an option of the current command."""
    for parameter in click.get_current_context().command.params:
        if parameter.name == name:
            return max(parameter.opts, key=len)
    return name


def call(name: str, options: Options, *first: object) -> Any:
    """What a function of the API returns, whose options are checked before anything heavy is imported. `first`: its
    arguments before them."""
    from vitdeploy.api.calls import check_early

    check_early(options)
    return getattr(vitdeploy, name).of(*first, options)


def api(name: str) -> Any:
    """A module of the API, which may be heavy."""
    return importlib.import_module(f"vitdeploy.api.{name}")


def with_images(options: Chosen, described: Labelled) -> Chosen:
    """The options with the images of --data, whose labels and texts are described beside it."""
    data: dict[str, Any] = {"data": api("images").images(vars(options)["data"], **vars(described))}
    return replace(options, **data)


@contextlib.contextmanager
def recording(console: Console, places: Recorded) -> Iterator[Callable[[Any], None]]:
    """Around what measures: the block calls what it is given with the result, as `history.api.recorded` says; without
    a history and trackers nothing is imported for it."""
    if places.history is None and not places.trackers:
        yield lambda result: None
        return
    bundle = isinstance(places, RecordedBundle) and places.report_bundle
    with wing("history.api").recorded(places.history, places.trackers, bundle=bundle, progress=console) as record:
        yield record


def _set_longest_wait(context: click.Context, parameter: click.Parameter, value: float | None) -> None:
    """The process waits for no longer, whatever measures."""
    if value is not None:
        from vitdeploy.benchmark.machine import MACHINE

        MACHINE.max_wait = value


WAIT = click.Option(
    ["--max-wait"],
    type=KINDS["duration"],
    expose_value=False,
    callback=_set_longest_wait,
    help="90s, 20m, 1h: wait no longer for other measurements on this machine. Default: until they end.",
)
OUTPUT = (
    click.Option(["--json", "as_json"], is_flag=True, help="One JSON document on standard output."),
    click.Option(["-v", "--verbose"], count=True, help="More lines; -vv shows tracebacks."),
    click.Option(["-q", "--quiet"], is_flag=True, help="Results only."),
)


def to_build(target: str, options: Build) -> BuildOptions | None:
    """The requested build options; None if none was given.

    Raises:
        click.UsageError: one was given for another target than tensorrt.
    """
    given = {each.name: value for each in fields(options) if (value := getattr(options, each.name)) not in ((), None)}
    if not given:
        return None
    if target != "tensorrt":
        raise click.UsageError(f"{', '.join(map(flag_of, given))}: for --target tensorrt, not for {target}.")
    from vitdeploy.recipe.recipe import TensorRtSection

    return TensorRtSection(**given).to_options()


# --- The output of every command: progress and last lines for people, or one JSON document for programs ---------------


class Console(Reporter):
    """One command's output. Use as a context manager around the work, so that progress is closed before text.

    Tables and long lines fit a terminal; into a pipe they go whole. With `as_json` the document goes to standard output
    and everything else to standard error.
    """

    def __init__(self, as_json: bool, verbose: int, quiet: bool) -> None:
        super().__init__(verbose=verbose, quiet=quiet)
        self.as_json = as_json
        self._started = time.perf_counter()
        output = (click.get_current_context(silent=True) or click.Context(click.Command(""))).params.get("folder")
        self._replaced = output if isinstance(output, Path) and is_dir(output) and any(output.iterdir()) else None

    def finish(self, document: object, lines: Sequence[Line], home: str | Path | None, then: str = "") -> None:
        """The last lines: result, seconds, size, path, next command; or the JSON document, which may be a
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


def folder_bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


# --- Advice for a budget that is not met, by what it bounds -----------------------------------------------------------


_FIXES: dict[Kind, str] = {
    "answers": "evaluate on more images, or set another bound: --set budget.min_agreement=PERCENT or "
    "--set budget.max_drop=POINTS",
    "latency": "measure for longer while nothing else runs (--set bench.duration=SECONDS), or set another bound: "
    "--set budget.max_latency=MILLISECONDS",
    "memory": "a smaller batch (--set bench.batch=1), or another bound: --set budget.max_memory=BYTES",
    "size": "set another bound: --set budget.max_size=BYTES",
}
# Where unrelated answers meet a bound as well.
NOTHING_SHOWN = "evaluate on images to which the original's answers differ, best with labels"


def unmet_fix(reasons: Iterable[str]) -> str:
    """The means against all that these reasons of gates name."""
    from vitdeploy.verification.gate import PROVES_NOTHING, kinds_of

    reasons = list(reasons)
    found = kinds_of(reasons)
    fixes = [fix for kind, fix in _FIXES.items() if kind in found]
    return "; ".join([NOTHING_SHOWN, *fixes] if any(PROVES_NOTHING in each for each in reasons) else fixes)


# --- The command imports nothing from the folder that the user is in --------------------------------------------------
# a folder `onnx` there is no package of that name.


SAFE_PATH = "PYTHONSAFEPATH"  # read by Python 3.11 and newer


@contextlib.contextmanager
def outside_working_folder() -> Iterator[None]:
    """This process, and the Python processes that it starts, import nothing from the folder that the user is in.

    The `vitdeploy` command has that folder on no path; `python -m vitdeploy.cli.main` begins with it.
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


# Commands of a recipe, which they let `--set` change; and options that they do not have, as its section source says it.
WITH_RECIPE = ("run", "tune", "sweep")
OF_SOURCE = "checkpoint|image-size|heads|text-features|task|normal|labels|bind"


def as_keys(fix: str, command: str) -> str:
    """A fix that names options of the source, as the keys of the recipe that a command reads in their place."""
    if command not in WITH_RECIPE:
        return fix

    def size(match: re.Match[str]) -> str:
        sides = [", ".join(pair.split("x")) for pair in match[1].split(" or ")]
        return " or ".join(f"--set 'source.image_size=[{pair}]'" for pair in sides)

    fix = re.sub(r"--image-size ((?:\d+x\d+|HEIGHTxWIDTH)(?: or \d+x\d+)*)", size, fix)
    fix = re.sub(rf"(?<!leave )--({OF_SOURCE}) (\S+)", lambda match: f"--set source.{_key(match[1])}={match[2]}", fix)
    return re.sub(rf"--({OF_SOURCE})\b", lambda match: f"source.{_key(match[1])}", fix)


def _key(option: str) -> str:
    return option.replace("-", "_")
