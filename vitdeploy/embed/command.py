"""`vitdeploy embed BUNDLE --as KIND -o DIR`: sources of an app that runs a bundle's engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import click

from vitdeploy.bundle.read import read_bundle
from vitdeploy.cli.options import Console, command_line, output_options
from vitdeploy.publish import check_replaceable, replacing

Write = Callable[[Path, Path], list[str]]


@dataclass(frozen=True)
class EmbedKind:
    """A way to embed a bundle: `place` is "module:name" in `vitdeploy.embed`, which takes a second to import."""

    what: str
    place: str

    @property
    def write(self) -> Write:
        """`write(bundle, out)` fills the empty folder `out` and returns the commands that build and test it there."""
        module, _, name = self.place.partition(":")
        return cast("Write", getattr(importlib.import_module(f"vitdeploy.embed.{module}"), name))


KINDS = {
    "cpp": EmbedKind("a C++ program for OpenVINO, with CMake", "cpp:write"),
    "web": EmbedKind("a static page for onnxruntime-web", "web:write"),
    "triton": EmbedKind("a model repository for NVIDIA's Triton", "servers:write_triton"),
    "ovms": EmbedKind("a model repository for OpenVINO Model Server", "servers:write_ovms"),
    "kserve": EmbedKind("a model repository and its InferenceService", "servers:write_kserve"),
}


class KindName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    name = "kind"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in KINDS:
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
    read_bundle(bundle)
    check_replaceable(output, ())

    with console, replacing(output, ()) as work:
        commands = KINDS[kind].write(bundle, work)
        files = sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file())
    then = " && ".join([command_line("cd", output), *commands])
    console.finish({"as": kind, "files": files, "commands": commands}, [", ".join(files)], output, then)
