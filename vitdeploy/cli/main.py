"""The `vitdeploy` command. Sub-commands are imported when called, so that `predict` needs no torch."""

import contextlib
import difflib
import errno
import importlib
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitdeploy import __version__
from vitdeploy.cli.options import as_keys, outside_working_folder
from vitdeploy.errors import AnswersError, CapabilityError, MissingPackageError, VitdeployError, quoted
from vitdeploy.extensions import has_wing, wing
from vitdeploy.limits import ran_out_of_memory
from vitdeploy.publish import storage_error

SECTIONS = {
    "Make a bundle": {
        "run": "Run the whole pipeline: a recipe in, a verified bundle out.",
        "tune": "Search all variants on this machine for the best engine.",
        "sweep": "Run many recipes and compare them in one table.",
    },
    "Use a bundle": {
        "predict": "Run a bundle on images: files, folders, standard input.",
        "serve": "Serve a bundle over HTTP, in the Open Inference Protocol.",
        "embed": "Write an app around an engine: C++, a web page, a server.",
        "explain": "Draw attention maps over an image.",
        "bundle": "Pack, unpack, verify or sign a bundle.",
    },
    "Check and compare": {
        "inspect": "Show what a bundle or an ONNX file contains.",
        "compare": "Compare two bundles: a gate for answers and speed.",
        "bench": "Benchmark artifacts in alternating processes.",
        "history": "List recorded results and changes in speed.",
    },
    "Single steps of `run`": {
        "export": "Export a model to ONNX; `export list` names the built-in models.",
        "optimize": "Rewrite a float graph exactly, and check the result.",
        "quantize": "Quantize a float graph for one target, with calibration images.",
        "compile": "Compile a graph to an engine for one target.",
        "verify": "Compare an artifact with its original on the same images.",
    },
    "Machines": {
        "doctor": "Show what is installed here and which targets work.",
        "devices": "Work on boards and other machines over ssh.",
        "lab": "Rare commands: selftest, versions, completion.",
    },
}
# Commands of `vitdeploy lab`.
LAB = {
    "selftest": "Test a target end to end on this machine.",
    "versions": "Run a bundle on several releases of a runtime.",
    "completion": "Print the shell-completion script.",
}
# The module of each command in this folder, and of the commands in wings.
HOMES = {
    **dict.fromkeys(("run", "tune", "sweep"), "pipelines"),
    **dict.fromkeys(("export", "optimize", "quantize", "compile", "verify", "bench", "compare"), "steps"),
    **dict.fromkeys(("bundle", "inspect", "explain", "doctor", "selftest", "completion"), "bundles"),
    "predict": "predict",
}
OF_WINGS = {
    "history": "history.command",
    "serve": "serve.command",
    "embed": "embed.command",
    "devices": "devices.command",
    "versions": "releases.command",
}


def _present(commands: Mapping[str, str]) -> dict[str, str]:
    """The commands, without those of wings that are not installed."""
    return {name: what for name, what in commands.items() if name not in OF_WINGS or has_wing(OF_WINGS[name])}


COMMANDS = _present({name: what for section in SECTIONS.values() for name, what in section.items()})
# Aliases that users type, and their commands.
RENAMED = {"sign": "bundle sign", **{name: f"lab {name}" for name in LAB}}
# Commands that a device install also runs, with the extra `bench`.
LIGHT = ("bench", "embed", "history")
# Commands that store finished stages, and commands whose output appears whole or not at all.
RESUMED = ("run", "tune", "sweep")
WHOLE = ("export", "optimize", "quantize", "compile", "embed", "explain", "selftest")
# The start of a recipe, and the number of bytes to search.
_RECIPE, MOST_READ = re.compile(rb"""^\{?\s*["']?vitdeploy["']?\s*:""", re.MULTILINE), 4096
# The modules that the extra `export` installs.
EXPORT_MODULES = {
    *("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "pydantic", "yaml"),
    *("rich", "jinja2", "markupsafe", "matplotlib", "scipy", "platformdirs", "packaging"),
    *("cloudpickle", "cyclonedx", "ml_dtypes"),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when called. `sections`: their summaries, by title and name."""

    def __init__(self, *, sections: Mapping[str, Mapping[str, str]], **settings: Any) -> None:
        super().__init__(**settings)
        self.sections = {title: _present(commands) for title, commands in sections.items()}
        self.summaries = {name: what for section in self.sections.values() for name, what in section.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        if cmd_name == "lab":
            return lab
        if cmd_name in OF_WINGS:
            command = wing(OF_WINGS[cmd_name]).command
        else:
            command = getattr(importlib.import_module(f"vitdeploy.cli.{HOMES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in self.sections.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names without importing every command for its help."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        names = [name for name in self.summaries if name.startswith(incomplete)]
        return [CompletionItem(name, help=self.summaries[name]) for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.summaries and not ctx.resilient_parsing:
            near = RENAMED.get(args[0]) or next(iter(difflib.get_close_matches(args[0], self.summaries, n=1)), "")
            hint = f" Did you mean {near!r}?" if near else f" Commands: {', '.join(self.summaries)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


HELP = {"help_option_names": ["-h", "--help"]}


@click.group(cls=LazyGroup, sections=SECTIONS, context_settings=HELP, invoke_without_command=True)
@click.version_option(__version__, prog_name="vitdeploy")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """From a Vision Transformer checkpoint to the fastest engine that still gives correct answers."""
    if ctx.invoked_subcommand is None:
        click.echo(f"vitdeploy {__version__}\nnext: {_next_step(Path())}\nAll commands: vitdeploy --help")


@click.group(name="lab", cls=LazyGroup, sections={"Commands": LAB}, context_settings=HELP)
def lab() -> None:
    """Rare commands: test a target end to end, compare releases of a runtime, complete words in a shell."""


def _next_step(folder: Path) -> str:
    """The next command in a working folder: for its newest bundle, for its recipe, or a first one."""
    bundles = sorted(folder.glob("out/*/manifest.json"), key=lambda file: file.stat().st_mtime)
    recipes = [file for file in sorted(folder.glob("*.yaml")) if _RECIPE.search(file.read_bytes()[:MOST_READ])]
    if bundles:
        return f"vitdeploy predict {quoted(bundles[-1].parent)} IMAGE"
    if recipes:
        return f"vitdeploy run {quoted(recipes[0])}"
    return "vitdeploy doctor, then write a recipe: vitdeploy run --help"


def main() -> None:
    """Run the command and exit with its code: 0 done, 1 a bug, 2 input, 3 unsafe, 4 this machine, 5 a gate."""
    signal.signal(signal.SIGTERM, _terminate)
    as_json = "--json" in sys.argv
    try:
        code = _run()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        if as_json:
            _print_error({"code": "VD2000", "message": error.format_message(), "exit_code": 2})
        error.show()
        code = 2
    except VitdeployError as error:
        _locate(error)
        _name_keys(error)
        if as_json and not error.after_document:
            _print_error(error.to_dict())
        _say(str(error))
        _trace_if_asked()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say(_interrupted(sys.argv[1:]))
        code = 130
    except _Terminated:
        code = 143
    except BrokenPipeError:  # the reader is gone, as with `| head`; click exits with 1 too
        code = 1
    except Exception as error:
        if as_json:
            _print_error({"code": "VD1000", "message": repr(error), "exit_code": 1})
        _say(f"VD1000  a bug in vitdeploy: {error!r}\n        fix:      please report it, with the output of -vv")
        _trace_if_asked()
        code = 1
    _forget_unprinted()
    sys.exit(code if isinstance(code, int) else 0)


def _forget_unprinted() -> None:
    """Drop unprinted output: Python flushes it at exit, and a second failure would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """Print a line on standard error; failure (a full disk) is ignored, as the exit code reports the error too."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def _run() -> Any:
    """Run the command of the arguments. Commands import when called, so a missing package shows up here."""
    try:
        with outside_working_folder():
            found = cli.main(prog_name="vitdeploy", standalone_mode=False)
            sys.stdout.flush()
            return found
    except Exception as error:
        interrupt = _interrupt_behind(error)
        if interrupt is not None:
            raise interrupt from None
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name in EXPORT_MODULES:
            extra = "bench" if _command_of(sys.argv[1:]) in LIGHT else "export"
            raise MissingPackageError(name, extra, "this command") from error
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise CapabilityError(
                "too many open files",
                found=error.strerror or str(error),
                expected="a higher limit of open files",
                fix="raise it: ulimit -n 4096, or run fewer commands at once",
            ) from error
        if isinstance(error, OSError) and (storage := storage_error(error)) is not None:
            raise storage from error
        if not isinstance(error, VitdeployError) and ran_out_of_memory(error):
            raise CapabilityError(
                "this machine has too little memory for this command",
                found=(str(error).splitlines() or ["out of memory"])[0][-200:],
                fix="use a smaller model or image size, or a machine with more memory",
            ) from error
        raise


def _command_of(arguments: Sequence[str]) -> str:
    """The name of the command; for `lab NAME`, NAME."""
    names = [word for word in arguments if not word.startswith("-")] or [""]
    return names[1] if names[0] == "lab" and len(names) > 1 else names[0]


def _interrupted(arguments: Sequence[str]) -> str:
    """The message on an interrupted command: what it has stored. Measurements are never stored."""
    command = _command_of(arguments)
    if command in RESUMED and "--no-resume" not in arguments:
        return "interrupted; run the same command to resume from the last finished stage (measurements are repeated)"
    return "interrupted; nothing was written" if command in WHOLE else "interrupted"


def _interrupt_behind(error: BaseException | None) -> BaseException | None:
    """The interrupt that caused an error: libraries interrupted during import fail while they unwind."""
    while error is not None and not isinstance(error, KeyboardInterrupt | _Terminated):
        error = error.__cause__ or error.__context__
    return error


class _Terminated(BaseException):
    """SIGTERM: unwinds like an interrupt, so that temporary folders and children are removed."""


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a signal to the process group arrives twice
    raise _Terminated


def _trace_if_asked() -> None:
    if "-vv" in sys.argv or sys.argv.count("-v") >= 2:
        traceback.print_exc()


def _locate(error: VitdeployError) -> None:
    """Add the first differing layer to the error of an engine with wrong answers, if the packages are installed."""
    if not isinstance(error, AnswersError) or not error.bundle:
        return
    with contextlib.suppress(ImportError, VitdeployError):
        from vitdeploy.workflows.seeded import locate

        locate(error)


def _name_keys(error: VitdeployError) -> None:
    """Rewrite a fix to use recipe keys, if the command reads a recipe."""
    with contextlib.suppress(OSError):  # no more files can be opened
        error.fix = as_keys(error.fix, _command_of(sys.argv[1:]))


def _print_error(error: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        click.echo(json.dumps({"error": error}))


if __name__ == "__main__":
    main()
