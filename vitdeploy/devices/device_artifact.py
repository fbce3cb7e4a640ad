"""The artifact that is sent to a device for a name on the command line: its placement, never an engine made here.

Nothing is compiled here, so that a target's runtime need not be installed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.bundle.read import MANIFEST_FILE
from vitdeploy.devices.agent.documents import PlacedArtifact
from vitdeploy.devices.shipment import Shipment, ship
from vitdeploy.errors import InputError, quoted
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import admitted_metadata, load_graph
from vitdeploy.pipeline.early import default_target, kind_of, new_folder, open_bundle
from vitdeploy.pipeline.setting import engine_setting, graph_setting
from vitdeploy.runtime.backend import engine_is_code
from vitdeploy.runtime.choice import select_engines
from vitdeploy.runtime.golden import golden_files
from vitdeploy.search.rows import in_parts
from vitdeploy.spec import EngineSpec, Manifest, Precision, WeightBits
from vitdeploy.stages.step import MODEL_FILE, find_graph
from vitdeploy.tasks.adapter import Setting
from vitdeploy.workflows.placement import PlacedGraphs, place_graphs
from vitdeploy.workflows.seeded import golden_folder, seeded_answers


@dataclass(frozen=True)
class DeviceArtifact:
    """One artifact, how its inputs and outputs are read, and what of it goes to a device. `accepted`: entries of the
    table of runtimes known to be wrong that a bundle's engine was compiled in spite of."""

    name: str
    setting: Setting
    shipment: Shipment
    accepted: tuple[str, ...] = ()


def find_device_artifacts(
    text: str, *, target: str | None, work: Path, trust: Path | None = None, golden: bool = False
) -> list[DeviceArtifact]:
    """Every engine of a bundle (or the one for `target`), or a graph, which is placed in a new folder of `work`. With
    `golden`, an engine must give its golden answers there: those of its bundle, or of its graph (`seeded`).

    Raises:
        InputError: an original, which no device can run. Errors of reading propagate.
    """
    path, kind = Path(text), kind_of(text)
    if kind == "bundle":
        return _of_bundle(path, target, trust, golden, work)
    if kind == "model":
        raise InputError(
            f"{text} is a model, and devices run what was made of one",
            wanted="with --on: bundles, graphs of `vitdeploy export` or `vitdeploy quantize`",
            fix=f"vitdeploy export {quoted(text)} -o DIR, then give DIR",
        )
    file = find_graph(path)
    graphs = place_graphs(file, target or default_target(file), None, new_folder(work, "placed"))
    first, spec = next(iter(graphs.graphs.values()))
    setting = graph_setting(first, graphs.metadata, spec)
    answers = _seeded(graphs, new_folder(work, "golden")) if golden else {}
    return [DeviceArtifact(str(path), setting, placed_shipment(str(path), graphs, graphs.batch, answers))]


def placed_shipment(name: str, graphs: PlacedGraphs, batch: int, golden: Mapping[str, Path] | None = None) -> Shipment:
    files = {part: graphs.folder / f"{part}.onnx" for part in graphs.graphs}
    precision, bits, own = _placed_in(files)
    placed = PlacedArtifact(
        name, graphs.target, precision, batch, (), graphs.metadata.sequence, bits, row_parts=graphs.row_parts
    )
    return ship(placed, _counted(files), None, own, golden)


def _seeded(graphs: PlacedGraphs, folder: Path) -> dict[str, Path]:
    """Golden answers of a graph alone, whose part of images is its first."""
    seeded = seeded_answers(graphs.folder / f"{next(iter(graphs.graphs))}.onnx", graphs.target)
    return {} if seeded.why else golden_folder(seeded, graphs.target, folder)


def _placed_in(files: Mapping[str, Path]) -> tuple[Precision, WeightBits | None, dict[str, Precision] | None]:
    """The precision that the graphs were placed for, INT8 where one was; the bits of INT8 weights; and the precision of
    each, where they differ."""
    read = {part: admitted_metadata(file) for part, file in files.items()}
    own: dict[str, Precision] = {part: metadata.precision or "fp32" for part, metadata in read.items()}
    whole: Precision = "int8" if "int8" in own.values() else next(iter(own.values()))
    bits = next((metadata.weight_bits for metadata in read.values() if metadata.weight_bits is not None), None)
    return whole, bits, own if len(set(own.values())) > 1 else None


def _counted(graphs: Mapping[str, Path]) -> dict[str, tuple[Path, int]]:
    return {part: (file, count_int8(load_graph(file))) for part, file in graphs.items()}


def _golden(folder: Path, manifest: Manifest, engine: EngineSpec) -> dict[str, Path]:
    """What the device compares the engine that it builds with; nothing of a bundle without golden answers."""
    names = golden_files(manifest, engine)
    return {name: folder / name for name in (MANIFEST_FILE, *names)} if names else {}


def _of_bundle(folder: Path, target: str | None, trust: Path | None, golden: bool, work: Path) -> list[DeviceArtifact]:
    manifest, labels = open_bundle(folder, trust)
    return [
        _of_engine(folder, manifest, engine, labels, _golden(folder, manifest, engine) if golden else {}, work)
        for engine in select_engines(manifest, target or "auto")
    ]


def _of_engine(
    folder: Path,
    manifest: Manifest,
    engine: EngineSpec,
    labels: tuple[str, ...],
    golden: Mapping[str, Path],
    work: Path,
) -> DeviceArtifact:
    name = f"{folder}:{engine.artifact}"
    files = {part.part: folder / part.graph for part in engine.parts or (engine,)}
    if engine.row_parts is not None:  # as the bundle's own files compute them
        files = {engine.part: new_folder(work, "rows") / MODEL_FILE}
        in_parts(folder / engine.graph, engine.row_parts, files[engine.part])
    precision, _, own = _placed_in(files)
    placed = PlacedArtifact(
        name,
        engine.target,
        precision,
        engine.batch,
        (),
        engine.sequence,
        engine.weight_bits,
        row_parts=engine.row_parts,
        float_rest=engine.float_rest,
    )
    built = engine_is_code(engine) and not engine.parts
    return DeviceArtifact(
        name,
        engine_setting(folder, manifest, engine, labels),
        ship(placed, _counted(files), (engine, folder) if built else None, own, golden),
        engine.accepted or (),
    )
