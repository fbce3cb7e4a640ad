"""`vitdeploy optimize DIR_OR_ONNX -o DIR`: rewrites of a float graph, exact unless tokens are merged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from vitdeploy.api.graph import REWRITES
from vitdeploy.cli.options import Console, ImageSize, command_line, output_options


class MergeStep(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.5 on only
    """`BLOCK:TOKENS`: the block and how many tokens remain behind its attention."""

    name = "block:tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,4}):(\d{1,6})", str(value))
        if match is None:
            self.fail(f"{value!r} is not BLOCK:TOKENS, as 1:192.", param, ctx)
        return int(match[1]), int(match[2])


@click.command("optimize")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the rewritten graph.")
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(REWRITES),
    metavar="REWRITE",
    help=f"Leave out: {', '.join(REWRITES)}.",
)
@click.option(
    "--qkv",
    type=click.Choice(["keep", "merged", "separate"]),
    default="keep",
    show_default=True,
    help="Query, key and value as one linear or three.",
)
@click.option("--rotate-residual", is_flag=True, help="Rotate the channels of the residual stream. Exact.")
@click.option(
    "--merge-tokens",
    "merging",
    multiple=True,
    type=MergeStep(),
    metavar="BLOCK:TOKENS",
    help="Merge similar tokens behind a block's attention until TOKENS are left. Not exact. Repeatable.",
)
@click.option(
    "--align-rows",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Compute ROWS rows in the blocks, more than there are tokens, where kernels are faster so. Exact.",
)
@click.option("--image-size", type=ImageSize(), help="Where the graph leaves it open: 384, or 256x320 (HxW).")
@output_options
def command(
    console: Console,
    graph: Path,
    output: Path,
    without: tuple[str, ...],
    qkv: str,
    rotate_residual: bool,
    merging: tuple[tuple[int, int], ...],
    align_rows: int | None,
    image_size: tuple[int, int] | None,
) -> None:
    """Apply exact rewrites to a float graph and compare the result with the graph before.

    GRAPH is a folder made by `vitdeploy export`, or an .onnx file of any exporter. The graph is first brought into
    canonical form (LayerNorm and GELU as single nodes, linears as MatMul and Add, shapes as constants). --merge-tokens
    applies after the comparison.
    """
    if len(dict(merging)) < len(merging):
        raise click.UsageError("--merge-tokens names a block twice")
    from vitdeploy.api.graph import optimize

    made = optimize(
        graph,
        output,
        without=without,
        qkv=qkv,  # type: ignore[arg-type]
        rotate_residual=rotate_residual,
        merge_tokens=dict(merging),
        align_rows=align_rows,
        image_size=image_size,
        progress=console,
    )
    then = command_line("vitdeploy", "quantize", output, "--data", "DIR", "--target", "openvino-cpu", "-o", "DIR")
    console.finish(dict(made.document), made.text, output, then)
