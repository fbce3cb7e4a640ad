"""`vitdeploy compile DIR_OR_ONNX --target T -o DIR`: an engine for one target."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vitdeploy.api.options import Build, Compile, Pinned
from vitdeploy.cli.options import Console, api, call, command_line, command_of, to_build
from vitdeploy.paths import is_dir


@command_of(Compile, (Build, "accept_known_bad"), Pinned)
def command(console: Console, options: Compile, build: Build, pinned: Pinned) -> None:
    """Compile a graph to an engine for one target.

    GRAPH is a folder made by `vitdeploy export` or `vitdeploy quantize`, a bundle, whose float graph is taken, or a
    folder's model.onnx. `vitdeploy.runtime.load`, predict, verify and bench load the output.

    A graph that the release of the runtime is known to compute wrongly is refused with the way out, exit code 4.

    An INT8 engine for openvino-cpu may be faster with the rows of its tokens in parts. This is measured, for some
    40 seconds with a large model, unless --split-rows says how.

    With --on a device measures its rows and compiles the engine, which is fetched. Only that device can load what
    TensorRT built.
    """
    options = dataclasses.replace(options, build=to_build(options.target, build))
    graph = Path(str(options.graph))
    api("values").require_pinned(pinned.expect_digest, [graph if is_dir(graph) else graph.parent])
    from vitdeploy.runtime.backend import engine_is_code

    made, on = call("compile", options), options.on
    lines = list(made.text)
    if on is not None and engine_is_code(made.engines[0]):
        lines.append(f"its plan can be loaded on {on} only: bench and verify it with --on {on}")
    words = ("predict", options.folder, "IMAGE") if on is None else ("bench", options.folder, "--on", on)
    console.finish(dict(made.document), lines, options.folder, command_line("vitdeploy", *words))
