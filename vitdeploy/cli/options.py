"""Options and arguments that commands share, and what they print."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import click

import vitdeploy
from vitdeploy.api.values import Line, Reporter, human_bytes, printed
from vitdeploy.cli.complete import complete_devices, complete_targets
from vitdeploy.errors import visible
from vitdeploy.extensions import wing
from vitdeploy.paths import is_dir
from vitdeploy.spec import LabelKind, Task, encode

if TYPE_CHECKING:
    from vitdeploy.compilation.build_options import BuildOptions
    from vitdeploy.models.source import Source
    from vitdeploy.verification.gate import Kind


# --- Options that several commands have -------------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """ "90s", "20m", "1.5h", in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is not a time like 90s, 20m or 1h.", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


def _set_longest_wait(context: click.Context, option: click.Parameter, value: float | None) -> None:
    """The process waits for no longer, whatever measures."""
    if value is not None:
        from vitdeploy.benchmark.machine import MACHINE

        MACHINE.max_wait = value


wait_option = click.option(
    "--max-wait",
    type=Duration(),
    expose_value=False,
    callback=_set_longest_wait,
    help="90s, 20m, 1h: wait no longer for other measurements on this machine. Default: until they end.",
)


engine_option = click.option(
    "--target",
    shell_complete=complete_targets,
    default="auto",
    show_default=True,
    help="Which engine, by target or name; auto takes the first that works here.",
)

# A bundle may be somebody else's.
trust_option = click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Take bundles only if signed by this public key or certificate (PEM), as `vitdeploy bundle sign` does.",
)


def digest_of(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """The hex of a SHA-256."""
    from vitdeploy.bundle.layout import digest_hex
    from vitdeploy.errors import InputError

    try:
        return None if value is None else digest_hex(value)
    except InputError as error:
        raise click.BadParameter(f"{error.message}: {error.wanted}.") from None


# No digest is above that of the manifest, which has those of all other files.
expect_option = click.option(
    "--expect-digest",
    callback=digest_of,
    metavar="sha256:HEX",
    help="Refuse any other bundle: the SHA-256 of its manifest.json, as `vitdeploy bundle verify` prints it.",
)


accept_option = click.option(
    "--accept-known-bad",
    multiple=True,
    metavar="ID",
    help="Compile although this entry of the table of runtimes known to be wrong is about the graph.",
)


def memory_options(function: F) -> F:
    """--history and --report-to, of a result."""
    # Not a path: a URI is none.
    history = click.option(
        "--history",
        metavar="DIR-or-URI",
        help="Add the result to this history, as one new file; `vitdeploy history` reads it.",
    )
    return history(report_option(function))


on_option = click.option(
    "--on",
    shell_complete=complete_devices,
    metavar="DEVICE[,DEVICE]",
    help="Run there: names or labels of `vitdeploy devices list`, or local.",
)


def recorded(
    history: str | None, trackers: Sequence[str], **how: Any
) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
    """Around what measures, with its --history and --report-to: what the block calls with the result, as
    `history.api.recorded` says; without the two it does nothing."""
    if history is None and not trackers:
        return contextlib.nullcontext(lambda result: None)
    found: contextlib.AbstractContextManager[Callable[[Any], None]] = wing("history.api").recorded(
        history, trackers, **how
    )
    return found


report_option = click.option(
    "--report-to",
    "trackers",
    multiple=True,
    metavar="TRACKER",
    help="Send to mlflow[:URI], wandb[:[ENTITY/]PROJECT] or bencher:FILE, once for each result.",
)
report_bundle_option = click.option("--report-bundle", is_flag=True, help="Send the bundle too, with --report-to.")


def label_options(function: F) -> F:
    """--labels and --annotations of the images of --data."""
    labels = click.option(
        "--labels",
        type=click.Choice(typing.get_args(LabelKind)),
        help="Where labels come from. Default: class folders, or what tars, tables and lists bring.",
    )
    annotations = click.option(
        "--annotations",
        type=click.Path(path_type=Path),
        help="YOLO's folder, COCO's JSON file, the folder of maps, or the JSON list of texts or prompts.",
    )
    return labels(annotations(function))


def text_options(function: F) -> F:
    """--texts and --template, for models that compare images with texts."""
    texts = click.option(
        "--texts", type=click.Path(path_type=Path), help="For models that take texts: a file, one a line."
    )
    template = click.option(
        "--template", metavar="TEXT", help="What makes a class folder's name a text, as 'a photo of a {}.'."
    )
    return texts(template(function))


def worker_options(function: F, what: str = "many calibration images are observed") -> F:
    """--executor and --jobs of commands that share out work; `what` is done there."""
    executor = click.option(
        "--executor",
        metavar="processes|ray[:HOST:PORT]",
        help=f"Where {what}: by processes of this machine, or on a Ray cluster.",
    )
    jobs = click.option(
        "--jobs",
        type=click.IntRange(min=1),
        help="How many pieces of that at a time, by processes without --executor. Default: one for each core or CPU.",
    )
    return executor(jobs(function))


# --- The options on how TensorRT builds: those of a recipe's section `tensorrt` ---------------------------------------


NAMES = ("profiles", "workspace", "builder_optimization_level", "hardware_compatibility_level", "version_compatible")


class Profile(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """MIN,OPT,MAX: batches, in ascending order."""

    name = "profile"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        texts = str(value).split(",")
        batches = tuple(int(text) for text in texts if text.isdecimal())
        if len(texts) != 3 or len(batches) != 3 or not 1 <= batches[0] <= batches[1] <= batches[2]:
            self.fail(f"{value!r} is no profile; wanted the smallest, best and largest batch: 1,8,32.", param, ctx)
        return batches


def build_options(function: F) -> F:
    """--profile (as often as needed), --workspace, --builder-optimization-level, --hardware-compatibility-level and
    --version-compatible."""
    options = (
        click.option(
            "--profile",
            "profiles",
            type=Profile(),
            multiple=True,
            metavar="MIN,OPT,MAX",
            help="tensorrt: batches to build for; as often as needed. Default: just --batch, and 1 to 8 or more.",
        ),
        click.option(
            "--workspace",
            type=click.IntRange(min=1),
            metavar="MIB",
            help="tensorrt: the most device memory that kernels may work in. Default: what is free.",
        ),
        click.option(
            "--builder-optimization-level",
            type=click.IntRange(0, 5),
            help="tensorrt: 0 builds fastest, 5 searches longest. Default: 3.",
        ),
        click.option(
            "--hardware-compatibility-level",
            type=click.Choice(["none", "same-compute-capability", "ampere+"]),
            help="tensorrt: the GPUs that the engine may run on beside this one. Default: none.",
        ),
        click.option(
            "--version-compatible",
            is_flag=True,
            default=None,
            help="tensorrt: the engine also runs on later releases of TensorRT.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def to_build(target: str, options: dict[str, Any]) -> BuildOptions | None:
    """The requested build options; None if none was given.

    Raises:
        click.UsageError: one was given for another target than tensorrt.
    """
    given = {name: options[name] for name in NAMES if options[name] not in ((), None)}
    if not given:
        return None
    if target != "tensorrt":
        flags = ", ".join("--profile" if name == "profiles" else f"--{name.replace('_', '-')}" for name in given)
        raise click.UsageError(f"{flags}: for --target tensorrt, not for {target}.")
    from vitdeploy.recipe.sections import TensorRtSection

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


# --- The options that say more of a model than its name, shared by the commands that take one -------------------------


REFERENCE = "PACKAGE.MODULE:FUNCTION"
OWN = "Your own torch.nn.Module"
MODEL_NAMES = ("checkpoint", "image_size", "heads", "text_features", "function", "task", "normal", "bind")
# Commands of a recipe, which they let `--set` change; and options that they do not have, as its section source says it.
WITH_RECIPE = ("run", "tune", "sweep")
OF_SOURCE = "checkpoint|image-size|heads|text-features|task|normal|labels|bind"


class ImageSize(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A side in pixels, or HEIGHTxWIDTH."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        sides = str(value).lower().split("x")
        if not (1 <= len(sides) <= 2 and all(side.isdecimal() and int(side) > 0 for side in sides)):
            self.fail(f"{value!r} is no image size; wanted 384, or 256x320 (height x width).", param, ctx)
        return int(sides[0]), int(sides[-1])


def model_option(function: F) -> F:
    """--model, for the commands whose recipe says all else."""
    return click.option("--model", "function", metavar=REFERENCE, help=f"{OWN}, in a recipe that names no model.")(
        function
    )


def source_options(*, several_sizes: bool = False) -> Callable[[F], F]:
    """--checkpoint, --image-size (once, or as often as needed), --heads, --text-features, --model, --task, --normal,
    --bind."""
    size = "Other than the checkpoint's: 384, or 256x320 (HxW)."
    options = (
        click.option(
            "--checkpoint",
            type=click.Path(path_type=Path),
            help="Weights: .safetensors, .pt/.pth with plain weights, or JAX's .npz.",
        ),
        click.option(
            "--image-size",
            type=ImageSize(),
            multiple=several_sizes,
            help=f"{size} Each one given makes a graph of its own." if several_sizes else size,
        ),
        click.option("--heads", type=click.IntRange(min=1), help="Attention heads, where no config file says it."),
        click.option(
            "--text-features", type=click.Path(path_type=Path), help="Zero-shot: .npy, float32 [classes, width]."
        ),
        click.option("--model", "function", metavar=REFERENCE, help=f"{OWN}."),
        click.option(
            "--task",
            type=click.Choice(typing.get_args(Task)),
            help="What the outputs are to be taken for, where they do not say it.",
        ),
        click.option(
            "--normal",
            type=click.Path(path_type=Path),
            help="Images of good parts, or MVTec AD's folder of them: for --task anomaly.",
        ),
        click.option(
            "--bind",
            multiple=True,
            metavar="NAME=VALUE",
            help="A further input of an .onnx file becomes a constant: a number, numbers with commas, a .npy or .npz.",
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


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


def to_source(model: str | None, options: dict[str, Any]) -> Source:
    """The source of these options, which are taken out of `options`."""
    from vitdeploy.models.source import Source

    return Source(model=model, **{name: options.pop(name) for name in MODEL_NAMES})
