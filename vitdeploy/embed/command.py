"""`vitdeploy embed BUNDLE --as KIND -o DIR`: sources of an app that runs a bundle's engine."""

# Annotations of options are evaluated: no future import.

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from vitdeploy.api.option import Options, required
from vitdeploy.api.options import (
    OUTPUT,
)
from vitdeploy.bundle.read import read_bundle
from vitdeploy.cli.options import Console, command_line, command_of
from vitdeploy.publish import check_replaceable, replacing

Write = Callable[[Path, Path], list[str]]


@dataclass(frozen=True)
class EmbedKind:
    """A way to embed a bundle. `place`: "module:name" in `vitdeploy.embed`, imported only when needed (about 1 s)."""

    what: str
    place: str

    @property
    def write(self) -> Write:
        """`write(bundle, out)` fills the empty folder `out` and returns the commands to build and test it there."""
        module, _, name = self.place.partition(":")
        return cast("Write", getattr(importlib.import_module(f"vitdeploy.embed.{module}"), name))


KINDS = {
    "cpp": EmbedKind("a C++ program for OpenVINO, with CMake", "cpp:write"),
    "web": EmbedKind("a static page for onnxruntime-web", "web:write"),
    "triton": EmbedKind("a model repository for NVIDIA Triton", "servers:write_triton"),
    "ovms": EmbedKind("a model repository for OpenVINO Model Server", "servers:write_ovms"),
    "kserve": EmbedKind("a model repository and its InferenceService", "servers:write_kserve"),
}


@dataclass(frozen=True)
class Embed(Options):
    bundle: Path = field(metadata=required(place="one"))
    kind: str = field(metadata=required("cpp, web, triton, ovms or kserve.", flag="--as", kind="embedding"))
    folder: Path = field(metadata=required(OUTPUT, help="New folder to write to."))


@command_of(Embed, name="embed")
def command(console: Console, options: Embed) -> None:
    """Write the sources of an app that runs a bundle's engine.

    They include the bundle's golden answers as a test.

    \b
    Example:
      vitdeploy embed out/digits --as cpp -o app
    """
    read_bundle(options.bundle)
    check_replaceable(options.folder, ())

    with console, replacing(options.folder, ()) as work:
        commands = KINDS[options.kind].write(options.bundle, work)
        files = sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file())
    then = " && ".join([command_line("cd", options.folder), *commands])
    document = {"as": options.kind, "files": files, "commands": commands}
    console.finish(document, [", ".join(files)], options.folder, then)
