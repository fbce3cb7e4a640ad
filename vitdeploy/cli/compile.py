"""`vitdeploy compile DIR_OR_ONNX --target T -o DIR`: an engine for one target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.build_options import build_options, to_build
from vitdeploy.cli.console import Console, output_options


@click.command("compile")
@click.argument("graph", type=click.Path(path_type=Path))
@click.option("--target", required=True, help="As `vitdeploy doctor` lists them: openvino-cpu, tensorrt ...")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for the engine.")
@click.option("--batch", type=click.IntRange(min=1), help="The batch to compile at. Default: the graph's own, or 1.")
@click.option(
    "--precision",
    type=click.Choice(["fp32", "fp16", "bf16"]),
    help="For a float graph. Default: fp32, or what the graph was placed for.",
)
@build_options
@output_options
def command(
    console: Console,
    graph: Path,
    target: str,
    output: Path,
    batch: int | None,
    precision: str | None,
    **options: Any,
) -> None:
    """A graph to an engine for one target.

    GRAPH is a folder made by `vitdeploy export` or `vitdeploy quantize`, or its model.onnx. The output can be loaded by
    `vitdeploy.runtime.load` and by predict, verify and bench.
    """
    from vitdeploy.pipeline.job import require_runtime
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES
    from vitdeploy.pipeline.stages.quantize import check_precision
    from vitdeploy.pipeline.subjects import compile_bundle, find_graph
    from vitdeploy.store.publish import replacing

    build = to_build(target, options)
    check_precision(target, precision or "fp32")
    require_runtime(target)
    file = find_graph(graph)
    with console, replacing(output, OUTPUT_NAMES) as work:
        console.progress(f"compile for {target}", 0, 1)
        manifest = compile_bundle(file, target, batch, precision, work, console.progress, build)
        console.progress(f"compile for {target}", 1, 1)
    engine = manifest.engines[0]
    kernels = ", ".join(f"{count} in {kind}" for kind, count in engine.kernels.items())
    kernels = kernels or "as the graph is typed (this provider does not show its kernels)"
    lines = [f"{engine.artifact} on {engine.provider}, batch {engine.batch}: linears and convolutions {kernels}"]
    document = {
        "artifact": engine.artifact,
        "target": engine.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "batch": engine.batch,
        "kernels": engine.kernels,
        "path": str(output),
    }
    console.finish(document, lines, output, f"vitdeploy predict {output} IMAGE")
