"""The example in the help of every command: it runs, or at least parses where it needs another machine or long."""

import re
import shlex

import click
import pytest

from tests.command_line import ROOT, command_line
from vitdeploy.cli.main import cli

# Why an example is parsed and not run here; each of these commands has tests of its own.
PARSED = {
    "tune": "takes minutes",
    "sweep": "takes minutes",
    "serve": "answers until it is stopped",
    "history": "needs recorded results",
    "bundle sign": "needs a private key",
    "lab selftest": "takes minutes",
    "lab versions": "installs releases of a runtime",
    "devices deploy": "needs a device",
    "devices rollback": "needs a device",
    "devices status": "needs a device",
    "devices doctor": "needs a device",
}
# Later examples read what earlier ones write.
ORDER = ("run", "export", "optimize", "quantize", "compile", "bundle pack", "devices add")
SHORT = ("--set", "budget.min_agreement=0", "--set", "data.calibration.images=32", "--set", "bench.duration=0.1")


def leaves(group, *words):
    """Every command that is no group, by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from leaves(command, *words, name)
        else:
            yield " ".join((*words, name)), command


COMMANDS = dict(leaves(cli))
RUN = sorted({*COMMANDS} - {*PARSED, "lab completion"}, key=lambda name: ((*ORDER, name).index(name), name))


def example(name):
    [line] = re.findall(r"Example:\n +(vitdeploy .*)", COMMANDS[name].help)
    words = shlex.split(line)[1:]
    assert " ".join(words).startswith(name)
    return words


@pytest.fixture(scope="module")
def vitdeploy(tmp_path_factory, shared_store):
    """The command in a folder that is as the repository's root; its devices are those of no user."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("recipes", "calibration"):
        (folder / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch, command_line(folder, shared_store, short_bench=True) as run:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        yield run


@pytest.mark.parametrize("name", PARSED)
def test_an_example_parses(name):
    command, words = COMMANDS[name], example(name)[len(name.split()) :]
    with command.make_context(name, words) as context:
        assert context.params


@pytest.mark.parametrize("name", RUN)
def test_an_example_runs(name, vitdeploy):
    """In order. A short bench decides nothing, and few images prove no budget."""
    words = [*example(name), *(SHORT if name == "run" else ())]
    done = vitdeploy(*words)
    assert done.returncode in ((0, 5) if name in ("verify", "compare") else (0,)), done.stderr[-2000:]


def test_every_command_is_here():
    assert {*PARSED} < {*COMMANDS} and len(RUN) > 15
