"""Searches over the shape of the work: parts of rows, schedules of token merging, pruning."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitdeploy.compilation.backend import COMPILE
from vitdeploy.compilation.engine import GRAPH_FILE, weights_of
from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.document.sweep import MergingTrial
from vitdeploy.errors import CapabilityError, DataError, GraphError
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph, runner_of, save_graph
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization.observer import Observer
from vitdeploy.quantization.probe import ImageProbe
from vitdeploy.quantization.ranges import Statistics
from vitdeploy.runtime.tasks.registry import flow_of
from vitdeploy.search import costs, pruning, rows
from vitdeploy.spec import EngineSpec, PreprocessSpec, Task
from vitdeploy.stages import search, step

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

GRAPH_PACKAGES = ("onnx-ir", "numpy")
PARTS_SEARCH = step.Search("parts", "row_parts.json", rows.RowParts, GRAPH_PACKAGES)

# --- Search for the parts of rows with which an engine is faster ------------------------------------------------------


def parts_step(candidate: step.Candidate, batch: int) -> step.Step:
    """The step that chooses the parts in which a candidate computes its rows, by the cost table of layers."""
    target, placed, table = candidate.target, candidate.step("place"), costs.costs_for(candidate.target)

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        PARTS_SEARCH.write(rows.choose_row_parts(folders[placed].path / step.MODEL_FILE, batch, table), out)

    config = {"target": target, "batch": batch, "costs": table.digest}
    return PARTS_SEARCH.step(candidate.step("parts"), write, config, (placed,), target)


def chooses_rows(target: str, precision: str, task: Task) -> bool:
    """As `splits_rows`, and the target has a cost table to choose the parts by."""
    return splits_rows(target, precision, task) and costs.has_costs(target)


def splits_rows(target: str, precision: str, task: Task) -> bool:
    """Whether an engine may compute the rows of its tokens in parts: INT8, one graph, and support in the back end."""
    return COMPILE[target].splits_rows and precision in step.QUANTIZED and precision != "int4" and not flow_of(task)


def compile_in_parts(graph: Path, parts: Sequence[int], out: Path, compiling: Callable[..., EngineSpec]) -> EngineSpec:
    """Compile a placed graph with its rows in parts by `compiling`, and copy the placement itself next to the engine.

    Raises:
        GraphError: the rows cannot be split into these parts.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        split = Path(folder) / graph.name
        engine = compiling(split, out, placed=rows.in_parts(graph, parts, split))
    for file in (graph, weights_of(graph)):
        if file.is_file():
            shutil.copyfile(file, out / (GRAPH_FILE if file == graph else file.name))
    return engine


# --- Search for promising schedules of token merging on a target ------------------------------------------------------


SCHEDULES_SEARCH = step.Search("schedules", "schedules.json", MergingTrial)


def find_schedules(
    table: costs.CostTable | None, graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent
) -> None:
    """Write schedules.json: the schedules that look promising by the costs of layers.

    Raises:
        GraphError: tokens of this graph cannot be merged.
    """
    tokens = rows.find_tokens(load_graph(graph))
    predicted = rows.predict_times(tokens, table)
    reference_outputs = search.float_reference_outputs(graph, samples[: search.IMAGES]) if predicted else None
    found = rows.try_schedules(graph, predicted, reference_outputs, progress) if reference_outputs is not None else []
    SCHEDULES_SEARCH.write(MergingTrial(tokens.count, tuple(found)), out)


def schedules_step(target: str, data: Data) -> step.Step:
    """The step that finds schedules of token merging for the job's float graph."""
    samples, table = data.calibration, costs.costs_for(target) if costs.has_costs(target) else None

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_schedules(table, folders[step.OPTIMIZE].path / step.MODEL_FILE, samples, out, progress)

    config = {"target": target, "costs": table.digest if table is not None else ""}
    return SCHEDULES_SEARCH.step(f"schedules {target}", write, config, (step.OPTIMIZE,), target, data)


# --- Structured pruning of the float graph: measurements, and the pruned graph. See `search.pruning` ------------------


PRUNING = "pruning"
# Every trial is a pass over the last IMAGES images; with at least twice as many, moments come from the others only.


@dataclass(frozen=True)
class Prunings:
    """`prunings`: trials on the whole graph, the smallest share first."""

    parts: pruning.Parts
    prunings: tuple[pruning.Pruning, ...]


PRUNING_SEARCH = step.Search(PRUNING, "pruning.json", Prunings)


def check_prune(task: Task, preprocess: PreprocessSpec | None) -> None:
    """Raise CapabilityError for a model that cannot be pruned, whatever its graph."""
    if flow_of(task) or preprocess is None:
        raise CapabilityError(
            "pruning does not support this model",
            found=f"the task {task}",
            expected="a model with a single graph that takes images",
            fix="remove optimize.prune from the recipe",
        )


def find_prunings(graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Write pruning.json: the prunable share of each part of a graph, and trials on the whole graph.

    Raises:
        GraphError: the graph has nothing to prune, or there are too few images.
    """
    moments = input_moments(graph, samples, progress)
    reference_outputs = search.float_reference_outputs(graph, samples[-search.IMAGES :])
    parts = pruning.measure_parts(graph, moments, reference_outputs, progress)
    prunings = pruning.try_prunings(graph, parts, moments, reference_outputs, progress)
    PRUNING_SEARCH.write(Prunings(parts, tuple(prunings)), out)


def prune(
    graph: Path, found: Prunings, share: float, samples: Sequence[Sample], out: Path, progress: Progress = silent
) -> None:
    """Write the graph without at least `share` of its MACs, and the other files of `optimize` with facts on pruning.

    Raises:
        GraphError: this share cannot be pruned.
    """
    widths = pruning.allocate(found.parts, share)
    if widths is None:
        most = pruning.saved(
            found.parts, {each.name: min(each.widths, default=each.count) for each in found.parts.parts}
        )
        raise GraphError(
            f"a share of {share:.3g} of this graph's MACs cannot be pruned",
            found=f"prunable hidden channels and heads with a share of {most:.3g}, among those tried",
            expected=f"optimize.prune up to {int(most * 100) / 100:g}",
        )
    model = load_graph(graph)
    pruning.prune_graph(model, found.parts.parts, widths, input_moments(graph, samples, progress))
    save_graph(model, out / step.MODEL_FILE)
    step.copy_labels(graph.parent, out)
    facts = step.read_json(graph.parent / "optimize.json")
    facts["nodes"]["model"][1] = len(model.graph)
    kept = {part.name: [part.kind, part.count, widths[part.name]] for part in found.parts.parts if part.name in widths}
    facts["pruning"] = {"model": {"share": pruning.saved(found.parts, widths), "kept": kept}}
    step.write_json(out / "optimize.json", facts)


def input_moments(graph: Path, samples: Sequence[Sample], progress: Progress = silent) -> dict[str, Statistics]:
    """The moments of the input of each linear that reads prunable channels, by the linear's name.

    Raises:
        GraphError: the graph has nothing to prune, or its fixed batch is larger than the number of images.
        DataError: an activation is not finite.
    """
    model = load_graph(graph)
    shown = samples[: -search.IMAGES] if len(samples) >= 2 * search.IMAGES else samples
    metadata, readers = get_metadata(model, str(graph)), pruning.prunable_parts(model)
    fixed = fixed_batch(graph_spec(model, step.MODEL_FILE))
    if fixed is not None and len(shown) < fixed:
        raise GraphError(
            f"the graph has a fixed batch size of {fixed}",
            found=f"{len(shown)} images for the pruning statistics",
            expected=f"at least {fixed}",
        )
    size, used = fixed or search.BATCH, len(shown) // fixed * fixed if fixed is not None else len(shown)
    tensors = {name: str(part.reader.input.name) for name, (part, _) in readers.items()}
    observers = {tensor: Observer(-1) for tensor in tensors.values()}
    count = Counter(progress, "collect statistics for pruning", used)
    with ImageProbe(model, metadata.images, runner_of(model, "moments", sorted(observers))) as probe:
        for number, pixels in enumerate(batches(shown[:used], metadata.images, size)):
            outputs = probe.run(probe.feeds(pixels))
            for tensor, observer in observers.items():
                observer.update(outputs[tensor].astype(np.float32), number)
                if not observer.finite:
                    raise DataError(
                        "the model's activations are not finite on the calibration images",
                        found=f"{tensor}, on one of {len(pixels)} images from image {number * size + 1} on",
                        expected="finite activations",
                        fix="check the checkpoint and the preprocessing, or remove this image",
                    )
            count(len(pixels))
    return {name: observers[tensor].statistics() for name, tensor in tensors.items()}


def pruning_step(data: Data, source: str = step.OPTIMIZE) -> step.Step:
    """The step that measures what can be pruned in the graph of the step `source`."""
    samples = data.calibration

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        find_prunings(folders[source].path / step.MODEL_FILE, samples, out, progress)

    return PRUNING_SEARCH.step(PRUNING, write, {}, (source,), None, data)


def prune_step(share: float, data: Data) -> step.Step:
    """The step that writes the pruned graph, which replaces the graph of `optimize`."""
    samples = data.calibration

    def write(folders: step.Folders, out: Path, progress: Progress) -> None:
        found = PRUNING_SEARCH.read(folders[PRUNING].path)
        prune(folders[step.UNPRUNED].path / step.MODEL_FILE, found, share, samples, out, progress)

    images, packages = {"images": data.calibration_digest}, step.package_versions(PRUNING_SEARCH.packages)
    return step.Step(step.OPTIMIZE, "prune", write, {"share": share}, (step.UNPRUNED, PRUNING), images, packages)
