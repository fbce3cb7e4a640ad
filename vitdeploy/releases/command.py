"""`vitdeploy lab versions BUNDLE --runtime 'openvino==2025.2..2026.4'`: answers and times on several releases."""

from vitdeploy.api.options import (
    VersionsOptions,
)
from vitdeploy.cli.options import Console, call, command_of


@command_of(VersionsOptions, name="versions")
def command(console: Console, options: VersionsOptions) -> None:
    """Run a bundle on several releases of a runtime, and show where its answers or its times change.

    Each release is installed with pip into its own environment in the user's cache folder, and reused by later calls.
    There every engine of the bundle runs the golden inputs. Engines with correct answers are measured against the same
    engine on the release that the bundle was made with. Releases that cannot be installed here are listed. The exit
    code is 0 also if answers are wrong.

    \b
    Example:
      vitdeploy lab versions out/digits --runtime 'openvino==2026.3..2026.4'
    """
    found = call("versions", options)
    console.finish(found.document, found.lines(), None)
