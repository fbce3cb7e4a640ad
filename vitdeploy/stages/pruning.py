"""Structured pruning of the float graph: what it could lose, and the graph without it. See `search.pruning`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitdeploy.data.folder import Sample
from vitdeploy.data.pixels import batches
from vitdeploy.errors import CapabilityError, DataError, GraphError
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph, save_graph, weights_folder
from vitdeploy.progress import Counter, Progress, silent
from vitdeploy.quantization.observer import Observer
from vitdeploy.quantization.probe import with_outputs
from vitdeploy.runtime.flows import FLOWS
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.search.pruning import (
    Parts,
    Pruning,
    allocate,
    measure_parts,
    prunable_parts,
    prune_graph,
    saved,
    try_prunings,
)
from vitdeploy.search.saliency import Moments
from vitdeploy.spec import PreprocessSpec, Task, decode, encode
from vitdeploy.stages.files import MODEL_FILE, copy_labels, read_json, write_json
from vitdeploy.stages.reference_outputs import BATCH, float_reference_outputs
from vitdeploy.stages.step import OPTIMIZE, UNPRUNED, Folders, Step
from vitdeploy.stages.tools import package_versions

if TYPE_CHECKING:
    from vitdeploy.tasks.adapter import Data

PRUNING, PRUNING_FILE = "pruning", "pruning.json"
# Every trial is a pass over this many images, the last ones; with twice as many, moments come from the others alone.
IMAGES = 32
PACKAGES = ("onnxruntime", "onnx-ir", "pillow", "numpy", "scipy")


@dataclass(frozen=True)
class Prunings:
    """`prunings`: of the whole graph, the least first."""

    parts: Parts
    prunings: tuple[Pruning, ...]


def check_prune(task: Task, preprocess: PreprocessSpec | None) -> None:
    """Raises CapabilityError for a model that cannot be pruned whatever its graph is."""
    if task in FLOWS or preprocess is None:
        raise CapabilityError(
            "only models of images are pruned by this version, and only such of one graph",
            found=f"the task {task}",
            wanted="a model of one graph that takes images",
            fix="leave optimize.prune out",
        )


def find_prunings(graph: Path, samples: Sequence[Sample], out: Path, progress: Progress = silent) -> None:
    """Write pruning.json: what each part of a graph can lose, and trials of the whole graph.

    Raises:
        GraphError: there is nothing to prune, or there are too few images.
    """
    moments = input_moments(graph, samples, progress)
    reference_outputs = float_reference_outputs(graph, samples[-IMAGES:])
    parts = measure_parts(graph, moments, reference_outputs, progress)
    found = try_prunings(graph, parts, moments, reference_outputs, progress)
    write_json(out / PRUNING_FILE, encode(Prunings(parts, tuple(found))))


def read_prunings(folder: Path) -> Prunings:
    return decode(Prunings, read_json(folder / PRUNING_FILE))


def prune(
    graph: Path, found: Prunings, share: float, samples: Sequence[Sample], out: Path, progress: Progress = silent
) -> None:
    """Write the graph with at least `share` of its MACs gone, and what `optimize` wrote beside it with that added.

    Raises:
        GraphError: not so many can go.
    """
    widths = allocate(found.parts, share)
    if widths is None:
        most = saved(found.parts, {each.name: min(each.widths, default=each.count) for each in found.parts.parts})
        raise GraphError(
            f"{share:.3g} of the products of this graph cannot be pruned",
            found=f"hidden channels and heads that make up {most:.3g} at most, as far as they were tried",
            wanted=f"optimize.prune up to {int(most * 100) / 100:g}",
        )
    model = load_graph(graph)
    prune_graph(model, found.parts.parts, widths, input_moments(graph, samples, progress))
    save_graph(model, out / MODEL_FILE)
    copy_labels(graph.parent, out)
    facts = read_json(graph.parent / "optimize.json")
    facts["nodes"]["model"][1] = len(model.graph)
    kept = {each.name: [each.kind, each.count, widths[each.name]] for each in found.parts.parts if each.name in widths}
    facts["pruning"] = {"model": {"share": saved(found.parts, widths), "kept": kept}}
    write_json(out / "optimize.json", facts)


def input_moments(graph: Path, samples: Sequence[Sample], progress: Progress = silent) -> dict[str, Moments]:
    """The moments of the input of each linear with something to prune in front of it, by its name.

    Raises:
        GraphError: there is nothing to prune, or the graph has a fixed batch of more images than there are.
        DataError: an activation is not finite.
    """
    model = load_graph(graph)
    shown = samples[:-IMAGES] if len(samples) >= 2 * IMAGES else samples
    metadata, readers = get_metadata(model, str(graph)), prunable_parts(model)
    fixed = fixed_batch(graph_spec(model, MODEL_FILE))
    if fixed is not None and len(shown) < fixed:
        raise GraphError(
            f"the graph has the fixed batch {fixed}",
            found=f"{len(shown)} images for what is to be pruned",
            wanted=f"at least {fixed}",
        )
    size, used = fixed or BATCH, len(shown) // fixed * fixed if fixed is not None else len(shown)
    tensors = {name: str(part.reader.input.name) for name, (part, _) in readers.items()}
    observers = {tensor: Observer(-1) for tensor in tensors.values()}
    count = Counter(progress, "moments of what is to be pruned", used)
    data = with_outputs(model, sorted(observers))
    with OnnxRuntimeRunner(data, name="moments", weights=weights_folder(model)) as runner:
        taken = runner.inputs[0]
        for number, pixels in enumerate(batches(shown[:used], metadata.images, size)):
            feed = pixels if taken.dtype == "uint8" else normalise(pixels, metadata.images)
            outputs = runner.infer({taken.name: feed})
            for tensor, observer in observers.items():
                observer.update(outputs[tensor].astype(np.float32), number)
                if not observer.finite:
                    raise DataError(
                        "the model's activations are not finite on the calibration images",
                        found=f"{tensor}, on image {number * size + 1} or one of the {len(pixels)} from there",
                        wanted="finite activations",
                        fix="check the checkpoint and the preprocessing, or take this image away",
                    )
            count(len(pixels))
    found = {tensor: observer.statistics() for tensor, observer in observers.items()}
    return {
        name: Moments(found[tensor].mean, found[tensor].covariance.astype(np.float64), found[tensor].rows)
        for name, tensor in tensors.items()
    }


def pruning_step(data: Data, source: str = OPTIMIZE) -> Step:
    """What can be pruned of the graph of the step `source`."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        find_prunings(folders[source].path / MODEL_FILE, samples, out, progress)

    images, packages = {"images": data.calibration_digest}, package_versions(PACKAGES)
    return Step(PRUNING, PRUNING, write, {}, (source,), images, packages)


def prune_step(share: float, data: Data) -> Step:
    """The pruned graph, in the place of that of `optimize`."""
    samples = data.calibration

    def write(folders: Folders, out: Path, progress: Progress) -> None:
        found = read_prunings(folders[PRUNING].path)
        prune(folders[UNPRUNED].path / MODEL_FILE, found, share, samples, out, progress)

    images, packages = {"images": data.calibration_digest}, package_versions(PACKAGES)
    return Step(OPTIMIZE, "prune", write, {"share": share}, (UNPRUNED, PRUNING), images, packages)
