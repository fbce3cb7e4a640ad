"""`vitdeploy completion bash|zsh|fish`: the lines that a shell reads at its start."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
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
