"""`vitdeploy export MODEL --checkpoint F -o DIR`: a model to ONNX; `vitdeploy export list`: the built-in ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.api.values import Column, Line, Table, human_bytes
from vitdeploy.cli.complete import complete_models
from vitdeploy.cli.options import MODEL_NAMES as NAMES
from vitdeploy.cli.options import Console, command_line, output_options, source_options, to_source
from vitdeploy.paths import is_file
from vitdeploy.progress import Progress
from vitdeploy.spec import MAX_BATCH

if TYPE_CHECKING:
    from vitdeploy.api.model import Model
    from vitdeploy.stages.batches import Asked
    from vitdeploy.stages.export import ExportConfig


NOT_WEIGHTS = ("image_size", "task", "bind")


@click.command("export")
@click.argument("source", nargs=-1, shell_complete=complete_models)
@source_options(several_sizes=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder for model.onnx.")
@click.option("--labels", type=click.Path(path_type=Path), help="Class names, one a line.")
@click.option("--opset", type=click.Choice(["18", "19", "20"]), help="Default: 20, or the recipe's.")
@click.option("--batch", help="A fixed batch, or dynamic. Default: an ONNX file's own, the recipe's, else dynamic.")
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
    """Export a model to ONNX and compare it with the original at three batch sizes.

    SOURCE is a built-in architecture such as vit_base_patch16_224 (`vitdeploy export list [WORD]` prints them, or those
    with WORD in their names); timm:NAME or hf:FOLDER_OR_REPOSITORY; an .onnx file, or a folder that this command made;
    or a recipe (.yaml), of which source, preprocess and export apply. With --checkpoint alone, the architecture is
    recognised from the weights. A built-in name without a checkpoint gets seeded random weights.
    """
    if source[:1] == ("list",):
        _list(console, source[1:])
        return
    if len(source) > 1:
        raise click.UsageError(f"one model at a time; found {', '.join(source)}")
    _check_options(source[0] if source else "", options)
    if output is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and 0 < int(batch) <= MAX_BATCH):
        raise click.BadParameter(f"wanted a number from 1 to {MAX_BATCH:,}, or dynamic", param_hint="--batch")
    from vitdeploy.api.values import home_of
    from vitdeploy.stages.step import OUTPUT_NAMES

    home = home_of(output, "graph", OUTPUT_NAMES)
    _check_early(source[0] if source else None, options, labels)

    from vitdeploy.api.graph import export_sizes

    changes = {"opset": int(opset) if opset else None, "batch": batch, "in_graph": False if no_preprocess else None}
    wanted = _wanted(source[0] if source else None, options, labels, changes, console.progress)
    with console:
        made = export_sizes(wanted, home, console)
    console.finish(dict(made.document), made.text, output, command_line("vitdeploy", "optimize", output, "-o", "DIR"))


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Options that would have no effect are refused: weights that are not used must not go unnoticed."""
    if options["function"] and options["heads"]:
        raise click.UsageError("--heads says nothing of your own module")
    if name.endswith((".yaml", ".yml")):
        return
    if name and options["function"]:
        raise click.UsageError(f"two models are named: {name}, and --model {options['function']}")
    useless = [f"--{key.replace('_', '-')}" for key in NAMES if options[key] and key not in NOT_WEIGHTS]
    if (name.endswith(".onnx") or is_file(Path(name) / "model.onnx")) and useless:
        raise click.UsageError(f"an .onnx file has its own weights; leave out {', '.join(useless)}")


def _check_early(name: str | None, options: dict[str, Any], labels: Path | None) -> None:
    """Check names and paths before PyTorch is imported."""
    from vitdeploy.pipeline.early import check_data, check_model

    if options["normal"]:
        check_data(options["normal"])
    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.recipe.load import load_recipe

        source = load_recipe(Path(name), (), options["function"]).source
        check_model(source.model, options["checkpoint"] or source.checkpoint, labels or source.labels)
        return
    check_model(name, options["checkpoint"], labels)


def _wanted(
    name: str | None, options: dict[str, Any], labels: Path | None, changes: dict[str, Any], progress: Progress
) -> list[tuple[Callable[[], Model], Asked, ExportConfig]]:
    """What to export and how, one per size."""
    from vitdeploy.api.graph import graph_name
    from vitdeploy.api.model import read_model
    from vitdeploy.stages.export import ExportConfig
    from vitdeploy.stages.reference_model import Overrides

    sizes = dict.fromkeys(options.pop("image_size"))
    batch = changes.pop("batch")
    changed = {key: value for key, value in changes.items() if value is not None}
    asked: Asked | None = int(batch) if batch is not None and batch.isdecimal() else batch
    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.pipeline.job import at_size, at_sizes, export_config_of, overrides_of, source_of
        from vitdeploy.recipe.load import load_recipe

        recipe = load_recipe(Path(name), (), options["function"])
        given = to_source(None, {**options, "image_size": None})
        said = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if getattr(given, f.name)}
        wanted: list[tuple[Callable[[], Model], Asked, ExportConfig]] = []
        for each in tuple(at_size(recipe, size) for size in sizes) or at_sizes(recipe):
            overrides = overrides_of(each)
            overrides = dataclasses.replace(overrides, labels=labels or overrides.labels)
            config = dataclasses.replace(export_config_of(each), **changed)
            source = dataclasses.replace(source_of(each), **said)
            wanted.append(
                (functools.partial(read_model, source, overrides, progress), asked or each.export.batch, config)
            )
        return wanted
    sources = [to_source(name, {**options, "image_size": size}) for size in sizes or (None,)]
    config = dataclasses.replace(ExportConfig(graph_name(sources[0].name), 20, None, True), **changed)
    overrides = Overrides(labels=labels)
    return [(functools.partial(read_model, source, overrides, progress), asked or "auto", config) for source in sources]


def _list(console: Console, patterns: tuple[str, ...]) -> None:
    from vitdeploy.models.catalog import entries

    if len(patterns) > 1:
        raise click.UsageError("one pattern at a time, in quotes: vitdeploy export list 'swin*'")
    pattern = patterns[0] if patterns else "*"
    # A word without wildcards is what a name contains: `export list swin`.
    rows = list(entries(pattern if set(pattern) & set("*?[") else f"*{pattern.lower()}*"))
    columns = (
        Column("name"),
        Column("task", 90, left=True, least=14),
        Column("parameters", 60),
        Column("weights", 80, least=8),
        Column("input", 70, left=True),
    )
    cells = [
        (
            row.name,
            row.task,
            f"{row.parameters:,}",
            human_bytes(4 * row.parameters),
            f"{row.image_size[0]}x{row.image_size[1]}" if row.task != "sequence" else "tokens",
        )
        for row in rows
    ]
    lines: list[Line] = [Table(columns, tuple(cells))]
    if not rows:
        lines = [f"no built-in name matches {pattern!r}; `vitdeploy export list` shows all"]
    console.note(
        "not built in: hf:FOLDER and timm:NAME are exported from their libraries, an .onnx file is taken as it is"
    )
    console.finish({"models": [dataclasses.asdict(row) for row in rows]}, lines, None)
