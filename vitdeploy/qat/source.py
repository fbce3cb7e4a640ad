"""The placed graph that a user names: a graph, its folder or file, or a bundle with its engines."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from vitdeploy.api.bundle import Bundle
from vitdeploy.api.deploy import Deployment
from vitdeploy.api.graph import Graph, graph_file
from vitdeploy.bundle.read import is_bundle, read_bundle
from vitdeploy.errors import GraphError, InputError

Graphs: TypeAlias = Graph | Bundle | Deployment | str | Path


def placed_file(graph: Graphs, target: str | None) -> Path:
    """The ONNX file of a placement.

    Raises:
        GraphError: a bundle has no engine in INT8, or none for `target`. MissingFileError, ManifestError: of the path.
        InputError: a target beside a graph, which has one.
    """
    folder = graph.folder if isinstance(graph, Graph | Bundle | Deployment) else Path(graph)
    if not is_bundle(folder):
        if target is not None:
            raise InputError("a graph has one target", found=f"target {target}", fix="leave the target out")
        return graph_file(graph if isinstance(graph, Graph) else folder)
    engines = read_bundle(folder).engines
    fits = [each for each in engines if each.precision in ("int8", "mixed") and target in (None, each.target)]
    if not fits:
        raise GraphError(
            f"{folder} has no engine in INT8{f' for {target}' if target else ''}",
            found=", ".join(each.artifact for each in engines),
            fix="vitdeploy quantize GRAPH --data IMAGES --target TARGET -o DIR",
        )
    return folder / fits[0].graph
