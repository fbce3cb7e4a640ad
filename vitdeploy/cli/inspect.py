"""`vitdeploy inspect PATH`: what a bundle or an ONNX file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import Console, expect_option, output_options, trust_option


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--target", shell_complete=complete_targets, help="Judge the graphs by what this target takes: tensorrt.")
@click.option("--target-version", help="The release to judge by: 10.3, 10.16 or 11.4. Default: all three.")
@click.option("--check", is_flag=True, help="Run every engine of a bundle on its golden inputs.")
@expect_option
@trust_option
@output_options
def command(
    console: Console,
    path: Path,
    target: str | None,
    target_version: str | None,
    check: bool,
    expect_digest: str | None,
    trust: Path | None,
) -> None:
    """Show what a bundle or an ONNX file contains, and check every digest of a bundle.

    --target names what that target would refuse (exit 5), slow down or leave unfused, and the fix. --check runs every
    engine that works here on the bundle's golden inputs: exit 5 if its outputs differ from those of the build by more
    than the manifest's tolerance, or if its answers are not the original's.
    """
    from vitdeploy.api.values import require_pinned
    from vitdeploy.bundle.read import is_bundle, is_packed, read_bundle

    if is_packed(path):
        read_bundle(path)  # which says how to unpack it
    if check and (target is not None or not is_bundle(path)):
        raise click.UsageError("--check runs the engines of a bundle: leave --target out.")
    if trust is not None and not check:
        raise click.UsageError("--trust goes with --check: nothing else of a bundle is run.")
    require_pinned(expect_digest, [path])
    if target is not None:
        _lint(console, path, target, target_version)
        return
    if target_version is not None:
        raise click.UsageError("--target-version goes with --target tensorrt.")
    from vitdeploy.api.inspect import inspect

    document, lines = inspect(path)
    if check:
        _self_check(console, path, trust, document, lines)
        return
    console.finish(document, lines, None)


def _self_check(console: Console, path: Path, trust: Path | None, document: dict[str, Any], lines: list[str]) -> None:
    from vitdeploy.api.bundle import check_bundle
    from vitdeploy.errors import GateError

    found, told, ok = check_bundle(path, trust)
    console.finish({**document, "check": found}, [*lines, *told], None)
    if not ok:
        raise GateError(
            "an engine does not give the golden answers",
            found=", ".join(each["engine"] for each in found if each["ok"] is False),
            wanted="what the engine gave when the bundle was made, within its tolerance, and the original's answers",
            fix="make the bundle on a machine like this one: other CPUs and runtimes have other kernels",
        )


def _lint(console: Console, path: Path, target: str, version: str | None) -> None:
    from vitdeploy.api.inspect import lint_graphs
    from vitdeploy.errors import GateError

    document, lines, findings = lint_graphs(path, target, version)
    console.finish(document, lines, None)
    errors = sorted({finding.rule for finding in findings if finding.severity == "error"})
    if errors:
        raise GateError(
            f"{target} would refuse {path}, or compute something else", found=", ".join(errors), fix="the fixes above"
        )
