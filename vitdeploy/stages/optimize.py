"""Rewrites of the float graph: exact rewrites, checked against the original graph, and optional token merging."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vitdeploy.errors import EngineError, GraphError, quoted
from vitdeploy.exporter.parity import compare_graphs
from vitdeploy.graph.canonical.normalise import normalise
from vitdeploy.graph.io import files, inputs
from vitdeploy.graph.io.admit import admit
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.graph.passes.optimize import optimize as rewrite
from vitdeploy.graph.passes.tokens import merge_tokens
from vitdeploy.graph.values import weight_bytes
from vitdeploy.limits import bounded
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.inputs import require_image_alone
from vitdeploy.stages import step


def optimize(
    graphs: Mapping[str, Path],
    options: OptimizeOptions,
    out: Path,
    progress: Progress = silent,
    image_size: tuple[int, int] | None = None,
    stored: bool = False,
) -> dict[str, Any]:
    """Write every graph in its rewritten form, and optimize.json: the number of each rewrite, and the difference.

    The difference covers the exact rewrites only; `unproven` names the outputs for which it proves nothing. `verify`
    measures the cost of token merging.

    The files may come from any exporter, unless they are `stored`. `image_size` is (height, width), for a file with a
    dynamic size.

    Raises:
        UnsafeGraphError, GraphError, MissingFileError: `admit` refuses a file, or its tokens cannot be merged as
            requested.
        ExportError: a rewritten graph does not compute the same function.
    """
    facts: dict[str, Any] = {"rewrites": {}, "difference": {}, "nodes": {}}
    for done, (name, file) in enumerate(graphs.items()):
        progress("optimize", done, len(graphs))
        size = image_size if name == "model" else None
        model = files.load_graph(file, shapes=False) if stored else admit(file, size)
        if name == "model":
            inputs.set_image_size(model, image_size)
        before, made = len(model.graph), out / f"{name}.onnx"
        with bounded(f"rewrite {file.name}", weight_bytes(model)):
            counts = {**normalise(model), **rewrite(model, replace(options, token_merging=()))}
            files.save_graph(model, made)
        try:
            facts["difference"][name], unproven = compare_graphs(file, made)
            if unproven is not None:
                facts.setdefault("unproven", {})[name] = unproven
        except EngineError as error:
            if image_size is None:
                if step.is_ours(file):
                    raise
                raise GraphError(
                    f"{file} has a dynamic batch, but does not run at every batch size",
                    found=error.found,
                    fix=f"export it at a fixed batch size: vitdeploy export {quoted(file)} -o DIR; then optimize DIR",
                ) from None
            raise GraphError(
                f"{file} does not run on images of {image_size[0]}x{image_size[1]}",
                found=error.found,
                fix="set --image-size to the size that it was exported at",
            ) from None
        if options.token_merging:
            own = files.graph_spec(model, file.name).inputs
            require_image_alone(file.name, own[1:] if list(graphs) == ["model"] else (), "token merging")
            schedule = dict(options.token_merging)
            tokens = merge_tokens(model, schedule)[0]
            files.save_graph(model, made)
            facts.setdefault("token_merging", {})[name] = {"tokens": tokens, "remaining": schedule}
        facts["rewrites"][name] = counts
        facts["nodes"][name] = [before, len(model.graph)]
    progress("optimize", len(graphs), len(graphs))
    step.copy_labels(next(iter(graphs.values())).parent, out)
    step.write_json(out / "optimize.json", facts)
    return facts


def optimize_step(options: OptimizeOptions, name: str = step.OPTIMIZE) -> step.Step:
    """The step that rewrites the graphs of the job's export."""

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        optimize(step.graphs_in(folders[step.EXPORT].path), options, out, progress, stored=True)

    packages = step.package_versions(("onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy"))
    return step.Step(name, "optimize", write, asdict(options), (step.EXPORT,), packages=packages)
