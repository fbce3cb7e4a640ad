"""`vitdeploy export MODEL --checkpoint F -o DIR`: a model to ONNX."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from vitdeploy.cli.console import Console, output_options


@click.command("export")
@click.argument("source")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="Weights: .safetensors, or .pt/.pth with plain weights."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option("--opset", type=click.Choice(["18", "19", "20"]), help="Default: 20, or the recipe's.")
@click.option("--batch", help="A fixed batch, or dynamic. Default: dynamic, or the recipe's.")
@click.option("--no-preprocess", is_flag=True, help="Take normalised float NCHW instead of uint8 NHWC images.")
@output_options
def command(
    console: Console,
    source: str,
    checkpoint: Path | None,
    output: Path,
    opset: str | None,
    batch: str | None,
    no_preprocess: bool,
) -> None:
    """A model to ONNX, compared with PyTorch at three batch sizes.

    SOURCE is a built-in architecture such as vit_base_patch16_224 (spelled out: vit_w192d4h3_patch4_32), with the
    preprocessing of timm's augreg checkpoints; or a recipe (.yaml), whose source, preprocess and export are taken.
    Without a checkpoint the weights are seeded random numbers.
    """
    from vitdeploy.pipeline.stages import MODEL_FILE, OUTPUT_NAMES, ExportConfig, export
    from vitdeploy.store.publish import replacing

    config = ExportConfig(source, source, None, 20, None, True)
    if source.endswith((".yaml", ".yml")):
        from vitdeploy.pipeline.recipe import load_recipe

        recipe = load_recipe(Path(source))
        config = recipe.to_export()
        checkpoint = checkpoint or (Path(recipe.source.checkpoint) if recipe.source.checkpoint else None)
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and int(batch) > 0):
        raise click.BadParameter("wanted a number above 0, or dynamic", param_hint="--batch")
    config = dataclasses.replace(
        config,
        opset=int(opset) if opset else config.opset,
        batch=config.batch if batch is None else None if batch == "dynamic" else int(batch),
        in_graph=config.in_graph and not no_preprocess,
    )
    if checkpoint is None:
        console.note("no checkpoint given: the weights are seeded random numbers")
    with console, replacing(output, OUTPUT_NAMES) as work:
        facts = export(config, checkpoint, work, console.progress)
    worst = max(row["max_relative_difference"] for row in facts["parity"])
    batches = ", ".join(str(row["batch"]) for row in facts["parity"])
    lines = [
        f"{config.model}: {facts['model']['parameters']:,} parameters, {facts['model']['classes']} classes, "
        f"opset {facts['opset']}, IR {facts['ir_version']}",
        f"largest difference from PyTorch (max|a-b| / max|b|) at batch {batches}: {worst:.1e}",
    ]
    console.finish(
        {**facts, "path": str(output / MODEL_FILE), "largest_difference": worst},
        lines,
        output,
        f"vitdeploy quantize {output} --data DIR --target openvino-cpu -o DIR",
    )
