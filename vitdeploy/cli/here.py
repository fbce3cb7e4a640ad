"""`vitdeploy doctor|selftest|completion`: this machine, and its shell."""

# Annotations of options are evaluated: no future import.

from dataclasses import dataclass, field
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from vitdeploy.api.option import Options, option, required
from vitdeploy.api.options import (
    DURATION,
    OUTPUT,
)
from vitdeploy.cli.options import Console, api, command_line, command_of
from vitdeploy.errors import GateError, HostError


@dataclass(frozen=True)
class Doctor(Options):
    target: str | None = option(
        None, "Everything that this one target needs; exit code 4 where it does not work here.", complete="targets"
    )


@command_of(Doctor)
def doctor(console: Console, options: Doctor) -> None:
    """Show what is installed here and which targets work."""
    module, target = api("inspect"), options.target
    document, lines = module.diagnose() if target is None else module.diagnose_target(target)
    console.finish(document, lines, None)
    if target is not None and not document["works"]:
        click.get_current_context().exit(HostError.exit_code)


@dataclass(frozen=True)
class Selftest(Options):
    target: str = field(metadata=required("tensorrt, onnxruntime-cuda, or any other target.", complete="targets"))
    folder: Path | None = option(
        None, OUTPUT, help="The report's folder. Default: out/selftest-<target>", required=False
    )
    duration: float = option(10.0, DURATION)


@command_of(Selftest)
def selftest(console: Console, options: Selftest) -> None:
    """Prove a target on this machine: build, verify and bench engines, and write one report.

    Builds the digits model and a ViT-B/16 with seeded weights in every precision of the target, verifies each engine
    against PyTorch, and measures all in turns; on a GPU against torch.compile in FP16. A step that fails is recorded,
    and the rest continues. Exit code 5 if an engine does not give the original's answers, 4 if the target does not work
    here or a step failed; the report is written in any case.
    """
    out = options.folder or Path("out") / f"selftest-{options.target}"
    with console:
        document, lines = api("bundle").selftest(options.target, out, options.duration, console.progress)
    then = f"send {command_line(out)} back; open {command_line(out / 'report.html')}"
    console.finish(document, lines, out, then)
    if not document.passed:
        wrong = any(row.error and row.error.code == GateError.code for row in document.steps)
        click.get_current_context().exit(GateError.exit_code if wrong else HostError.exit_code)


SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """What a shell reads to complete commands, options, targets, models and devices.

    \b
    bash  eval "$(vitdeploy completion bash)"      at the end of ~/.bashrc
    zsh   eval "$(vitdeploy completion zsh)"       at the end of ~/.zshrc, after compinit
    fish  vitdeploy completion fish > ~/.config/fish/completions/vitdeploy.fish
    """
    from vitdeploy.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "vitdeploy", "_VITDEPLOY_COMPLETE").source())
