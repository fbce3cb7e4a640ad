"""`vitdeploy export MODEL --checkpoint F -o DIR`: a model to ONNX; `vitdeploy export list`: the built-in ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from vitdeploy.api.options import ExportOptions, SourceOptions
from vitdeploy.api.values import Column, Line, Table, human_bytes
from vitdeploy.cli.options import Console, api, command_line, command_of
from vitdeploy.paths import is_file
from vitdeploy.spec import MAX_BATCH

NOT_WEIGHTS = ("image_size", "task", "bind")


@command_of(ExportOptions)
def command(console: Console, options: ExportOptions) -> None:
    """Export a model to ONNX and compare it with the original at three batch sizes.

    SOURCE is a built-in architecture such as vit_base_patch16_224 (`vitdeploy export list [WORD]` prints them, or those
    with WORD in their names); timm:NAME or hf:FOLDER_OR_REPOSITORY; an .onnx file, or a folder that this command made;
    or a recipe (.yaml), of which source, preprocess and export apply. With --checkpoint alone, the architecture is
    recognised from the weights. A built-in name without a checkpoint gets seeded random weights.
    """
    source, folder, batch = options.source, options.folder, options.batch
    if source[:1] == ("list",):
        _list(console, source[1:])
        return
    if len(source) > 1:
        raise click.UsageError(f"one model at a time; found {', '.join(source)}")
    name = source[0] if source else None
    _check_options(name or "", options)
    if folder is None:
        raise click.UsageError("Missing option '-o' / '--output'.")
    if batch is not None and batch != "dynamic" and not (batch.isdecimal() and 0 < int(batch) <= MAX_BATCH):
        raise click.BadParameter(f"wanted a number from 1 to {MAX_BATCH:,}, or dynamic", param_hint="--batch")
    api("calls").check_export(name, options)
    made = api("graph").export_of(name, options, console)
    console.finish(dict(made.document), made.text, folder, command_line("vitdeploy", "optimize", folder, "-o", "DIR"))


def _check_options(name: str, options: ExportOptions) -> None:
    """Options that would have no effect are refused: weights that are not used must not go unnoticed."""
    if options.function and options.heads:
        raise click.UsageError("--heads says nothing of your own module")
    if name.endswith((".yaml", ".yml")):
        return
    if name and options.function:
        raise click.UsageError(f"two models are named: {name}, and --model {options.function}")
    names = [each.name for each in dataclasses.fields(SourceOptions) if each.name not in NOT_WEIGHTS]
    useless = [f"--{key.replace('_', '-')}" for key in names if getattr(options, key)]
    if (name.endswith(".onnx") or is_file(Path(name) / "model.onnx")) and useless:
        raise click.UsageError(f"an .onnx file has its own weights; leave out {', '.join(useless)}")


def _list(console: Console, patterns: Sequence[str]) -> None:
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
