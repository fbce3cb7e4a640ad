"""`vitdeploy export MODEL --checkpoint F -o DIR`: a model to ONNX; `vitdeploy export list`: the built-in ones."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitdeploy.cli.complete import complete_models
from vitdeploy.cli.console import Console, command_line, human_bytes, output_options
from vitdeploy.cli.sources import NAMES, source_options, to_source
from vitdeploy.cli.table import Column, Line, Table

if TYPE_CHECKING:
    from vitdeploy.models.source import Source
    from vitdeploy.stages.batches import Asked
    from vitdeploy.stages.export import ExportConfig
    from vitdeploy.stages.reference_model import Overrides, ReferenceModel


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
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and int(batch) > 0):
        raise click.BadParameter("wanted a number above 0, or dynamic", param_hint="--batch")
    from vitdeploy.bundle.read import SIZES_FOLDER
    from vitdeploy.publish import check_replaceable, replacing
    from vitdeploy.stages.files import OUTPUT_NAMES

    check_replaceable(output, OUTPUT_NAMES)
    _check_early(source[0] if source else None, options, labels)

    from vitdeploy.stages.batches import settle_batch
    from vitdeploy.stages.export import export
    from vitdeploy.stages.reference_model import find_reference_model

    changes = {"opset": int(opset) if opset else None, "batch": batch, "in_graph": False if no_preprocess else None}
    found: list[tuple[ReferenceModel, dict[str, Any]]] = []
    with console, replacing(output, OUTPUT_NAMES) as work:
        for described, overrides, asked, config in _wanted(source[0] if source else None, options, labels, changes):
            console.progress("read the model", 0, 1)
            reference_model, fixed = settle_batch(find_reference_model(described, overrides), asked)
            config = dataclasses.replace(config, batch=fixed)
            for note in reference_model.notes:
                console.note(note)
            folder = work / SIZES_FOLDER / reference_model.size if found else work
            folder.mkdir(parents=True, exist_ok=True)
            found.append((reference_model, export(reference_model, config, folder, console.progress)))
    lines = [line for reference_model, facts in found for line in _lines(reference_model, facts)]
    lines += [
        f"image size {reference_model.size}: {output / SIZES_FOLDER / reference_model.size}"
        for reference_model, _ in found[1:]
    ]
    sizes = {reference_model.size: facts for reference_model, facts in found}
    document = {**found[0][1], "path": str(output), "largest_difference": max(map(_worst, sizes.values()))}
    if len(found) > 1:
        document["sizes"] = sizes
    console.finish(document, lines, output, command_line("vitdeploy", "optimize", output, "-o", "DIR"))


def _check_options(name: str, options: dict[str, Any]) -> None:
    """Options that would have no effect are refused: weights that are not used must not go unnoticed."""
    if options["function"] and options["heads"]:
        raise click.UsageError("--heads says nothing of your own module")
    if name.endswith((".yaml", ".yml")):
        return
    if name and options["function"]:
        raise click.UsageError(f"two models are named: {name}, and --model {options['function']}")
    useless = [f"--{key.replace('_', '-')}" for key in NAMES if options[key] and key != "image_size"]
    if (name.endswith(".onnx") or (Path(name) / "model.onnx").is_file()) and useless:
        raise click.UsageError(f"an .onnx file has its own weights; leave out {', '.join(useless)}")


def _check_early(name: str | None, options: dict[str, Any], labels: Path | None) -> None:
    """What is wrong with names and paths, before PyTorch is imported."""
    from vitdeploy.pipeline.early import check_model

    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.recipe.load import load_recipe

        source = load_recipe(Path(name), (), options["function"]).source
        check_model(source.model, options["checkpoint"] or source.checkpoint, labels or source.labels)
        return
    check_model(name, options["checkpoint"], labels)


def _wanted(
    name: str | None, options: dict[str, Any], labels: Path | None, changes: dict[str, Any]
) -> list[tuple[Source, Overrides, Asked, ExportConfig]]:
    """What to export and how, one a size."""
    from vitdeploy.stages.export import ExportConfig
    from vitdeploy.stages.reference_model import Overrides

    sizes = dict.fromkeys(options.pop("image_size"))
    batch = changes.pop("batch")
    changed = {key: value for key, value in changes.items() if value is not None}
    asked: Asked | None = int(batch) if batch is not None and batch.isdecimal() else batch
    if name is not None and name.endswith((".yaml", ".yml")):
        from vitdeploy.pipeline.resolve import at_size, at_sizes, export_config_of, overrides_of, source_of
        from vitdeploy.recipe.load import load_recipe

        recipe = load_recipe(Path(name), (), options["function"])
        given = to_source(None, {**options, "image_size": None})
        said = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if getattr(given, f.name)}
        wanted = []
        for each in tuple(at_size(recipe, size) for size in sizes) or at_sizes(recipe):
            overrides = overrides_of(each)
            overrides = dataclasses.replace(overrides, labels=labels or overrides.labels)
            config = dataclasses.replace(export_config_of(each), **changed)
            source = dataclasses.replace(source_of(each), **said)
            wanted.append((source, overrides, asked or each.export.batch, config))
        return wanted
    sources = [to_source(name, {**options, "image_size": size}) for size in sizes or (None,)]
    config = dataclasses.replace(ExportConfig(_graph_name(sources[0].name), 20, None, True), **changed)
    return [(source, Overrides(labels=labels), asked or "auto", config) for source in sources]


def _worst(facts: dict[str, Any]) -> float:
    return float(max(row["max_relative_difference"] for row in facts["parity"]))


def _lines(reference_model: ReferenceModel, facts: dict[str, Any]) -> list[str]:
    batches = ", ".join(str(row["batch"]) for row in facts["parity"])
    model = facts["model"]
    classes = f"{model['classes']} classes, " if model["classes"] else ""
    return [
        f"{model['source']}: {model['task']}, {model['parameters']:,} parameters, {classes}opset {facts['opset']}, "
        f"IR {facts['ir_version']}",
        *_input_lines(reference_model),
        *(
            [f"labels: {textwrap.shorten('; '.join(reference_model.labels), 100, placeholder=' ...')}"]
            if reference_model.labels
            else []
        ),
        f"largest difference from the original (max|a-b| / max|b|) at batch {batches}: {_worst(facts):.1e}",
    ]


def _graph_name(name: str) -> str:
    """What the user typed, fit to name a graph."""
    stem = Path(name.partition(":")[2] or name).name
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).strip("._-")
    return kept[:64] or "model"


def _input_lines(reference_model: Any) -> list[str]:
    if reference_model.preprocess is None:
        return []
    spec = reference_model.preprocess
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
    console.finish({"models": [dataclasses.asdict(row) for row in rows]}, lines, None)
