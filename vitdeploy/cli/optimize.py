"""`vitdeploy optimize DIR_OR_ONNX -o DIR`: exact rewrites of a float graph."""

from __future__ import annotations

from pathlib import Path

import click

from vitdeploy.cli.console import Console, output_options
from vitdeploy.cli.sources import ImageSize

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
@click.option("--image-size", type=ImageSize(), help="Where the graph leaves it open: 384, or 256x320 (HxW).")
@output_options
def command(
    console: Console,
    graph: Path,
    output: Path,
    without: tuple[str, ...],
    qkv: str,
    image_size: tuple[int, int] | None,
) -> None:
    """Exact rewrites of a float graph; the result is compared with the graph before.

    GRAPH is a folder made by `vitdeploy export`, or any .onnx file, of whatever exporter: it is brought into one form
    first (LayerNorm and GELU as single nodes, linears as MatMul and Add, shapes as constants).
    """
    from vitdeploy.graph.optimize import OptimizeOptions
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES, SEQUENCE_PARTS, graphs_in, is_ours
    from vitdeploy.pipeline.stages.optimize import optimize
    from vitdeploy.pipeline.subjects import find_graph
    from vitdeploy.store.publish import replacing

    file = find_graph(graph)
    graphs = graphs_in(graph) if graph.is_dir() else {file.stem if file.stem in SEQUENCE_PARTS else "model": file}
    options = OptimizeOptions(**{name: name not in without for name in REWRITES}, qkv=qkv)  # type: ignore[arg-type]
    with console, replacing(output, OUTPUT_NAMES) as work:
        facts = optimize(graphs, options, work, console.progress, image_size)
    lines = []
    for name, counts in facts["rewrites"].items():
        before, after = facts["nodes"][name]
        changed = [f"{count} x {rewrite}" for rewrite, count in counts.items() if count]
        lines.append(f"{name}: {before} nodes -> {after}; {', '.join(changed) or 'nothing to rewrite'}")
        lines.append(f"{name}: largest difference (max|a-b| / max|b|) {facts['difference'][name]:.1e}")
    then = f"vitdeploy quantize {output} --data DIR --target openvino-cpu -o DIR"
    if not is_ours(file):  # it does not say yet how its images are prepared
        then = f"vitdeploy export {output / 'model.onnx'} -o DIR"
    console.finish(facts, lines, output, then)
