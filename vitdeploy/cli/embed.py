"""`vitdeploy embed BUNDLE --as KIND -o DIR`: sources of an app that runs a bundle's engine."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.options import Console, command_line, output_options

# Those of `embed.kinds`, which takes a second to import.
NAMES = ("cpp", "web", "triton", "ovms", "kserve")


class KindName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """A kind of `embed.kinds`, which is imported when one is given only."""

    name = "kind"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in NAMES:
            from vitdeploy.embed.kinds import KINDS

            self.fail(f"{value!r}: wanted " + ", ".join(f"{name} ({kind.what})" for name, kind in KINDS.items()))
        return str(value)


@click.command("embed")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--as", "kind", required=True, type=KindName(), help="cpp, web, triton, ovms or kserve.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Write it into this new folder.")
@output_options
def command(console: Console, bundle: Path, kind: str, output: Path) -> None:
    """Write an app around a bundle's engine, as sources to read, build and keep.

    The bundle's golden answers come with it as a test.
    """
    from vitdeploy.bundle.read import read_bundle
    from vitdeploy.publish import check_replaceable, replacing

    read_bundle(bundle)
    check_replaceable(output, ())

    from vitdeploy.embed.kinds import KINDS

    with console, replacing(output, ()) as work:
        commands = KINDS[kind].write(bundle, work)
        files = sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file())
    then = " && ".join([command_line("cd", output), *commands])
    console.finish({"as": kind, "files": files, "commands": commands}, [", ".join(files)], output, then)
