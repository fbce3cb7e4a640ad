"""Exact rewrites of the float graph, compared with the graph before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitdeploy.export.parity import compare_graphs
from vitdeploy.graph.admit import admit
from vitdeploy.graph.io import save_graph
from vitdeploy.graph.normalise import normalise
from vitdeploy.graph.optimize import OptimizeOptions
from vitdeploy.graph.optimize import optimize as rewrite
from vitdeploy.pipeline.progress import Progress, silent
from vitdeploy.pipeline.stages.files import copy_labels, write_json


def optimize(
    graphs: Mapping[str, Path], options: OptimizeOptions, out: Path, progress: Progress = silent
) -> dict[str, Any]:
    """Writes every graph rewritten, and optimize.json: what was changed how often, and the difference.

    The files may be of any exporter.

    Raises:
        UnsafeGraphError, GraphError, MissingFileError: a file is refused, as `admit` says.
        ExportError: a rewritten graph is not the same function.
    """
    facts: dict[str, Any] = {"rewrites": {}, "difference": {}, "nodes": {}}
    for done, (name, file) in enumerate(graphs.items()):
        progress("optimize", done, len(graphs))
        model = admit(file)
        before = len(model.graph)
        counts = {**normalise(model).passes, **rewrite(model, options)}
        save_graph(model, out / file.name)
        facts["rewrites"][name] = counts
        facts["nodes"][name] = [before, len(model.graph)]
        facts["difference"][name] = compare_graphs(file, out / file.name)
    progress("optimize", len(graphs), len(graphs))
    copy_labels(next(iter(graphs.values())).parent, out)
    write_json(out / "optimize.json", facts)
    return facts
