"""Float graphs: a model exported to ONNX, and the exact rewrites of one."""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitdeploy.api.model import Model, ModelLike, labelled, model, preprocess_lines
from vitdeploy.api.values import Line, Reporter, Shown, filling, home_of, reporting
from vitdeploy.errors import InputError
from vitdeploy.spec import PreprocessSpec, Task

if TYPE_CHECKING:
    from vitdeploy.graph.io.files import GraphMetadata
    from vitdeploy.stages.batches import Asked
    from vitdeploy.stages.export import ExportConfig

REWRITES = (
    "fold_layer_scale",
    "fold_attention_scale",
    "drop_key_bias",
    "fold_value_bias",
    "fold_image_normalisation",
    "class_token_only",
)
Opset = Literal[18, 19, 20]


@dataclass(frozen=True, repr=False)
class Graph(Shown):
    """An ONNX graph in a folder of its own: `model.onnx`, or the two graphs of an encoder-decoder.

    `document` is what the command line prints of it with --json.
    """

    folder: Path
    document: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, ...] = ()

    @functools.cached_property
    def file(self) -> Path:
        """The ONNX file; the encoder's of an encoder-decoder."""
        from vitdeploy.stages.step import find_graph

        return find_graph(self.folder)

    @functools.cached_property
    def metadata(self) -> GraphMetadata:
        """The metadata of the file: task, preprocessing, labels; target and precision in a placement."""
        from vitdeploy.graph.io.files import admitted_metadata

        return admitted_metadata(self.file)

    @property
    def task(self) -> Task:
        return self.metadata.task

    @property
    def preprocess(self) -> PreprocessSpec | None:
        """The preprocessing of an image to its input; None if it takes no images."""
        return self.metadata.preprocess

    @property
    def labels(self) -> tuple[str, ...]:
        """Its class names in the order of its outputs, () if it has none."""
        from vitdeploy.stages.step import known_labels

        return known_labels(self.file, self.metadata)

    def lines(self) -> list[Line]:
        return [*self.text, str(self.folder)]


GraphLike = Graph | str | Path


def graph_file(graph: GraphLike) -> Path:
    """The ONNX file of a graph, of its folder, or itself; errors as `find_graph`."""
    from vitdeploy.stages.step import find_graph

    return graph.file if isinstance(graph, Graph) else find_graph(Path(graph))


def export(
    source: ModelLike,
    folder: str | Path | None = None,
    *,
    opset: Opset = 20,
    batch: int | Literal["auto", "dynamic"] = "auto",
    preprocess_in_graph: bool = True,
    progress: bool | Reporter = True,
) -> Graph:
    """Export a model to ONNX, and compare it with the original at three batch sizes.

    Args:
        source: a `Model`, or what `vitdeploy.model` takes.
        folder: where the graph is to lie; by default in a temporary folder that lasts as long as this process.
        opset: of ONNX.
        batch: a fixed one, "dynamic", or "auto": dynamic, or as an ONNX file has it.
        preprocess_in_graph: the graph takes uint8 images [batch, height, width, channels] and normalises them itself;
            else float32 [batch, channels, height, width], normalised.
        progress: shown on standard error or as a bar in a notebook; False for silence.

    Raises:
        ExportError: the graph is not the same function as the model, or the model cannot be exported.
        OutputError: `folder` holds something that is not ours to replace. Errors of `vitdeploy.model`.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> graph.document["largest_difference"] < 1e-5
    True
    """
    from vitdeploy.stages.export import ExportConfig
    from vitdeploy.stages.step import OUTPUT_NAMES

    home = home_of(folder, "graph", OUTPUT_NAMES)
    read = model(source)
    config = ExportConfig(graph_name(read.source.name), opset, None, preprocess_in_graph)
    return export_sizes([(lambda: read, batch, config)], home, reporting(progress))


def export_sizes(
    wanted: Sequence[tuple[Callable[[], Model], Asked, ExportConfig]], home: Path, reporter: Reporter
) -> Graph:
    """One model at several image sizes, each read by a function, into one folder: the first at its top, the others
    below `sizes`."""
    from vitdeploy.bundle.read import SIZES_FOLDER
    from vitdeploy.stages.batches import settle_batch
    from vitdeploy.stages.export import export as export_graph
    from vitdeploy.stages.step import OUTPUT_NAMES

    found: list[tuple[Model, dict[str, Any]]] = []
    with reporter, filling(home, OUTPUT_NAMES) as work:
        for reads, asked, config in wanted:
            reporter.progress("read the model", 0, 1)
            read = reads()
            reference, fixed = settle_batch(read.reference, asked)
            for note in reference.notes:
                reporter.note(note)
            out = work / SIZES_FOLDER / reference.size if found else work
            out.mkdir(parents=True, exist_ok=True)
            facts = export_graph(reference, dataclasses.replace(config, batch=fixed), out, reporter.progress)
            found.append((Model(reference, read.overrides), facts))
    lines = [line for each, facts in found for line in _exported_lines(each, facts)]
    others = [each.reference.size for each, _ in found[1:]]
    lines += [f"image size {size}: {home / SIZES_FOLDER / size}" for size in others]
    sizes = {each.reference.size: facts for each, facts in found}
    document = {**found[0][1], "path": str(home), "largest_difference": max(map(_worst, sizes.values()))}
    if others:
        document["sizes"] = sizes
    return Graph(home, document, tuple(lines))


def graph_name(name: str) -> str:
    """The user's name for a model, made fit to name a graph."""
    stem = Path(name.partition(":")[2] or name).name
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).strip("._-")
    return kept[:64] or "model"


def _worst(facts: Mapping[str, Any]) -> float:
    return float(max(row["max_relative_difference"] for row in facts["parity"]))


def _exported_lines(read: Model, facts: Mapping[str, Any]) -> list[str]:
    from vitdeploy.exporter.parity import unproven_told

    batches = ", ".join(str(row["batch"]) for row in facts["parity"])
    found = facts["model"]
    classes = f"{found['classes']} {labelled(found['task'])}, " if found["classes"] else ""
    labels = [f"labels: {textwrap.shorten('; '.join(read.labels), 100, placeholder=' ...')}"] if read.labels else []
    return [
        f"{found['source']}: {found['task']}, {found['parameters']:,} parameters, {classes}opset {facts['opset']}, "
        f"IR {facts['ir_version']}",
        *preprocess_lines(read.preprocess),
        *labels,
        f"largest difference from the original (max|a-b| / max|b|) at batch {batches}: {_worst(facts):.1e}",
        *(f"warning: {text}" for text in unproven_told(facts["parity"])),
    ]


def optimize(
    graph: GraphLike,
    folder: str | Path | None = None,
    *,
    without: Sequence[str] = (),
    qkv: Literal["keep", "merged", "separate"] = "keep",
    rotate_residual: bool = False,
    merge_tokens: Mapping[int, int] | None = None,
    align_rows: int | None = None,
    image_size: tuple[int, int] | None = None,
    progress: bool | Reporter = True,
) -> Graph:
    """Apply exact rewrites to a float graph, and compare the result with the graph before.

    Args:
        graph: of `export`, its folder, or an ONNX file of any exporter.
        folder: as for `export`.
        without: rewrites to leave out, of fold_layer_scale, fold_attention_scale, drop_key_bias, fold_value_bias,
            fold_image_normalisation, class_token_only.
        qkv: query, key and value as one linear or three.
        rotate_residual: rotate the channels of the residual stream.
        merge_tokens: by block, how many tokens remain behind its attention; not exact.
        align_rows: compute that many rows in the blocks, more than there are tokens, where kernels are faster so.
        image_size: (height, width), where the graph leaves it open.
        progress: as for `export`.

    Raises:
        InputError: an unknown rewrite. GraphError, UnsafeGraphError, MissingFileError: the graph is refused.
        ExportError: a rewritten graph is not the same function.

    >>> import vitdeploy as vd
    >>> float_graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> vd.optimize(float_graph, progress=False).task
    'classification'
    """
    from vitdeploy.runtime.flows import PARTS
    from vitdeploy.stages.step import OUTPUT_NAMES, graphs_in

    if unknown := [name for name in without if name not in REWRITES]:
        raise InputError(f"no rewrite is called {', '.join(unknown)}", wanted=", ".join(REWRITES))
    file = graph_file(graph)
    home = home_of(folder, "optimized", OUTPUT_NAMES)

    from vitdeploy.graph.passes.optimize import OptimizeOptions
    from vitdeploy.stages.optimize import optimize as rewrite

    whole = isinstance(graph, Graph) or Path(graph).is_dir()
    graphs = (
        graphs_in(file.parent)
        if whole
        else {file.stem if any(file.stem in parts for parts in PARTS) else "model": file}
    )
    merging = tuple(sorted((merge_tokens or {}).items()))
    options = OptimizeOptions(
        **{name: name not in without for name in REWRITES},
        qkv=qkv,
        rotate_residual=rotate_residual,
        token_merging=merging,
        align_rows=align_rows,
    )
    reporter = reporting(progress)
    with reporter, filling(home, OUTPUT_NAMES) as work:
        facts = rewrite(graphs, options, work, reporter.progress, image_size)
    return Graph(home, facts, tuple(_rewritten_lines(facts, merging)))


def _rewritten_lines(facts: Mapping[str, Any], merging: Sequence[tuple[int, int]]) -> list[str]:
    from vitdeploy.exporter.parity import unproven_told

    lines = []
    for name, counts in facts["rewrites"].items():
        before, after = facts["nodes"][name]
        changed = [f"{count} x {rewrite}" for rewrite, count in counts.items() if count]
        lines.append(f"{name}: {before} nodes -> {after}; {', '.join(changed) or 'nothing to rewrite'}")
        lines.append(f"{name}: largest difference (max|a-b| / max|b|) {facts['difference'][name]:.1e}")
        constant = [{"unproven": facts.get("unproven", {}).get(name)}]
        lines += [f"warning: {text}" for text in unproven_told(constant, (f"rewritten {name}", "graph before"))]
        if merging:
            steps = [f"{tokens} behind block {block}" for block, tokens in merging]
            lines.append(
                f"{name}: tokens merged after that, {facts['token_merging'][name]['tokens']} to {', '.join(steps)}; "
                "not exact: `vitdeploy verify` measures what it costs"
            )
    return lines
