"""`vitdeploy export MODEL --checkpoint F -o DIR`: a model to ONNX; `vitdeploy export list`: the built-in ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from vitdeploy.cli.console import Console, human_bytes, output_options
from vitdeploy.cli.sources import source_options, to_source


@click.command("export")
@click.argument("source", nargs=-1)
@source_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option("--labels", type=click.Path(path_type=Path), help="Class names, one a line.")
@click.option("--opset", type=click.Choice(["18", "19", "20"]), help="Default: 20, or the recipe's.")
@click.option("--batch", help="A fixed batch, or dynamic. Default: dynamic, or the recipe's.")
@click.option("--no-preprocess", is_flag=True, help="Take normalised float NCHW instead of uint8 NHWC images.")
@output_options
def command(
    console: Console,
    source: tuple[str, ...],
    output: Path | None,
    labels: Path | None,
    opset: str | None,
    batch: str | None,
    no_preprocess: bool,
    **options: Any,
) -> None:
    """A model to ONNX, compared with the original at three batch sizes.

    SOURCE is a built-in architecture such as vit_base_patch16_224 (`vitdeploy export list [PATTERN]` prints them);
    timm:NAME or hf:FOLDER_OR_REPOSITORY; an .onnx file; or a recipe (.yaml), whose source, preprocess and export are
    taken. With --checkpoint alone the architecture is recognised by the weights. A built-in name without a checkpoint
    has seeded random weights.
    """
    if source[:1] == ("list",):
        _list(console, source[1:])
        return
    if len(source) > 1:
        raise click.UsageError(f"one model at a time; found {', '.join(source)}")
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and int(batch) > 0):
        raise click.BadParameter("wanted a number above 0, or dynamic", param_hint="--batch")
    from vitdeploy.pipeline.origin import Overrides, find_origin
    from vitdeploy.pipeline.stages.export import ExportConfig, export
    from vitdeploy.pipeline.stages.files import OUTPUT_NAMES
    from vitdeploy.store.publish import replacing

    name = source[0] if source else None
    overrides = Overrides(labels=labels)
    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.pipeline.recipe import load_recipe

        recipe = load_recipe(Path(name))
        given = to_source(None, options)
        changed = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if getattr(given, f.name)}
        described = dataclasses.replace(recipe.to_source(), **changed)
        overrides, config = recipe.to_overrides(), recipe.to_export()
        overrides = dataclasses.replace(overrides, labels=labels or overrides.labels)
    else:
        described = to_source(name, options)
        config = ExportConfig(_graph_name(described.name), 20, None, True)
    config = dataclasses.replace(
        config,
        opset=int(opset) if opset else config.opset,
        batch=config.batch if batch is None else None if batch == "dynamic" else int(batch),
        in_graph=config.in_graph and not no_preprocess,
    )
    with console, replacing(output, OUTPUT_NAMES) as work:
        origin = find_origin(described, overrides)
        for note in origin.notes:
            console.note(note)
        facts = export(origin, config, work, console.progress)
    worst = max(row["max_relative_difference"] for row in facts["parity"])
    batches = ", ".join(str(row["batch"]) for row in facts["parity"])
    model = facts["model"]
    classes = f"{model['classes']} classes, " if model["classes"] else ""
    lines = [
        f"{model['source']}: {model['task']}, {model['parameters']:,} parameters, {classes}opset {facts['opset']}, "
        f"IR {facts['ir_version']}",
        *_input_lines(origin),
        f"largest difference from the original (max|a-b| / max|b|) at batch {batches}: {worst:.1e}",
    ]
    document = {**facts, "path": str(output), "largest_difference": worst}
    console.finish(document, lines, output, f"vitdeploy optimize {output} -o DIR")


def _graph_name(name: str) -> str:
    """What the user typed, fit to name a graph."""
    stem = Path(name.partition(":")[2] or name).name
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).strip("._-")
    return kept[:64] or "model"


def _input_lines(origin: Any) -> list[str]:
    if origin.preprocess is None:
        return []
    spec = origin.preprocess
    if isinstance(spec.resize, int):
        resize = f"resize to short side {spec.resize}"
    else:
        resize = f"{'cover' if spec.fit == 'cover' else 'resize to'} {spec.resize[0]}x{spec.resize[1]}"
    return [
        f"images: {resize} ({spec.interpolation}), crop {spec.crop[0]}x{spec.crop[1]}, "
        f"mean {_numbers(spec.mean)}, std {_numbers(spec.std)}"
    ]


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in (values[:1] if len(set(values)) == 1 else values))


def _list(console: Console, patterns: tuple[str, ...]) -> None:
    from vitdeploy.models.catalog import entries

    if len(patterns) > 1:
        raise click.UsageError("one pattern at a time, in quotes: vitdeploy export list 'swin*'")
    rows = list(entries(patterns[0] if patterns else "*"))
    width = max((len(row.name) for row in rows), default=4) + 2
    lines = [f"{'name':<{width}}{'task':<16}{'parameters':>14}{'weights':>10}  input"] if rows else []
    for row in rows:
        size = f"{row.image_size[0]}x{row.image_size[1]}" if row.task != "sequence" else "tokens"
        weights = human_bytes(4 * row.parameters)
        lines.append(f"{row.name:<{width}}{row.task:<16}{row.parameters:>14,}{weights:>10}  {size}")
    if not rows:
        lines.append(f"no built-in name matches {patterns[0]!r}; `vitdeploy export list` shows all")
    console.finish({"models": [dataclasses.asdict(row) for row in rows]}, lines, None)
