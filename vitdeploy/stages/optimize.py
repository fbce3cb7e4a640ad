"""Rewrites of the float graph: the exact ones, compared with the graph before; then tokens are merged where asked."""

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
    """Writes every graph rewritten, and optimize.json: what was changed how often, and the difference.

    The difference is that of the exact rewrites; `unproven` names the outputs of which it proves nothing. What merging
    tokens costs is not in it: `verify` measures that.

    The files may be of any exporter, unless they are `stored`, and are called by their names here. `image_size` is
    (height, width), for a file that leaves it open.

    Raises:
        UnsafeGraphError, GraphError, MissingFileError: a file is refused, as `admit` says; or its tokens cannot be
            merged as asked.
        ExportError: a rewritten graph is not the same function.
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
                    f"{file} does not run at every batch size, though its batch is open",
                    found=error.found,
                    fix=f"vitdeploy export {quoted(file)} -o DIR takes it at the batch that it has; then optimize DIR",
                ) from None
            raise GraphError(
                f"{file} does not run on images of {image_size[0]}x{image_size[1]}",
                found=error.found,
                fix="--image-size with the size that it was exported at",
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
    """The rewritten graphs of the job's export."""

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        optimize(step.graphs_in(folders[step.EXPORT].path), options, out, progress, stored=True)

    packages = step.package_versions(("onnx", "onnxscript", "onnx-ir", "onnxruntime", "numpy"))
    return step.Step(name, "optimize", write, asdict(options), (step.EXPORT,), packages=packages)
