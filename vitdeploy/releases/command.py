"""`vitdeploy lab versions BUNDLE --runtime 'openvino==2025.2..2026.4'`: answers and times on a series of releases."""

from vitdeploy.api.options import (
    VersionsOptions,
)
from vitdeploy.cli.options import Console, call, command_of


@command_of(VersionsOptions, name="versions")
def command(console: Console, options: VersionsOptions) -> None:
    """Run a bundle on a series of a runtime's releases, and show where its answers or its times change.

    Each release is installed with pip into an environment of its own, in the user's cache folder, where the next call
    finds it. There every engine of the bundle answers the golden inputs, and one that answers right is measured beside
    the same engine on the release that the bundle was made with. Releases that do not install here are named. The exit
    code is 0 whatever the engines answer.

    \b
    Example:
      vitdeploy lab versions out/digits --runtime 'openvino==2026.3..2026.4'
    """
    found = call("versions", options)
    console.finish(found.document, found.lines(), None)
