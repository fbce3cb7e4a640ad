"""Describe the content of a bundle or an ONNX file."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.api.tables import human_bytes
from vitdeploy.bundle.read import is_bundle
from vitdeploy.spec import RESIZING, PreprocessSpec


def inspect(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The document and its lines for people; every digest of a bundle is checked. Errors of reading propagate."""
    return _bundle(path) if is_bundle(path) else _graph(path)


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
            f"preprocess: {_resize(pre)} {pre.interpolation}, crop {pre.crop[0]}x{pre.crop[1]}, {pre.normalisation}"
        )
    for engine in manifest.engines:
        size = sum(entry.bytes for entry in manifest.files if entry.path in engine.files)
        kernels = ", ".join(f"{count} {kind}" for kind, count in engine.kernels.items())
        lines.append(
            f"engine {engine.artifact}: {engine.provider}, batch {engine.batch}, {human_bytes(size)}, kernels {kernels}"
            + (f"; {engine.form_told}" if engine.form_told else "")
        )
    lines += [f"image size {size}: {path / SIZES_FOLDER / size}" for size in manifest.sizes]
    known = _known_bad({name: path / graph.file for name, graph in manifest.graphs.items()})
    return {**encode(manifest), "known_bad": known[0]}, [*lines, *known[1]]


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
    known = _known_bad({"model": file})
    return {**document, "known_bad": known[0]}, [*lines, *known[1]]


def _known_bad(graphs: Mapping[str, Path]) -> tuple[dict[str, Any], list[str]]:
    """The entries of the table of runtimes known to be wrong that graphs show, on any runtime: by graph, and as lines.
    A device install has no package that reads graphs; then a line says so."""
    from vitdeploy.api.doctor import known_bad

    try:
        from vitdeploy.graph.io.files import load_graph
        from vitdeploy.known_bad.find import matches
        from vitdeploy.known_bad.words import described, match_lines, releases
    except ModuleNotFoundError as error:
        return {}, [f"graphs are not compared with runtimes known to be wrong: {error.name} is not installed here"]
    document, lines = {}, []
    here = {name for entries in (known_bad() or {}).values() for name in entries}
    for name, file in graphs.items():
        found = matches(load_graph(file))
        document[name] = [{**described(match), "here": match.entry.id in here} for match in found]
        concern = [match for match in found if match.entry.id in here]
        others = [f"{match.entry.id} ({releases(match.entry)})" for match in found if match.entry.id not in here]
        if concern:
            lines.append(f"graph {name}: runtimes here that are known to compute it wrongly:")
            lines += [f"  {line}" for match in concern for line in match_lines(match)]
        if others:
            lines.append(
                f"graph {name}: right here; known to be wrong on other releases and devices: {', '.join(others)}"
            )
    return document, lines


def _over(tokens: list[int | None]) -> str:
    """The numbers of consecutive attentions over equally many tokens; token merging reduces the tokens."""
    runs = [(size, len(list(run))) for size, run in itertools.groupby(tokens)]
    return ", ".join(f"{count} over {'any number of' if size is None else size} tokens" for size, count in runs)


def _resize(spec: PreprocessSpec) -> str:
    if isinstance(spec.resize, int):
        return f"short side {spec.resize}"
    return f"{RESIZING[spec.fit]} {spec.resize[0]}x{spec.resize[1]}"
