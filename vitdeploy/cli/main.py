"""The `vitdeploy` command: its sub-commands are imported when they are called, so that `predict` needs no torch."""

import contextlib
import difflib
import errno
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import click
from click.shell_completion import CompletionItem

from vitdeploy import __version__
from vitdeploy.cli.options import as_keys, outside_working_folder
from vitdeploy.errors import AnswersError, CapabilityError, MissingPackageError, VitdeployError
from vitdeploy.extensions import has_wing, wing
from vitdeploy.limits import ran_out_of_memory
from vitdeploy.publish import storage_error

SECTIONS = {
    "From a checkpoint to a bundle": {
        "run": "The whole pipeline: recipe in, proven bundle out.",
        "tune": "The engine to ship: every variant made and judged here.",
        "sweep": "Many recipes, one table.",
    },
    "Each step alone": {
        "export": "A model to ONNX, compared with PyTorch; `export list` names the built-in models.",
        "optimize": "Exact rewrites of a float graph, compared with the graph before.",
        "quantize": "A float graph to INT8 for one target, with calibration images.",
        "compile": "A graph to an engine for one target.",
        "verify": "An artifact against the original, on the same images.",
        "bench": "Latency and throughput, one process an artifact, in alternating blocks.",
        "versions": "A bundle on a series of a runtime's releases: answers and times.",
        "compare": "Two bundles or reports: a gate against lost answers and slower engines.",
        "history": "All recorded results: series, and where they got slower or faster.",
    },
    "Use a bundle": {
        "predict": "What a bundle says to images: files, folders, standard input.",
        "explain": "Where a model looks: attention maps over an image.",
        "serve": "A bundle behind HTTP: the Open Inference Protocol, and images.",
        "embed": "An app around a bundle's engine, as sources.",
        "inspect": "What a bundle or an ONNX file holds; checks every digest.",
        "bundle": "A bundle as one file: pack, unpack, verify, sign.",
    },
    "This machine and others": {
        "doctor": "What is installed here and which targets work.",
        "selftest": "Prove a target on this machine: engines built, verified, benched, one report.",
        "devices": "Boards and other machines, over ssh: add, doctor, deploy, status.",
        "completion": "What a shell reads to complete commands, targets, models and devices.",
    },
}
# The module of each command in this folder, and those of wings.
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
COMMANDS = {
    name: what
    for section in SECTIONS.values()
    for name, what in section.items()
    if name not in OF_WINGS or has_wing(OF_WINGS[name])
}
# Names of before, and what is called so now.
RENAMED = {"sign": "bundle sign"}
# Commands that a device install runs too, with the extra that has what they need beyond it.
LIGHT = {"bench": "bench", "embed": "embed"}
# Commands whose finished stages are stored, and those whose output appears whole or not at all.
RESUMED = ("run", "tune", "sweep")
WHOLE = ("export", "optimize", "quantize", "compile", "embed", "explain", "selftest")
# What the extra `export` installs, by the names of the modules.
EXPORT_MODULES = {
    *("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "pydantic", "yaml"),
    *("rich", "jinja2", "markupsafe", "matplotlib", "scipy", "platformdirs", "packaging"),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in OF_WINGS:
            command = wing(OF_WINGS[cmd_name]).command
        else:
            command = getattr(importlib.import_module(f"vitdeploy.cli.{HOMES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, what) for name, what in commands.items() if name in COMMANDS])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names, without an import of every command for its help."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=what) for name, what in COMMANDS.items() if name.startswith(incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            near = RENAMED.get(args[0]) or next(iter(difflib.get_close_matches(args[0], COMMANDS, n=1)), "")
            hint = f" Did you mean {near!r}?" if near else f" There are: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="vitdeploy")
def cli() -> None:
    """From a Vision Transformer checkpoint to the fastest engine that still gives the right answers."""


def main() -> None:
    """Run the command and leave with its exit code: 0 done, 1 our bug, 2 input, 3 unsafe, 4 this machine, 5 a gate."""
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
    except BrokenPipeError:  # nobody reads on, as behind `| head`; click ends so where it prints
        code = 1
    except Exception as error:
        if as_json:
            _print_error({"code": "VD1000", "message": repr(error), "exit_code": 1})
        _say(f"VD1000  a bug in vitdeploy: {error!r}\n        fix:    -vv shows where; please report it")
        _trace_if_asked()
        code = 1
    _forget_unprinted()
    sys.exit(code if isinstance(code, int) else 0)


def _forget_unprinted() -> None:
    """Python prints at its end what is left, and where that fails again, that changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(text: str) -> None:
    """A line on standard error, which may lie on the disk that is full: the exit status says it then."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


def _run() -> Any:
    """The command of the arguments. Commands import what they need when called, so here is where a package misses."""
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
            extra = LIGHT.get(_command_of(sys.argv[1:]), "export")
            raise MissingPackageError(name, extra, "this command") from error
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            raise CapabilityError(
                "no more files can be opened here",
                found=error.strerror or str(error),
                expected="a higher limit of open files",
                fix="ulimit -n 4096, or fewer commands at a time",
            ) from error
        if isinstance(error, OSError) and (storage := storage_error(error)) is not None:
            raise storage from error
        if not isinstance(error, VitdeployError) and ran_out_of_memory(error):
            raise CapabilityError(
                "this machine has too little memory for that",
                found=(str(error).splitlines() or ["out of memory"])[0][-200:],
                fix="a smaller model or image size, or a machine with more memory",
            ) from error
        raise


def _command_of(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-")), "")


def _interrupted(arguments: Sequence[str]) -> str:
    """Say what an interrupted command has stored. Measurements are never stored."""
    command = _command_of(arguments)
    if command in RESUMED and "--no-resume" not in arguments:
        return "interrupted; the same command goes on from the last finished stage, but measures again"
    return "interrupted; nothing was written" if command in WHOLE else "interrupted"


def _interrupt_behind(error: BaseException | None) -> BaseException | None:
    """The interrupt that an error arose from: libraries that are interrupted in an import fail while they unwind."""
    while error is not None and not isinstance(error, KeyboardInterrupt | _Terminated):
        error = error.__cause__ or error.__context__
    return error


class _Terminated(BaseException):
    """SIGTERM: unwinds like an interrupt, so that temporary folders and children go."""


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whoever sends it to a whole group sends it twice
    raise _Terminated


def _trace_if_asked() -> None:
    if "-vv" in sys.argv or sys.argv.count("-v") >= 2:
        traceback.print_exc()


def _locate(error: VitdeployError) -> None:
    """Say of an engine with wrong answers which layer differs first, where what finds it is installed."""
    if not isinstance(error, AnswersError) or not error.bundle:
        return
    with contextlib.suppress(ImportError, VitdeployError):
        from vitdeploy.workflows.seeded import locate

        locate(error)


def _name_keys(error: VitdeployError) -> None:
    """Say a fix by the keys of a recipe where that is what the command reads."""
    with contextlib.suppress(OSError):  # where no more files can be opened
        error.fix = as_keys(error.fix, _command_of(sys.argv[1:]))


def _print_error(error: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        click.echo(json.dumps({"error": error}))


if __name__ == "__main__":
    main()
