"""`vitdeploy compile DIR_OR_ONNX --target T -o DIR`: an engine for one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

import click

from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.options import (
    Console,
    accept_option,
    build_options,
    command_line,
    expect_option,
    on_option,
    output_options,
    to_build,
)
from vitdeploy.paths import is_dir
from vitdeploy.spec import MAX_BATCH


@click.command("compile")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option(
    "--target",
    shell_complete=complete_targets,
    required=True,
    help="As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the engine.")
@click.option(
    "--batch", type=click.IntRange(1, MAX_BATCH), help="The batch to compile at. Default: the graph's own, or 1."
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="For a float graph. Default: fp32, or what the graph was placed for.",
)
@build_options
@accept_option
@click.option(
    "--split-rows",
    default="auto",
    show_default=True,
    metavar="auto|none|A,B",
    help="How INT8 on openvino-cpu computes the rows of its tokens: in parts, such as 192,5, or more, such as 200; "
    "auto: as measured.",
)
@on_option
@expect_option
@output_options
def command(
    console: Console,
    graph: Path,
    target: str,
    output: Path,
    batch: int | None,
    precision: str | None,
    accept_known_bad: tuple[str, ...],
    split_rows: str,
    on: str | None,
    expect_digest: str | None,
    **options: Any,
) -> None:
    """Compile a graph to an engine for one target.

    GRAPH is a folder made by `vitdeploy export` or `vitdeploy quantize`, a bundle, whose float graph is taken, or a
    folder's model.onnx. `vitdeploy.runtime.load`, predict, verify and bench load the output.

    A graph that the release of the runtime is known to compute wrongly is refused with the way out, exit code 4.

    An INT8 engine for openvino-cpu may be faster with the rows of its tokens in parts. This is measured, for some
    40 seconds with a large model, unless --split-rows says how.

    With --on a device measures its rows and compiles the engine, which is fetched. Only that device can load what
    TensorRT built.
    """
    build = to_build(target, options)
    from vitdeploy.api.bundle import compile
    from vitdeploy.api.values import require_pinned
    from vitdeploy.runtime.backend import engine_is_code

    require_pinned(expect_digest, [graph if is_dir(graph) else graph.parent])
    made = compile(
        graph,
        target,
        output,
        precision=precision,  # type: ignore[arg-type]
        batch=batch,
        build=build,
        on=on,
        accept_known_bad=accept_known_bad,
        split_rows=parts_of_text(split_rows),
        progress=console,
    )
    lines = list(made.text)
    if on is not None and engine_is_code(made.engines[0]):
        lines.append(f"its plan can be loaded on {on} only: bench and verify it with --on {on}")
    words = ("predict", output, "IMAGE") if on is None else ("bench", output, "--on", on)
    console.finish(dict(made.document), lines, output, command_line("vitdeploy", *words))


def parts_of_text(text: str) -> Literal["auto", "none"] | tuple[int, ...]:
    """What --split-rows says; raises click.BadParameter."""
    if text in ("auto", "none"):
        return cast('Literal["auto", "none"]', text)
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        said = f"{text!r} is not auto, none or rows, such as 192,5 or 200"
        raise click.BadParameter(said, param_hint="--split-rows") from None
