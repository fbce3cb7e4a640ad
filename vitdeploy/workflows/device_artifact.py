"""What a name on the command line stands for where it is to run on a device: its placement, never an engine of ours.

Nothing is compiled here, so that a target's runtime need not be installed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.bundle.read import is_bundle, read_bundle, verify_files
from vitdeploy.bundle.sign import signed_by
from vitdeploy.devices.agent.documents import Placed
from vitdeploy.devices.shipment import Shipment, ship
from vitdeploy.errors import InputError
from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.io.files import load_graph
from vitdeploy.models.model_folder.hub import is_hub_name
from vitdeploy.runtime.backend import engine_is_code
from vitdeploy.runtime.choice import select_engines
from vitdeploy.runtime.labels import number_of_classes, read_labels
from vitdeploy.spec import EngineSpec, Manifest
from vitdeploy.stages.files import find_graph, is_ours, known_labels
from vitdeploy.tasks.adapter import Setting
from vitdeploy.workflows.placement import PlacedGraphs, place_graphs
from vitdeploy.workflows.subjects import DEFAULT_TARGET, graph_metadata


@dataclass(frozen=True)
class DeviceArtifact:
    """One artifact, how its inputs and outputs are read, and what of it goes to a device."""

    name: str
    setting: Setting
    shipment: Shipment


def find_device_artifacts(
    text: str, *, target: str | None, work: Path, trust: Path | None = None
) -> list[DeviceArtifact]:
    """Every engine of a bundle (or the one for `target`), or a graph, which is placed in a new folder of `work`.

    Raises:
        InputError: an original, which no device can run. Errors of reading come through.
    """
    path = Path(text)
    if path.is_dir() and is_bundle(path):
        return _of_bundle(path, target, trust)
    foreign = path.suffix == ".onnx" and path.is_file() and not is_ours(path)
    if is_hub_name(text) or foreign or not (path.exists() or path.suffix == ".onnx" or "/" in text):
        raise InputError(
            f"{text} is a model, and devices run what was made of one",
            wanted="with --on: bundles, graphs of `vitdeploy export` or `vitdeploy quantize`",
            fix=f"vitdeploy export {text} -o DIR, then give DIR",
        )
    folder = work / f"placed{len(list(work.iterdir()))}"
    folder.mkdir()
    file = find_graph(path)
    graphs = place_graphs(file, target or graph_metadata(file).target or DEFAULT_TARGET, None, folder)
    return [DeviceArtifact(str(path), _setting(graphs), placed_shipment(str(path), graphs, graphs.batch))]


def placed_shipment(name: str, graphs: PlacedGraphs, batch: int) -> Shipment:
    metadata = graphs.metadata
    placed = Placed(name, graphs.target, graphs.precision, batch, (), metadata.sequence, metadata.weight_bits)
    return ship(placed, _counted({part: graphs.folder / f"{part}.onnx" for part in graphs.graphs}))


def _counted(graphs: Mapping[str, Path]) -> dict[str, tuple[Path, int]]:
    return {part: (file, count_int8(load_graph(file))) for part, file in graphs.items()}


def _setting(graphs: PlacedGraphs) -> Setting:
    metadata = graphs.metadata
    file, spec = next(iter(graphs.graphs.values()))
    classes = number_of_classes(spec.outputs, metadata.postprocess)
    labels = known_labels(file, metadata)
    return Setting(metadata.task, metadata.preprocess, metadata.postprocess, metadata.sequence, labels, classes)


def _of_bundle(folder: Path, target: str | None, trust: Path | None) -> list[DeviceArtifact]:
    manifest = read_bundle(folder)
    verify_files(folder, manifest)
    signed_by(folder, trust)
    labels = tuple(read_labels(folder, manifest) or ())
    return [_of_engine(folder, manifest, engine, labels) for engine in select_engines(manifest, target or "auto")]


def _of_engine(folder: Path, manifest: Manifest, engine: EngineSpec, labels: tuple[str, ...]) -> DeviceArtifact:
    classes = number_of_classes(engine.outputs, manifest.postprocess)
    setting = Setting(manifest.task, manifest.preprocess, manifest.postprocess, engine.sequence, labels, classes)
    name = f"{folder}:{engine.artifact}"
    files = {part.part: folder / part.graph for part in engine.parts or (engine,)}
    precision = graph_metadata(next(iter(files.values()))).precision or "fp32"  # what it was placed for
    placed = Placed(name, engine.target, precision, engine.batch, (), engine.sequence, engine.weight_bits)
    built = engine_is_code(engine) and not engine.parts
    return DeviceArtifact(name, setting, ship(placed, _counted(files), (engine, folder) if built else None))
