"""Export a model to ONNX, rewrite a float graph exactly, and compile a graph to an engine."""

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from vitdeploy.api.artifacts import Bundle, Graph, Model, ModelLike, graph_file, labelled, preprocess_lines
from vitdeploy.api.calls import takes
from vitdeploy.api.model import model, read_model
from vitdeploy.api.options import (
    REWRITES,
    Compile,
    ExportOptions,
    Optimize,
)
from vitdeploy.api.values import Reporter, filling, home_of, reporting
from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import SIZES_FOLDER
from vitdeploy.exporter.parity import unproven_told
from vitdeploy.extensions import lazy, wing
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.known_bad.find import check_ids, described, engine_matches, match_lines
from vitdeploy.pipeline.job import at_size, at_sizes, export_config_of, overrides_of, source_of
from vitdeploy.recipe.load import load_recipe
from vitdeploy.runtime.flows import PARTS
from vitdeploy.spec import EngineSpec
from vitdeploy.stages import reference_model, step
from vitdeploy.stages.optimize import optimize as rewrite
from vitdeploy.workflows.placement import compile_bundle
from vitdeploy.workflows.seeded import (
    answers_told,
    require_seeded,
    seeded_answers,
)

if TYPE_CHECKING:
    from vitdeploy.stages import export as exports
else:
    exports = lazy("vitdeploy.stages.export")  # needs PyTorch, which measuring, comparing and sending do not

Expected: TypeAlias = "tuple[Callable[[], Model], exports.Asked, exports.ExportConfig]"


def export(
    source: ModelLike,
    folder: str | Path | None = None,
    *,
    opset: Literal[18, 19, 20] = 20,
    batch: int | Literal["auto", "dynamic"] = "auto",
    preprocess_in_graph: bool = True,
    progress: bool | Reporter = True,
) -> Graph:
    """Export a model to ONNX, and compare it with the original at three batch sizes.

    Args:
        source: a `Model`, or any argument of `vitdeploy.model`.
        folder: folder for the graph. Default: a temporary folder, removed when this process ends.
        opset: ONNX opset.
        batch: a fixed batch size, "dynamic", or "auto": dynamic, or the ONNX file's own.
        preprocess_in_graph: the graph takes uint8 images [batch, height, width, channels] and normalises them itself;
            False: it takes normalised float32 [batch, channels, height, width].
        progress: show progress on standard error, or as a bar in a notebook.

    Raises:
        ExportError: the graph is not the same function as the model, or the model cannot be exported.
        OutputError: `folder` holds files that vitdeploy did not write. Errors of `vitdeploy.model`.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> graph.document["largest_difference"] < 1e-5
    True
    """

    home = home_of(folder, "graph", step.OUTPUT_NAMES)
    read = model(source)
    config = exports.ExportConfig(graph_name(read.source.name), opset, None, preprocess_in_graph)
    return export_sizes([(lambda: read, batch, config)], home, reporting(progress))


def export_of(name: str | None, options: ExportOptions, reporter: Reporter) -> Graph:
    """The graph of `vitdeploy export`: of a model, or of a recipe's model, at each image size."""
    batch, progress = options.batch, reporter.progress
    asked = cast("exports.Asked | None", int(batch) if batch is not None and batch.isdecimal() else batch)
    changed: dict[str, Any] = {"opset": int(options.opset)} if options.opset else {}
    changed |= {"in_graph": False} if options.no_preprocess else {}
    sizes = tuple(dict.fromkeys(options.image_size))
    source = dataclasses.replace(options.to_source(name), image_size=None)
    expected: list[Expected] = []
    if name is not None and name.endswith((".yaml", ".yml")):
        said = {key: value for key, value in vars(source).items() if value and key != "model"}
        recipe = load_recipe(Path(name), (), options.function)
        for each in tuple(at_size(recipe, size) for size in sizes) or at_sizes(recipe):
            overrides = overrides_of(each)
            overrides = dataclasses.replace(overrides, labels=options.labels or overrides.labels)
            config = dataclasses.replace(export_config_of(each), **changed)
            read = functools.partial(read_model, dataclasses.replace(source_of(each), **said), overrides, progress)
            expected.append((read, asked or each.export.batch, config))
    else:
        config = dataclasses.replace(exports.ExportConfig(graph_name(source.name), 20, None, True), **changed)
        for size in sizes or (None,):
            sized = dataclasses.replace(source, image_size=size)
            read = functools.partial(read_model, sized, reference_model.Overrides(labels=options.labels), progress)
            expected.append((read, asked or "auto", config))
    return export_sizes(expected, home_of(options.folder, "graph", step.OUTPUT_NAMES), reporter)


def export_sizes(expected: Sequence[Expected], home: Path, reporter: Reporter) -> Graph:
    """Export one model at several image sizes, each loaded by a function, into one folder: the first at its top, the
    others below `sizes`."""

    found: list[tuple[Model, dict[str, Any]]] = []
    with reporter, filling(home, step.OUTPUT_NAMES) as work:
        for reads, asked, config in expected:
            reporter.progress("load the model", 0, 1)
            read = reads()
            reference, fixed = exports.settle_batch(read.reference, asked)
            for note in reference.notes:
                reporter.note(note)
            out = work / SIZES_FOLDER / reference.size if found else work
            out.mkdir(parents=True, exist_ok=True)
            facts = exports.export(reference, dataclasses.replace(config, batch=fixed), out, reporter.progress)
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
    """The user's name for a model, turned into a valid graph name."""
    stem = Path(name.partition(":")[2] or name).name
    kept = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem).strip("._-")
    return kept[:64] or "model"


def _worst(facts: Mapping[str, Any]) -> float:
    return float(max(row["max_relative_difference"] for row in facts["parity"]))


def _exported_lines(read: Model, facts: Mapping[str, Any]) -> list[str]:

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


@takes(Optimize)
def optimize(options: Optimize) -> Graph:
    """Apply exact rewrites to a float graph, and compare the result with the original graph.

    Raises:
        InputError: an unknown rewrite. GraphError, UnsafeGraphError, MissingFileError: the graph is refused.
        ExportError: a rewritten graph is not the same function.

    >>> import vitdeploy as vd
    >>> float_graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> vd.optimize(float_graph, progress=False).task
    'classification'
    """
    graph, file = options.graph, graph_file(options.graph)
    home = home_of(options.folder, "optimized", step.OUTPUT_NAMES)
    graphs = {file.stem if any(file.stem in parts for parts in PARTS) else "model": file}
    if isinstance(graph, Graph) or Path(graph).is_dir():
        graphs = step.graphs_in(file.parent)
    merging = tuple(sorted((options.merge_tokens or {}).items()))
    switches = OptimizeOptions(
        **{name: name not in options.without for name in REWRITES},
        qkv=options.qkv,
        rotate_residual=options.rotate_residual,
        token_merging=merging,
    )
    reporter = reporting(options.progress)
    with reporter, filling(home, step.OUTPUT_NAMES) as work:
        facts = rewrite(graphs, switches, work, reporter.progress, options.image_size)
    return Graph(home, facts, tuple(_rewritten_lines(facts, merging)))


def _rewritten_lines(facts: Mapping[str, Any], merging: Sequence[tuple[int, int]]) -> list[str]:
    lines = []
    for name, counts in facts["rewrites"].items():
        before, after = facts["nodes"][name]
        changed = [f"{count} x {rewrite}" for rewrite, count in counts.items() if count]
        lines.append(f"{name}: {before} nodes -> {after}; {', '.join(changed) or 'nothing to rewrite'}")
        lines.append(f"{name}: largest difference (max|a-b| / max|b|) {facts['difference'][name]:.1e}")
        constant = [{"unproven": facts.get("unproven", {}).get(name)}]
        lines += [f"warning: {text}" for text in unproven_told(constant, (f"rewritten {name}", "original graph"))]
        if merging:
            steps = [f"{tokens} after block {block}" for block, tokens in merging]
            lines.append(
                f"{name}: then merged {facts['token_merging'][name]['tokens']} tokens to {', '.join(steps)}; "
                "not exact: measure the accuracy cost with `vitdeploy verify`"
            )
    return lines


@takes(Compile)
def compile(options: Compile) -> Bundle:
    """Compile a graph to an engine for one target.

    Raises:
        TargetError: the graph was placed for another target, or has a fixed batch.
        KnownBadError: this release of the runtime is known to compute such a graph wrongly.
        CapabilityError: the target does not support the precision or the task, or the engine did not run as placed.
        MissingPackageError, EngineError: the runtime is missing or failed.
        GraphError: `split_rows` does not fit the number of token rows.

    >>> import vitdeploy as vd
    >>> graph = vd.export("vit_w32d2h2_patch8_32", progress=False)
    >>> [engine] = vd.compile(graph, "onnxruntime-cpu", progress=False).engines
    >>> engine.artifact
    'onnxruntime-cpu-fp32'
    """
    file, target, accepted = graph_file(options.graph), options.target, options.accept_known_bad
    home, reporter = home_of(options.folder, "bundle", step.OUTPUT_NAMES), reporting(options.progress)
    check_ids(accepted)
    with reporter, filling(home, step.OUTPUT_NAMES) as work:
        reporter.progress(f"compile for {target}", 0, 1)
        if options.on is None:
            how = options.build, accepted, options.split_rows
            manifest = compile_bundle(file, target, options.batch, options.precision, work, reporter.progress, *how)
            engine = manifest.engines[0]
            seeded = seeded_answers(work / engine.graph, target)
            compared = answers_told(seeded, require_seeded(seeded, engine, work), bool(engine.accepted))
        else:
            manifest, compared = wing("devices.api").compile_on(options.on, options, file, work, reporter)
            engine = manifest.engines[0]
        reporter.progress(f"compile for {target}", 1, 1)
    document = {
        "artifact": engine.artifact,
        "target": engine.target,
        "precision": engine.precision,
        "provider": engine.provider,
        "batch": engine.batch,
        "kernels": engine.kernels,
        **({"row_parts": list(engine.row_parts)} if engine.row_parts else {}),
        **({"float_rest": engine.float_rest} if engine.float_rest else {}),
        "answers": compared.facts,
        "path": str(home),
    }
    known = [match for match in engine_matches(engine, home) if match.entry.action != "avoided"]
    if known:
        document["known_bad"] = [described(match) for match in known]
    taken = engine.accepted or ()
    known_lines = [line for each in known for line in match_lines(each, "accepted" if each.entry.id in taken else "")]
    return Bundle(home, document, (_ran(engine), *known_lines, compared.line))


def _ran(engine: EngineSpec) -> str:
    """One line on the kernels that ran."""
    hidden = "as typed in the graph (this provider does not report its kernels)"
    kernels = ", ".join(f"{count} in {kind}" for kind, count in engine.kernels.items())
    kernels = kernels or (hidden if TARGETS[engine.target].typed else "none")
    form = f"; {engine.form_told}" if engine.form_told else ""
    return f"{engine.artifact} on {engine.provider}, batch {engine.batch}: linears and convolutions {kernels}{form}"
