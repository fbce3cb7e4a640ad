"""Place a graph for one target, ready to be compiled here or on a device; compile it here, and write the bundle of its
engine."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.write import write_bundle
from vitdeploy.compilation.backend import BuildOptions
from vitdeploy.errors import CapabilityError, TargetError, quoted
from vitdeploy.graph.io import files
from vitdeploy.graph.passes.folds import cast_pixels_first
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime.monitor_reference import reference_beside
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search.costs import costs_for, has_costs
from vitdeploy.search.rows import RowParts, choose_row_parts, in_parts
from vitdeploy.spec import EngineSpec, GraphSpec, Manifest, Precision
from vitdeploy.stages import rows, step
from vitdeploy.stages.compile import CompileOptions, check_task, compile_graphs


@dataclass(frozen=True)
class PlacedGraphs:
    """`graphs` are the user's files by part, with their inputs and outputs; `folder` has them as `<part>.onnx`, placed
    for `target` in `precision`, as their metadata says. `batch` is the default batch of compilation. `row_parts`: the
    parts of the token rows, see `EngineSpec`."""

    metadata: files.GraphMetadata
    target: str
    precision: Precision
    graphs: Mapping[str, tuple[Path, GraphSpec]]
    folder: Path
    row_parts: tuple[int, ...] | None = None

    def in_parts(self, parts: Sequence[int], folder: Path) -> PlacedGraphs:
        """Return the graphs with split rows, in a new folder; raises GraphError if the rows cannot be split so."""
        in_parts(self.folder / step.MODEL_FILE, parts, folder / step.MODEL_FILE)
        return dataclasses.replace(self, folder=folder, row_parts=tuple(parts))

    @property
    def _fixed(self) -> int | None:
        return files.fixed_batch(next(spec for _, spec in self.graphs.values()))

    @property
    def batch(self) -> int:
        return self._fixed or 1

    def check_build(self, build: BuildOptions | None) -> None:
        """Raise TargetError if the graph has a fixed batch and the options have profiles."""
        if self._fixed is not None and build is not None and build.batches:
            raise TargetError(
                f"{next(file for file, _ in self.graphs.values())} has a fixed batch of {self._fixed}",
                found="profiles for several batches",
                expected="no profile",
                fix="leave the profiles out, or export with a dynamic batch",
            )


def place_graphs(file: Path, target: str, precision: str | None, folder: Path) -> PlacedGraphs:
    """Place a graph (with its sibling, for an encoder-decoder) for `target` into the empty folder `folder`.

    Raises:
        TargetError: the graph was placed for another target or precision.
        CapabilityError: the target does not support the precision or the task.
    """
    metadata = files.admitted_metadata(file)
    if precision is not None and metadata.precision not in (None, precision):
        raise TargetError(
            f"{file} already has the precision {metadata.precision}",
            found=f"--precision {precision}",
            expected=str(metadata.precision),
            fix="pass the float graph, or leave --precision out",
        )
    chosen: Precision = metadata.precision or precision or "fp32"  # type: ignore[assignment]
    if metadata.target not in (None, target):
        raise TargetError(
            f"{file} was prepared for another target",
            found=str(metadata.target),
            expected=target,
            fix=f"quantize the float graph for {target}, or compile with --target {metadata.target}",
        )
    step.check_precision(target, chosen)
    check_task(metadata.task, target, chosen)
    typed = TARGETS[target].typed
    if typed and metadata.precision is None and chosen != "fp32":
        raise TargetError(
            f"{target} takes the precision from the types in the graph, and {file} is a float graph",
            found=f"--precision {chosen}",
            expected=f"a graph typed in {chosen}",
            fix=f"vitdeploy quantize {quoted(file)} --data IMAGES --target {target} --precision {chosen} -o DIR",
        )
    graphs = {}
    for name, graph in (step.graphs_in(file.parent) if flow_of(metadata.task) else {"model": file}).items():
        model = files.load_graph(graph)
        graphs[name] = (graph, files.graph_spec(model, graph.name))
        if typed and metadata.precision is None:
            cast_pixels_first(model)
        own = files.get_metadata(model, str(graph))  # each graph of a flow has its own precision
        files.set_metadata(model, dataclasses.replace(own, target=target, precision=own.precision or chosen))
        files.save_graph(model, folder / f"{name}.onnx")
    return PlacedGraphs(metadata, target, chosen, graphs, folder)


def compile_bundle(
    file: Path,
    target: str,
    batch: int | None,
    precision: str | None,
    out: Path,
    progress: Progress = silent,
    build: BuildOptions | None = None,
    accepted: Sequence[str] = (),
    split_rows: Literal["auto", "none"] | Sequence[int] = "none",
) -> Manifest:
    """Compile a graph (with its sibling, for an encoder-decoder) for `target` into the empty folder `out`.

    Args:
        split_rows: the parts of the token rows of an INT8 engine, or a padded number of rows; "auto": chosen by layer
            costs on this CPU.

    Raises:
        GraphError: the rows cannot be split so.
        KnownBadError: the runtime is known to compute such a graph wrongly, by an entry that is not `accepted`.
        TargetError: the graph was placed for another target or precision, or has a fixed batch but profiles are given.
        CapabilityError: the target does not support the precision or the task.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        placed, made = Path(folder) / "placed", Path(folder) / "engine"
        placed.mkdir()
        made.mkdir()
        graphs = place_graphs(file, target, precision, placed)
        graphs.check_build(build)
        size = batch or graphs.batch
        graph = placed / step.MODEL_FILE
        parts = chosen_row_parts(graphs, split_rows, lambda: choose_row_parts(graph, size, costs_for(target)))
        compile_graphs(placed, target, size, made, progress, CompileOptions(build, accepted, parts))
        return bundle_of(graphs, step.read_engine(made), made, out)


def chosen_row_parts(
    placed: PlacedGraphs, expected: Literal["auto", "none"] | Sequence[int], choose: Callable[[], RowParts]
) -> Sequence[int] | None:
    """The parts of the token rows of a placement; None for all at once. `choose` is called for "auto".

    Raises:
        CapabilityError: the target, precision or task does not support parts. Errors of `choose` propagate.
    """
    able = rows.splits_rows(placed.target, placed.precision, placed.metadata.task)
    if expected == "none" or (expected == "auto" and not (able and has_costs(placed.target))):
        return None
    if not able:
        raise CapabilityError(
            f"{placed.target} cannot split the token rows of this graph",
            found=f"precision {placed.precision}, for the task {placed.metadata.task}",
            expected="a model of one graph, in INT8 for openvino-cpu",
            fix="leave --split-rows out",
        )
    if expected != "auto":
        return tuple(expected)
    return choose().parts


def bundle_of(placed: PlacedGraphs, engine: EngineSpec, folder: Path, out: Path) -> Manifest:
    """Write the bundle of one engine, whose files are in `folder`, into the empty folder `out`."""
    metadata, home = placed.metadata, next(graph for graph, _ in placed.graphs.values()).parent
    images = metadata.preprocess
    return write_bundle(
        out,
        name=metadata.name if 0 < len(metadata.name) <= 64 else "model",
        task=metadata.task,
        graphs=placed.graphs,
        preprocess=metadata.preprocess,
        postprocess=metadata.postprocess,
        tokenizer=home / step.TOKENIZER_FILE,
        monitor=None if images is None else reference_beside(home, images.channels),
        labels=step.known_labels(next(graph for graph, _ in placed.graphs.values()), metadata),
        engines=[(engine, folder)],
    )
