"""`vitdeploy inspect PATH`: what a bundle or an ONNX file holds."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from typing import Any

import click

from vitdeploy.api.tables import human_bytes
from vitdeploy.cli.bundle_options import trust_option
from vitdeploy.cli.complete import complete_targets
from vitdeploy.cli.console import Console, output_options
from vitdeploy.spec import PreprocessSpec


@click.command("inspect")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--target", shell_complete=complete_targets, help="Judge the graphs by what this target takes: tensorrt.")
@click.option("--target-version", help="The release to judge by: 10.3, 10.16 or 11.4. Default: all three.")
@click.option("--check", is_flag=True, help="Run every engine of a bundle on its golden inputs.")
@trust_option
@output_options
def command(
    console: Console, path: Path, target: str | None, target_version: str | None, check: bool, trust: Path | None
) -> None:
    """Show what a bundle or an ONNX file contains, and check every digest of a bundle.

    --target names what that target would refuse (exit 5), slow down or leave unfused, and the fix. --check runs every
    engine that works here on the bundle's golden inputs: exit 5 if its outputs differ from those of the build by more
    than the manifest's tolerance, or if its answers are not the original's.
    """
    from vitdeploy.bundle.read import is_bundle, is_packed, read_bundle

    if is_packed(path):
        read_bundle(path)  # which says how to unpack it
    if check and (target is not None or not is_bundle(path)):
        raise click.UsageError("--check runs the engines of a bundle: leave --target out.")
    if trust is not None and not check:
        raise click.UsageError("--trust goes with --check: nothing else of a bundle is run.")
    if target is not None:
        _lint(console, path, target, target_version)
        return
    if target_version is not None:
        raise click.UsageError("--target-version goes with --target tensorrt.")
    document, lines = _bundle(path) if is_bundle(path) else _graph(path)
    if check:
        _self_check(console, path, trust, document, lines)
        return
    console.finish(document, lines, None)


def _self_check(console: Console, path: Path, trust: Path | None, document: dict[str, Any], lines: list[str]) -> None:
    from vitdeploy.cli.self_check import check_bundle
    from vitdeploy.errors import GateError

    found, told, ok = check_bundle(path, trust)
    console.finish({**document, "check": found}, [*lines, *told], None)
    if not ok:
        raise GateError(
            "an engine does not give the golden answers",
            found=", ".join(each["engine"] for each in found if each["ok"] is False),
            wanted="what the engine gave when the bundle was made, within its tolerance, and the original's answers",
            fix="make the bundle on a machine like this one: other CPUs and runtimes have other kernels",
        )


def _lint(console: Console, path: Path, target: str, version: str | None) -> None:
    from vitdeploy.cli.findings import lint_graphs
    from vitdeploy.errors import GateError

    document, lines, findings = lint_graphs(path, target, version)
    console.finish(document, lines, None)
    errors = sorted({finding.rule for finding in findings if finding.severity == "error"})
    if errors:
        raise GateError(
            f"{target} would refuse {path}, or compute something else", found=", ".join(errors), fix="the fixes above"
        )


def _bundle(path: Path) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.bundle.read import SIZES_FOLDER, read_bundle, verify_files
    from vitdeploy.spec import encode

    manifest = read_bundle(path)
    verify_files(path, manifest)
    count = len(manifest.files)
    lines = [f"bundle {manifest.name}: {manifest.task}, format {manifest.format}, {count} files, all digests match"]
    for name, graph in manifest.graphs.items():
        lines.append(f"graph {name}: {'; '.join(map(str, graph.inputs))} -> {'; '.join(map(str, graph.outputs))}")
    pre = manifest.preprocess
    if pre is not None:
        lines.append(
            f"preprocess: {_resize(pre)} {pre.interpolation}, crop {pre.crop[0]}x{pre.crop[1]}, "
            f"mean {list(pre.mean)}, std {list(pre.std)}"
        )
    for engine in manifest.engines:
        size = sum(entry.bytes for entry in manifest.files if entry.path in engine.files)
        kernels = ", ".join(f"{count} {kind}" for kind, count in engine.kernels.items())
        lines.append(
            f"engine {engine.artifact}: {engine.provider}, batch {engine.batch}, {human_bytes(size)}, kernels {kernels}"
        )
    lines += [f"image size {size}: {path / SIZES_FOLDER / size}" for size in manifest.sizes]
    return encode(manifest), lines


def _graph(path: Path) -> tuple[dict[str, Any], list[str]]:
    from vitdeploy.stages.files import find_graph

    file = find_graph(path)

    from vitdeploy.graph.analysis.attention import find_attentions
    from vitdeploy.graph.analysis.linears import find_linears
    from vitdeploy.graph.io.files import METADATA_KEY, get_metadata, graph_spec, load_graph
    from vitdeploy.graph.values import dim
    from vitdeploy.spec import encode

    model = load_graph(file)
    spec = graph_spec(model, file.name)
    operators = collections.Counter(node.op_type for node in model.graph)
    layers = [linear.name for linear in find_linears(model)]
    tokens = [dim(each.softmax.outputs[0], -1) for each in find_attentions(model)]
    metadata = encode(get_metadata(model, str(file))) if METADATA_KEY in model.metadata_props else None
    opsets = {domain or "ai.onnx": version for domain, version in model.opset_imports.items()}
    lines = [
        f"{file}: opset {opsets['ai.onnx']}, IR {model.ir_version}, {human_bytes(file.stat().st_size)}, "
        f"{sum(operators.values())} nodes",
        f"{'; '.join(map(str, spec.inputs))} -> {'; '.join(map(str, spec.outputs))}",
        "operators: " + ", ".join(f"{count} {kind}" for kind, count in operators.most_common()),
        *([f"attention, {_over(tokens)}"] if tokens else []),
        f"float linears and convolutions: {len(layers)}" + "".join(f"\n  {name}" for name in layers),
    ]
    document = {
        "path": str(file),
        "opsets": opsets,
        "ir_version": model.ir_version,
        "bytes": file.stat().st_size,
        "graph": encode(spec),
        "operators": dict(operators),
        "attention_tokens": tokens,
        "float_layers": layers,
        "metadata": metadata,
    }
    return document, lines


def _over(tokens: list[int | None]) -> str:
    """How many attentions in a row are over how many tokens; fewer further on where tokens are merged."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(tokens)]
    return ", ".join(f"{count} over {'any number of' if size is None else size} tokens" for size, count in runs)


def _resize(spec: PreprocessSpec) -> str:
    if isinstance(spec.resize, int):
        return f"short side {spec.resize}"
    verb = "cover" if spec.fit == "cover" else "resize to"
    return f"{verb} {spec.resize[0]}x{spec.resize[1]}"
