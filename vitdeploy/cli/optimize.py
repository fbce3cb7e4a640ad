"""`vitdeploy optimize DIR_OR_ONNX -o DIR`: rewrites of a float graph, exact unless tokens are merged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, command_line, output_options
from vitdeploy.cli.sources import ImageSize


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


REWRITES = (
    "fold_layer_scale",
    "fold_attention_scale",
    "drop_key_bias",
    "fold_value_bias",
    "fold_image_normalisation",
    "class_token_only",
)


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
    from vitdeploy.publish import check_replaceable, replacing
    from vitdeploy.stages.files import OUTPUT_NAMES, SEQUENCE_PARTS, find_graph, graphs_in, is_ours

    if len(dict(merging)) < len(merging):
        raise click.UsageError("--merge-tokens names a block twice")
    file = find_graph(graph)
    check_replaceable(output, OUTPUT_NAMES)

    from vitdeploy.graph.optimize import OptimizeOptions
    from vitdeploy.stages.optimize import optimize

    graphs = graphs_in(graph) if graph.is_dir() else {file.stem if file.stem in SEQUENCE_PARTS else "model": file}
    options = OptimizeOptions(
        **{name: name not in without for name in REWRITES},
        qkv=qkv,  # type: ignore[arg-type]
        rotate_residual=rotate_residual,
        token_merging=tuple(sorted(merging)),
        align_rows=align_rows,
    )
    with console, replacing(output, OUTPUT_NAMES) as work:
        facts = optimize(graphs, options, work, console.progress, image_size)
    lines = []
    for name, counts in facts["rewrites"].items():
        before, after = facts["nodes"][name]
        changed = [f"{count} x {rewrite}" for rewrite, count in counts.items() if count]
        lines.append(f"{name}: {before} nodes -> {after}; {', '.join(changed) or 'nothing to rewrite'}")
        lines.append(f"{name}: largest difference (max|a-b| / max|b|) {facts['difference'][name]:.1e}")
        if merging:
            steps = [f"{tokens} behind block {block}" for block, tokens in sorted(merging)]
            lines.append(
                f"{name}: tokens merged after that, {facts['token_merging'][name]['tokens']} to {', '.join(steps)}; "
                "not exact: `vitdeploy verify` measures what it costs"
            )
    then = command_line("vitdeploy", "quantize", output, "--data", "DIR", "--target", "openvino-cpu", "-o", "DIR")
    if not is_ours(file):  # it does not say yet how its images are prepared
        then = command_line("vitdeploy", "export", output / "model.onnx", "-o", "DIR")
    console.finish(facts, lines, output, then)
