"""Shell completion of targets, models and devices. Nothing heavy is imported."""

from collections.abc import Callable

import click
from click.shell_completion import CompletionItem

from vitdeploy.errors import VitdeployError
from vitdeploy.extensions import wing

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The targets; with "auto" if that is the option's default."""
    from vitdeploy.backends import TARGETS

    auto = ["auto"] if param.default == "auto" else []
    return [CompletionItem(name) for name in (*auto, *TARGETS) if name.startswith(incomplete)]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Built-in names, or files and folders if no name has this prefix."""
    from vitdeploy.models.names import BUILT_IN

    found = [CompletionItem(name) for name in BUILT_IN if incomplete and name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def complete_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The names and labels of `vitdeploy devices list`; completes the last item of a comma-separated list."""
    try:
        registry = wing("devices.registry")
        devices = registry.read_devices().values()
    except VitdeployError:  # a shell cannot show it
        return []
    before, comma, last = incomplete.rpartition(",")
    labels = [label for device in devices for label in device.labels]
    names = dict.fromkeys([registry.LOCAL, *(device.name for device in devices), *labels])
    if last.startswith(registry.LABEL):
        names = dict.fromkeys(f"{registry.LABEL}{label}" for label in labels)
    return [CompletionItem(f"{before}{comma}{name}") for name in names if name.startswith(last)]


def complete_known_devices(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Like `complete_devices`, without this machine and without commas, for `devices remove`."""
    return [device for device in complete_devices(ctx, param, incomplete) if device.value != "local"]


# The completions of the options of `api.options`, by their `complete`.
COMPLETE: dict[str, Complete] = {
    "targets": complete_targets,
    "models": complete_models,
    "devices": complete_devices,
    "known devices": complete_known_devices,
}
