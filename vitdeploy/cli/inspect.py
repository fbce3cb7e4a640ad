"""`vitdeploy inspect PATH`: what a bundle or an ONNX file holds."""

# Annotations of options are evaluated: no future import.

from dataclasses import dataclass, field
from pathlib import Path

from vitdeploy.api.options import EXPECT_DIGEST, TRUST, Options, option, required
from vitdeploy.cli.options import Console, api, command_of
from vitdeploy.errors import GateError


@dataclass(frozen=True)
class Inspect(Options):
    path: Path = field(metadata=required(place="one"))
    target: str | None = option(None, "Judge the graphs by what this target takes: tensorrt.", complete="targets")
    target_version: str | None = option(None, "The release to judge by: 10.3, 10.16 or 11.4. Default: all three.")
    check_answers: bool = option(False, "Run every engine of a bundle on its golden inputs.", flag="--check")
    expect_digest: str | None = option(None, EXPECT_DIGEST)
    trust: Path | None = option(None, TRUST)


@command_of(Inspect)
def command(console: Console, options: Inspect) -> None:
    """Show what a bundle or an ONNX file contains, and check every digest of a bundle.

    --target names what that target would refuse (exit 5), slow down or leave unfused, and the fix. --check runs every
    engine that works here on the bundle's golden inputs: exit 5 if its outputs differ from those of the build by more
    than the manifest's tolerance, or if its answers are not the original's.
    """
    from vitdeploy.bundle.read import is_bundle, is_packed, read_bundle

    path = options.path
    if is_packed(path):
        read_bundle(path)  # which says how to unpack it
    if options.check_answers and (options.target is not None or not is_bundle(path)):
        options.refuse("<check_answers> runs the engines of a bundle: leave <target> out.")
    if options.trust is not None and not options.check_answers:
        options.refuse("<trust> goes with <check_answers>: nothing else of a bundle is run.")
    api("values").require_pinned(options.expect_digest, [path])
    if options.target is not None:
        _lint(console, path, options.target, options.target_version)
        return
    if options.target_version is not None:
        options.refuse("<target_version> goes with <target> tensorrt.")
    document, lines = api("inspect").inspect(path)
    if not options.check_answers:
        console.finish(document, lines, None)
        return
    checked, told, ok = api("bundle").check_bundle(path, options.trust)
    console.finish({**document, "check": checked}, [*lines, *told], None)
    if not ok:
        raise GateError(
            "an engine does not give the golden answers",
            found=", ".join(each["engine"] for each in checked if each["ok"] is False),
            wanted="what the engine gave when the bundle was made, within its tolerance, and the original's answers",
            fix="make the bundle on a machine like this one: other CPUs and runtimes have other kernels",
        )


def _lint(console: Console, path: Path, target: str, version: str | None) -> None:
    document, lines, findings = api("inspect").lint_graphs(path, target, version)
    console.finish(document, lines, None)
    errors = sorted({finding.rule for finding in findings if finding.severity == "error"})
    if errors:
        raise GateError(
            f"{target} would refuse {path}, or compute something else", found=", ".join(errors), fix="the fixes above"
        )
